"""The Tokenmill engine: continuous batching of a transformers model over a paged KV cache.

Knows nothing of Redis or of the wire. Nothing is re-exported here, so that importing the scheduler
or the block pool does not load torch; the library's front door is `tokenmill_engine.llm`.
"""
