"""Throughput and latency of Tokenmill and its peers: the same workload on the same machine.

Run from the repository root: `python -m benchmarks.offline`, `python -m benchmarks.end_to_end`,
`python -m benchmarks.compare`. Nothing here is part of the installed distribution.
"""
