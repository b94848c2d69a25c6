"""A fuzz campaign against one worker process on a real server, and what came of it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from support_fuzz_entries import Hostile, is_valid
from support_invariants import check_invariants
from support_snapshot import take_snapshot
from support_worker_process import Pool, WorkerProcess, eventually
from tokenmill.keys import GROUP
from tokenmill.protocol import TERMINAL_STATES, ErrorCode
from tokenmill.ready import create_groups
from tokenmill.replies import EnqueueStatus
from tokenmill.scripts import run

PLACEHOLDER = "the body goes here"
BATCH = 250
#: Requests that are in order, between the others.
NEIGHBOURS_PER_BATCH = 5
NEIGHBOUR_TOKENS = 4
#: A reader that takes this many entries of a batch and is never heard of again. Not in every batch:
#: what it took comes back after a lease.
GHOST, GHOST_READS, GHOST_BATCHES = "ghost", 3, 16
ENDS_WITHIN_S = 60.0
#: Of the campaign; caches, arenas and the interpreter's own pools have grown by then.
WARM_UP = 0.25


@dataclass
class Report:
    """`outcomes` by state and code; `rss_bytes` after each batch."""

    outcomes: Counter[str] = field(default_factory=Counter)
    rss_bytes: list[int] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rss_growth_bytes(self) -> int:
        """From after the warm-up to the end; medians of three samples, one is a matter of luck."""
        warm = self.rss_bytes[int(len(self.rss_bytes) * WARM_UP) :]
        return _median(warm[-3:]) - _median(warm[:3])

    def lines(self) -> list[str]:
        total = sum(self.outcomes.values())
        rows = [f"{count:7d}  {name}" for name, count in sorted(self.outcomes.items())]
        first, last = self.rss_bytes[0] / 2**20, self.rss_bytes[-1] / 2**20
        growth = self.rss_growth_bytes / 2**10
        return [
            f"{total:7d}  sent in {self.seconds:.1f} s, {len(self.stuck)} stuck",
            *rows,
            f"worker's RSS: {first:.1f} MiB at first, {last:.1f} MiB at last, "
            f"{growth:+.0f} KiB after the warm-up ({len(self.rss_bytes)} samples)",
        ]


class Campaign:
    """Sends in batches, and waits for the end of each before the next."""

    def __init__(self, pool: Pool, worker: WorkerProcess) -> None:
        self._pool = pool
        self._worker = worker
        self._number = 0
        self.report = Report()
        create_groups(pool.client, pool.keys)

    def run(self, entries: Iterable[Hostile]) -> Report:
        began_s = time.monotonic()
        rest = iter(entries)
        while batch := list(islice(rest, BATCH)):
            self._run_batch(batch)
        self.report.seconds = time.monotonic() - began_s
        return self.report

    def check_end(self) -> None:
        """The worker ends in an orderly way, and the whole keyspace is in order."""
        eventually(self._pool.is_clean)
        assert self._worker.terminate() == os.EX_OK
        check_invariants(take_snapshot(self._pool.client, self._pool.keys), self._pool.keys,
            self._pool.calls.policy)  # fmt: skip

    def _run_batch(self, batch: Sequence[Hostile]) -> None:
        expected: dict[str, bytes] = {}
        neighbours = [f"good-{self._number}-{n}" for n in range(NEIGHBOURS_PER_BATCH)]
        for position, hostile in enumerate(batch):
            if position % (BATCH // NEIGHBOURS_PER_BATCH) == 0 and neighbours:
                self._pool.submit(neighbours.pop(), max_tokens=NEIGHBOUR_TOKENS)
            self._send(hostile, expected)
            self._number += 1
        good = [f"good-{self._number - len(batch)}-{n}" for n in range(NEIGHBOURS_PER_BATCH)]
        for request_id in good[len(neighbours) :]:
            self._pool.check_transcript(request_id, "hello", 7, NEIGHBOUR_TOKENS)
        self._await_ends(expected)
        self._sort_out(expected)
        self.report.rss_bytes.append(rss_bytes(self._worker.process.pid))

    def _send(self, hostile: Hostile, expected: dict[str, bytes]) -> None:
        if hostile.body is not None:
            request_id = f"fuzz-{self._number}"
            call = self._pool.calls.enqueue(request_id, body=PLACEHOLDER)
            args = tuple(hostile.body if arg == PLACEHOLDER else arg for arg in call.args)
            reply = run(self._pool.client, replace(call, args=args))
            if reply.status is EnqueueStatus.OK:
                expected[request_id] = hostile.body
            else:
                self.report.outcomes[f"refused at the door: {reply.status}"] += 1
            return
        client: Any = self._pool.client
        stream = self._pool.keys.ready("r012"[self._number % 4])
        words = [word for pair in hostile.fields for word in pair]
        with client.pipeline(transaction=True) as pipe:
            pipe.execute_command("XADD", stream, "*", *words)
            if self._number % (GHOST_BATCHES * BATCH) < GHOST_READS:
                pipe.xreadgroup(GROUP, GHOST, {stream: ">"}, count=1)
            pipe.execute()
        request_id = hostile.admissible_id
        if request_id is None:
            self.report.outcomes["no request: dropped"] += 1
        else:
            expected[request_id] = dict(hostile.fields)[b"body"]

    def _await_ends(self, expected: dict[str, bytes]) -> None:
        """What has not ended in time is stuck."""
        waiting = list(expected)
        give_up_at = time.monotonic() + ENDS_WITHIN_S
        while waiting and time.monotonic() < give_up_at:
            assert self._worker.process.poll() is None, "the worker is gone"
            states = [record[0] for record in self._records(waiting)]
            pairs = zip(waiting, states, strict=True)
            waiting = [name for name, state in pairs if state not in TERMINAL_STATES]
            time.sleep(0.01)
        self.report.stuck += waiting

    def _sort_out(self, expected: dict[str, bytes]) -> None:
        records = self._records(list(expected))
        for (request_id, body), (state, code) in zip(expected.items(), records, strict=True):
            self.report.outcomes[f"{state} {code or ''}".rstrip()] += 1
            if state == "done":
                assert is_valid(body), f"{request_id} was served: {body[:200]!r}"
            else:
                assert code in get_args(ErrorCode), f"{request_id}: {state} {code}"

    def _records(self, request_ids: Sequence[str]) -> list[Any]:
        with self._pool.client.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                pipe.hmget(self._pool.keys.record(request_id), ["state", "code"])
            return pipe.execute()


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
