"""The stages of `benchmarks.device_check`."""
