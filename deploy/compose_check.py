"""Start the compose file for real, stream ten requests to it from outside, and take it down.

`python deploy/compose_check.py` needs a Docker engine, `docker compose` or `docker-compose` (or
what `--compose` names), and this project installed. Exits with 1 if a request does not come to its
end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tokenmill import Client, SamplingParams, TokenmillError

REPOSITORY = Path(__file__).resolve().parent.parent
NUM_WORKERS = 2
NUM_REQUESTS = 10
MAX_TOKENS = 24
DEADLINE_S = 300.0
SUBJECTS = ("the sea", "a lighthouse", "bread", "the moon", "a fox", "rain", "a clock", "iron")


@dataclass(frozen=True, slots=True)
class Compose:
    """`command` is either generation of Compose; the project's name keeps runs apart."""

    command: Sequence[str]
    project: str
    environment: dict[str, str]

    def run(self, *arguments: str) -> None:
        line = [*self.command, "--project-name", self.project, *arguments]
        say(" ".join(line))
        subprocess.run(line, cwd=REPOSITORY, env=self.environment, check=True)


def find_compose() -> list[str]:
    """Compose v2 if the docker command has it, else docker-compose."""
    if shutil.which("docker"):
        probe = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if probe.returncode == 0:
            return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise SystemExit("neither `docker compose` nor `docker-compose` is installed")


def main() -> int:
    parser = argparse.ArgumentParser(description="Start the compose file and stream to it")
    parser.add_argument("--compose", help="command to use, such as 'docker compose'")
    parser.add_argument("--no-build", action="store_true", help="take the image as it is")
    arguments = parser.parse_args()
    command = shlex.split(arguments.compose) if arguments.compose else find_compose()
    port = _free_port()
    threads = max(1, (os.cpu_count() or 1) // NUM_WORKERS)
    environment = {
        "TOKENMILL_NUM_THREADS": str(threads),  # the workers share this machine's cores
        **os.environ,
        "TOKENMILL_REDIS_PORT": str(port),
    }
    compose = Compose(command, f"tokenmill-check-{os.getpid()}", environment)
    try:
        if not arguments.no_build:
            compose.run("build")
        compose.run("up", "--detach", "--scale", f"worker={NUM_WORKERS}")
        num_failed = _stream_all(f"redis://127.0.0.1:{port}/0")
        compose.run("ps")
    finally:
        compose.run("logs", "--no-color")
        compose.run("down", "--volumes")
    say(f"{NUM_REQUESTS - num_failed} passed, {num_failed} failed")
    return 1 if num_failed else 0


def _stream_all(redis_url: str) -> int:
    """Stream all requests at once; returns how many did not produce all their tokens."""
    with Client(redis_url) as client, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return sum(pool.map(lambda number: not _stream(client, number), range(NUM_REQUESTS)))


def _stream(client: Client, number: int) -> bool:
    prompt = f"A story about {SUBJECTS[number % len(SUBJECTS)]}, part {number + 1}:"
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    try:
        with client.stream(prompt, deadline_s=DEADLINE_S, sampling_params=params) as stream:
            deltas = list(stream)
            completion = stream.completion()
    except TokenmillError as error:
        say(f"{number + 1:2}: {error}")
        return False
    say(f"{number + 1:2}: {len(deltas)} deltas, {completion.finish_reason}: {completion.text!r}")
    return len(completion.token_ids) == MAX_TOKENS and "".join(deltas) == completion.text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
