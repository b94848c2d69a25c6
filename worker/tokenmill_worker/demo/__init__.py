"""The parts of `tokenmill demo`: worker processes, prompts, the live view and the figures."""
