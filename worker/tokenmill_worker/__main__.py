"""`python -m tokenmill_worker` is `tokenmill worker`."""

from .commands.worker import worker

if __name__ == "__main__":
    worker(prog_name="python -m tokenmill_worker")
