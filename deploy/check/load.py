"""Twenty requests from a client's container, and what became of them."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .stack import REPOSITORY, CheckFailed, Stack, docker, say

NUM_REQUESTS = 20
#: The disturbance comes when so many requests have some, but not all, of their tokens.
ENOUGH_UNDER_WAY = 6


@dataclass(slots=True)
class Load:
    """One round of the requests; `under_way` has the workers of those that are in mid-stream."""

    transcripts: dict[int, dict[str, object]] = field(default_factory=dict)
    under_way: dict[int, str] = field(default_factory=dict)

    def take(self, line: dict[str, object]) -> None:
        number = int(str(line.pop("request")))
        if line.pop("event") == "mid":
            self.under_way[number] = str(line["worker"])
        else:
            self.under_way.pop(number, None)
            self.transcripts[number] = line

    def busiest(self, containers: list[str]) -> str:
        """The container that most of the requests under way are in: its name starts with its id."""
        counts = Counter(worker[:12] for worker in self.under_way.values())
        short = counts.most_common(1)[0][0]
        return next(container for container in containers if container.startswith(short))


def run_load(
    stack: Stack, max_tokens: int, disturb: Callable[[Load], None] | None = None
) -> dict[int, dict[str, object]]:
    """Stream all requests; `disturb` is called once, in mid-stream. Returns the transcripts."""
    client = REPOSITORY / "deploy" / "check" / "client.py"
    line = stack.line(
        "run", "--rm", "-T", "--volume", f"{client}:/check/client.py:ro", "--entrypoint", "python",
        "cli", "/check/client.py", str(NUM_REQUESTS), str(max_tokens),
    )  # fmt: skip
    load = Load()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            line,
            cwd=REPOSITORY,
            env=stack.environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for text in process.stdout:
            if not text.startswith("{"):
                continue
            load.take(json.loads(text))
            if disturb is not None and len(load.under_way) >= ENOUGH_UNDER_WAY:
                disturb(load)
                disturb = None
        process.wait()
        if process.returncode or len(load.transcripts) != NUM_REQUESTS:
            errors.seek(0)
            ended = f"{len(load.transcripts)} of {NUM_REQUESTS} requests ended"
            raise CheckFailed(f"{ended}: {errors.read()[-2000:]}")
    if disturb is not None:
        raise CheckFailed("the requests were over before they could be disturbed")
    return load.transcripts


def kill(container: str) -> None:
    say(f"   $ docker kill --signal KILL {container[:12]}")
    docker("kill", "--signal", "KILL", container)


def differences(
    reference: dict[int, dict[str, object]], found: dict[int, dict[str, object]]
) -> list[str]:
    """What is wrong with the transcripts, one line each; none if every one is as undisturbed."""
    wrong = []
    for number, expected in sorted(reference.items()):
        got = found[number]
        if "error" in got:
            wrong.append(f"request {number}: {got['error']}")
        elif not got["streamed"]:
            wrong.append(f"request {number}: the deltas are not the text")
        elif (got["token_ids"], got["text"]) != (expected["token_ids"], expected["text"]):
            wrong.append(f"request {number}: {got['text']!r} instead of {expected['text']!r}")
    return wrong


def num_continued(found: dict[int, dict[str, object]]) -> int:
    """Requests that more than one worker had a part in."""
    return sum(len(set(map(str, _list(each["workers"])))) > 1 for each in found.values())


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
