"""Start the compose file for real, disturb it in every way it must bear, and take it down.

`python -m deploy.check` needs a Docker engine and `docker compose` or `docker-compose` (or what
`--compose` names). Twenty requests are streamed from a container; their transcripts of the
undisturbed round are what those of the later rounds must equal. Exits with 1 where one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from .load import Load, differences, kill, num_continued, run_load
from .stack import (
    REPOSITORY,
    CheckFailed,
    Stack,
    docker,
    expect,
    find_compose,
    free_port,
    own_environment,
    say,
)

MAX_TOKENS = 48
DEFAULT_USER_SEES = "NOAUTH"
ADDRESSES = (
    "import socket as s; "
    "print(len({each[4] for each in s.getaddrinfo('worker', 9400, type=s.SOCK_STREAM)}))"
)


class Check:
    """The steps, in order. `reference` holds the undisturbed transcripts."""

    def __init__(self, stack: Stack, secrets: Path) -> None:
        self._stack = stack
        self._secrets = secrets
        self._reference: dict[int, dict[str, object]] = {}

    def start(self) -> None:
        self._stack.prepare_volume()
        self._stack.compose("up", "--detach", "--scale", "worker=2", "redis", "model", "worker")
        self._stack.await_healthy(2)
        expect(len(self._stack.worker_ids()) == 2, "two workers are healthy and have their cards")

    def look_at_the_containers(self) -> None:
        worker, redis = self._stack.containers()[0], self._stack.containers("redis")[0]
        expect(docker("exec", worker, "id", "-u") == "10001", "the worker is user 10001")
        expect(docker("exec", redis, "id", "-u") == "999", "Redis is user 999")
        for container, name in ((worker, "worker"), (redis, "redis")):
            refused = docker("exec", container, "sh", "-c", "echo > /opt/x", check=False)
            expect("Read-only file system" in refused, f"the root of {name} is read-only")
        facts = docker("inspect", worker, redis)
        for user in ("worker", "producer", "metrics"):
            password = (self._secrets / user).read_text()
            expect(password not in facts, f"no password of {user} in `docker inspect`")
        answer = docker("exec", redis, "redis-cli", "ping", check=False)
        expect(DEFAULT_USER_SEES in answer, "without a password Redis answers nobody")
        command = "REDISCLI_AUTH=$(cat /run/secrets/metrics) redis-cli --user metrics flushall"
        answer = docker("exec", redis, "sh", "-c", command, check=False)
        expect("NOPERM" in answer, "the metrics user must not delete")

    def stream_undisturbed(self) -> None:
        found = run_load(self._stack, MAX_TOKENS)
        wrong = differences(found, found)
        for line in wrong:
            say(f"   {line}")
        expect(not wrong, "20 transcripts, each of them the sum of its deltas")
        tokens = [len(ids) for each in found.values() if isinstance(ids := each["token_ids"], list)]
        expect(set(tokens) == {MAX_TOKENS}, f"each has its {MAX_TOKENS} tokens")
        workers = {str(name) for each in found.values() for name in _names(each)}
        expect(len(workers) == 2, "both workers took part")
        self._reference = found
        say(f"   for example: {found[0]['text']!r}")

    def kill_a_worker(self) -> None:
        def disturb(load: Load) -> None:
            kill(load.busiest(self._stack.containers()))

        self._compare(run_load(self._stack, MAX_TOKENS, disturb), at_least=1)

    def scale_to_three(self) -> None:
        self._stack.compose(
            "up", "--detach", "--no-recreate", "--scale", "worker=3", "redis", "model", "worker"
        )
        self._stack.await_healthy(3)
        expect(len(set(self._stack.worker_ids())) >= 3, "three workers have their cards")
        found = run_load(self._stack, MAX_TOKENS)
        self._compare(found)
        workers = {str(name) for each in found.values() for name in _names(each)}
        expect(len(workers) == 3, "all three took part")

    def ask_the_exporter(self) -> None:
        self._stack.compose("up", "--detach", "--no-deps", "exporter")
        (container,) = self._stack.await_healthy(1, "exporter")
        told = json.loads(_get(container, "http://127.0.0.1:9400/scaling"))
        expect(told["workers"] == 3, f"as the metrics user it counts 3 workers: {told['workers']}")
        expect(told["backlog_seconds"] == 0, "and no work, now that all have ended")
        expect(told["tokens_per_s_is_measured"], f"speed of a worker: {told['tokens_per_s']:.0f}/s")
        found = docker("exec", container, "python", "-c", ADDRESSES)
        expect(found == "3", "its name server lists each worker, as Prometheus needs it")
        text = _get(container, "http://worker:9400/metrics")
        expect("vllm:generation_tokens_total{" in text, "a worker answers with its metrics")

    def roll(self) -> None:
        old = set(self._stack.containers())
        environment = {**self._stack.environment, "COMPOSE": shlex.join(self._stack.command)}
        rolled: list[int] = []

        def run_script() -> None:
            line = ["sh", "deploy/roll.sh", self._stack.project]
            say(f"   $ {shlex.join(line[:2])}")
            done = subprocess.run(
                line, cwd=REPOSITORY, env=environment, check=False, capture_output=True, text=True
            )
            rolled.append(done.returncode)
            if done.returncode:
                say(done.stderr)

        script = threading.Thread(target=run_script)
        script.start()
        rounds = continued = 0
        while script.is_alive() or not rounds:
            found = run_load(self._stack, MAX_TOKENS)
            rounds += 1
            continued += num_continued(found)
            wrong = differences(self._reference, found)
            expect(not wrong, f"round {rounds} of 20 while they are replaced: as undisturbed")
        script.join()
        expect(rolled == [0], "the script came to its end")
        new = set(self._stack.await_healthy(3))
        expect(not old & new, "three workers, none of them an old one")
        say(f"   {continued} requests were handed over in mid-stream")

    def restart_redis(self) -> None:
        def disturb(_load: Load) -> None:
            self._stack.compose("restart", "redis")

        self._compare(run_load(self._stack, MAX_TOKENS, disturb))

    def stop(self) -> None:
        self._stack.compose("stop", "worker")
        expect(not self._stack.worker_ids(), "stopped workers took their cards with them")

    def _compare(self, found: dict[int, dict[str, object]], at_least: int = 0) -> None:
        wrong = differences(self._reference, found)
        for line in wrong:
            say(f"   {line}")
        expect(not wrong, "all 20 transcripts are as undisturbed")
        continued = num_continued(found)
        expect(continued >= at_least, f"{continued} requests were continued by another worker")


def _names(transcript: dict[str, object]) -> list[object]:
    names = transcript["workers"]
    assert isinstance(names, list)
    return names


def _get(container: str, url: str) -> str:
    """What a URL answers inside of a container."""
    program = f"import urllib.request as r; print(r.urlopen('{url}', timeout=10).read().decode())"
    return docker("exec", container, "python", "-c", program)


def run_steps(check: Check) -> None:
    steps = (
        ("up with two workers", check.start),
        ("what the containers may", check.look_at_the_containers),
        ("twenty streams from a client's container", check.stream_undisturbed),
        ("a worker is killed in mid-stream", check.kill_a_worker),
        ("scale to three", check.scale_to_three),
        ("the exporter", check.ask_the_exporter),
        ("the workers are rolled under load", check.roll),
        ("Redis restarts in mid-stream", check.restart_redis),
        ("the workers are stopped", check.stop),
    )
    for number, (title, step) in enumerate(steps, 1):
        say(f"{number}. {title}")
        began_s = time.monotonic()
        step()
        say(f"   {time.monotonic() - began_s:.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description="Start the compose file and disturb it")
    parser.add_argument("--compose", help="command to use, such as 'docker compose'")
    parser.add_argument("--no-build", action="store_true", help="take the image as it is")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # take down what was started
    command = shlex.split(arguments.compose) if arguments.compose else find_compose()
    with tempfile.TemporaryDirectory(prefix="tokenmill-check-") as folder:
        secrets = Path(folder) / "secrets"
        subprocess.run(
            ["sh", "deploy/secrets.sh", str(secrets)],
            cwd=REPOSITORY,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        threads = max(1, (os.cpu_count() or 1) // 2)
        environment = own_environment(secrets, free_port(), threads)
        stack = Stack(command, f"tokenmill-check-{os.getpid()}", environment)
        try:
            if not arguments.no_build:
                say("0. build")
                stack.compose("build")
            run_steps(Check(stack, secrets))
        except (CheckFailed, subprocess.CalledProcessError) as error:
            say(stack.logs())
            say(f"FAILED: {error}")
            return 1
        finally:
            stack.take_down()
    say("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
