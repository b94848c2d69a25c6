"""Steady load for the soak, in a process of its own: `load.py URL NAMESPACE POOL SEED STREAMS`.

Prints its counts as a JSON line every second. SIGTERM: no new streams; it ends with the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
from collections import Counter

from chaos.audience import Request, Transcript
from chaos.checks import Verdict, check_oracle, check_stream
from tokenmill import AsyncClient
from tokenmill.calls import QueuePolicy
from tokenmill.errors import TokenmillError

RETENTION_MS = 10_000
#: Of those that nobody lets come to their end.
LONG_TOKENS = 4000
#: Of all streams, so many are left early by their reader, and so many have no time to end.
CANCELLED, LATE = 0.1, 0.1


class Load:
    """Keeps `streams` streams open, and counts what became of them."""

    def __init__(self, client: AsyncClient, seed: int, streams: int) -> None:
        self.counts: Counter[str] = Counter(
            dict.fromkeys(("done", "cancelled", "expired", "lost", "duplicated", "rewinds"), 0)
        )
        self.wrong: list[str] = []
        self._client = client
        self._random = random.Random(seed)
        self._streams = streams
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        reporting = asyncio.create_task(self._report_often())
        async with asyncio.TaskGroup() as group:
            for lane in range(self._streams):
                group.create_task(self._lane(lane))
        reporting.cancel()
        self.report(closed=True)

    def report(self, *, closed: bool = False) -> None:
        line = {**self.counts, "wrong": self.wrong[:10], "closed": closed}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    async def _report_often(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.report()

    async def _lane(self, lane: int) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            await self._one(f"soak-{lane}-{number}")

    async def _one(self, name: str) -> None:
        chance = self._random.random()
        tokens = self._random.randint(20, 120)
        if chance < LATE:
            request = Request(name, name, LONG_TOKENS, options={"deadline_s": 1.0})
            await self._read(request, leave_after=None)
        elif chance < LATE + CANCELLED:
            await self._read(Request(name, name, LONG_TOKENS), leave_after=tokens)
        else:
            tenant = f"tenant-{self._random.randint(0, 2)}"
            await self._read(Request(name, name, tokens, tenant), leave_after=None)

    async def _read(self, request: Request, *, leave_after: int | None) -> None:
        transcript = Transcript(request)
        try:
            async with (
                self._client.stream(request.prompt, **request.keywords) as stream,
                contextlib.aclosing(stream.events()) as events,
            ):
                async for event in events:
                    transcript.take(event)
                    if leave_after is not None and len(transcript.token_ids) >= leave_after:
                        break
        except TokenmillError as error:
            transcript.error = error
        self._judge(transcript, left_early=leave_after is not None)

    def _judge(self, transcript: Transcript, *, left_early: bool) -> None:
        verdict = Verdict()
        check_oracle(verdict, transcript)
        if left_early and transcript.error is None and not transcript.ends:
            self.counts["cancelled"] += 1
            verdict.lost += transcript.num_missing
        else:
            check_stream(verdict, transcript, rewinds=False)
            self.counts.update(verdict.statuses)
        self.counts["lost"] += verdict.lost
        self.counts["duplicated"] += transcript.num_repeated
        self.counts["rewinds"] += transcript.num_rewinds
        self.counts["tokens"] += len(transcript.token_ids)
        self.wrong += verdict.wrong


async def main(url: str, namespace: str, pool: str, seed: int, streams: int) -> None:
    policy = QueuePolicy(retention_ms=RETENTION_MS)
    async with AsyncClient(
        url, namespace=namespace, pool=pool, policy=policy, retry_for_s=30
    ) as client:
        load = Load(client, seed, streams)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, load.stop)
        await load.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])))
