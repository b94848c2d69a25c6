"""The containers of one run of the compose file."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
#: Loading a model on a machine that is busy with other things.
PATIENCE_S = 600.0
#: The user of the official Redis image.
REDIS_USER = "999:999"


class CheckFailed(Exception):
    """What was expected did not happen."""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def expect(condition: object, what: str) -> None:
    """One line for what holds; raises `CheckFailed` for what does not."""
    if not condition:
        raise CheckFailed(what)
    say(f"   ok: {what}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find_compose() -> list[str]:
    """Compose v2 if the docker command has it, else docker-compose."""
    if shutil.which("docker"):
        probe = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if probe.returncode == 0:
            return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise SystemExit("neither `docker compose` nor `docker-compose` is installed")


def docker(*arguments: str, check: bool = True) -> str:
    """The output of a docker command."""
    done = subprocess.run(["docker", *arguments], check=check, capture_output=True, text=True)
    return (done.stdout + ("" if check else done.stderr)).strip()


@dataclass(frozen=True, slots=True)
class Stack:
    """`command` is either generation of Compose; the project's name keeps runs apart."""

    command: Sequence[str]
    project: str
    environment: dict[str, str]

    def line(self, *arguments: str) -> list[str]:
        return [*self.command, "--project-name", self.project, *arguments]

    def compose(self, *arguments: str) -> None:
        say(f"   $ {shlex.join([*self.command, *arguments])}")
        done = subprocess.run(
            self.line(*arguments),
            cwd=REPOSITORY,
            env=self.environment,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise CheckFailed(f"{arguments[0]} failed: {done.stdout[-2000:]}")

    def output(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            self.line(*arguments),
            cwd=REPOSITORY,
            env=self.environment,
            check=check,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def containers(self, service: str = "worker") -> list[str]:
        """Ids of the running containers of a service."""
        return docker(
            "ps", "--quiet", "--no-trunc",
            "--filter", f"label=com.docker.compose.project={self.project}",
            "--filter", f"label=com.docker.compose.service={service}",
            "--filter", "label=com.docker.compose.oneoff=False",
        ).split()  # fmt: skip

    def prepare_volume(self) -> None:
        """The official image brings /data with its owner; a stand-in may have none."""
        volume = f"{self.project}_redis-data"
        image = self.environment["REDIS_IMAGE"]
        docker("run", "--rm", "--volume", f"{volume}:/data", "--entrypoint", "chown", image,
               REDIS_USER, "/data")  # fmt: skip

    def await_healthy(self, number: int, service: str = "worker") -> list[str]:
        """Wait until `number` containers run and all are healthy; returns them."""
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            found = self.containers(service)
            healths = [_health(container) for container in found]
            if len(found) == number and set(healths) == {"healthy"}:
                return found
            if time.monotonic() > give_up_at:
                raise CheckFailed(f"{service}: {number} healthy ones expected, found {healths}")
            time.sleep(0.5)

    def cli(self, *arguments: str) -> str:
        return self.output("run", "--rm", "-T", "cli", *arguments)

    def worker_ids(self) -> list[str]:
        """Ids of the workers that have a card in the queue."""
        cards = json.loads(self.cli("queue", "--json"))["workers"]
        return [str(card["id"]) for card in cards]

    def take_down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans")

    def logs(self) -> str:
        return self.output("logs", "--no-color", "--tail", "60", check=False)


def _health(container: str) -> str:
    return docker("inspect", "--format", "{{.State.Health.Status}}", container, check=False)


def own_environment(secrets: Path, port: int, threads: int) -> dict[str, str]:
    """What the compose file reads, apart from what the caller has set."""
    return {
        "REDIS_IMAGE": "redis:7.0-bookworm",
        "TOKENMILL_NUM_THREADS": str(threads),  # the workers share this machine's cores
        "TOKENMILL_LEASE_MS": "6000",
        # Transcripts are compared token by token; in bfloat16 a near tie falls as its batch is.
        "TOKENMILL_DTYPE": "float32",
        **os.environ,
        "TOKENMILL_REDIS_PORT": str(port),
        "TOKENMILL_SECRETS_DIR": str(secrets),
    }
