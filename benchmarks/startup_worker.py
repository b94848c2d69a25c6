"""How long a Tokenmill worker takes to be ready, beside a server that runs already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tokenmill.embedded import EmbeddedServer

from .contestant import Options, main
from .end_to_end import ready_worker
from .measure import Job
from .startup import startup_jobs


@contextmanager
def start(options: Options) -> Iterator[Mapping[str, Job]]:
    with EmbeddedServer() as server:
        yield startup_jobs(lambda environment: ready_worker(options, server.url, environment))


if __name__ == "__main__":
    main("A Tokenmill worker, from its start to ready", start)
