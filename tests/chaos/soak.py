"""The soak: steady load, random faults, and curves that must stay flat. `make soak`."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import click

from chaos.checks import POLICY, Verdict, check_rest
from chaos.load import LONG_TOKENS, RETENTION_MS
from chaos.rig import Rig, build_rig
from chaos.soak_faults import Faults
from chaos.svg import Panel, chart
from chaos.table import Row
from support_worker_process import TESTS, WorkerProcess, clean_environment, eventually
from tokenmill._redis_errors import REDIS_ERRORS
from tokenmill.keys import GROUP
from tokenmill.record import RECORD_FIELDS

STREAMS = 16
STEP_S = 0.02
#: A stream that was left while Redis was away is cancelled by nobody: it runs to its end.
OUTLAST_S = 60 + 1.5 * LONG_TOKENS * STEP_S
SAMPLE_EVERY_S = 1.0
PAUSE_S = 2.0
#: Between the second and the last quarter, a curve may grow by this share or this amount.
GROWTH = {"keys": (0.25, 100.0), "rss_mib": (0.10, 8.0)}


@dataclass(frozen=True)
class Sample:
    """Once a second. Memory is resident, in MiB."""

    second: float
    keys: int
    server_mib: float
    client_mib: float
    worker_mib: float
    ended: int
    tokens: int


class LoadProcess:
    """`load.py`, and the last thing that it said."""

    def __init__(self, url: str, rig: Rig, seed: int) -> None:
        keys = rig.pool.keys
        script = str(TESTS / "chaos" / "load.py")
        arguments = (url, keys.namespace, keys.pool, str(seed), str(STREAMS))
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        self.last: dict[str, Any] = {}
        self._thread = Thread(target=self._listen, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Its final counts, when the last stream has ended."""
        self.process.terminate()
        self.process.wait(timeout=120)
        self._thread.join(10)
        assert self.last.get("closed"), "the load process ended without its counts"
        return self.last

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last = json.loads(line)


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Soak:
    """One run; `report` is what is known at its end."""

    def __init__(self, folder: Path, *, seconds: float, seed: int) -> None:
        self.seconds, self.seed = seconds, seed
        self.samples: list[Sample] = []
        self.row = Row("soak")
        self.rig = build_rig(
            self.row,
            folder,
            append_only=True,
            # What is acknowledged is on the disk: then a killed server has lost nothing.
            extra_args=("--appendfsync", "always"),
        )
        # Without Redis a worker cannot start, nor hand over: both are said by an exit code.
        self.rig.allowed_exits |= {os.EX_UNAVAILABLE, os.EX_TEMPFAIL, -signal.SIGTERM}

    def run(self) -> dict[str, Any]:
        rig = self.rig
        self._links = rig.proxy(seed=self.seed), rig.proxy(seed=self.seed + 1)
        elder, *staff = rig.start("elder", "staff-a", "staff-b", **self._options)
        load = LoadProcess(self._links[1].url, rig, self.seed)
        self._elder, self._load = elder, load
        faults = Faults(rig, elder, staff, *self._links, self._start, self.seed)
        try:
            self._storm(faults)
            counts = load.stop()
        finally:
            load.process.kill()
        try:
            eventually(rig.pool.is_clean, OUTLAST_S)
        except AssertionError as error:
            raise AssertionError(f"left over: {self._left_over()}") from error
        rig.stop_workers()
        verdict = Verdict()
        hold_still(rig)
        check_rest(verdict, rig.views()[0], POLICY)
        return self._report(counts, faults, [*counts["wrong"], *verdict.wrong])

    def _left_over(self) -> dict[str, Any]:
        """Ids, states and counts of what did not end, and who should have seen to it."""
        redis, keys = self.rig.redis, self.rig.pool.keys
        ids = redis.zrange(keys.deadlines, 0, -1)[:20]
        return {
            "streams": {name: redis.xrange(key) for name, key in keys.ready_streams.items()},
            "pending": {n: redis.xpending(k, GROUP) for n, k in keys.ready_streams.items()},
            "owners": redis.hgetall(keys.owners),
            "delayed": redis.zrange(keys.delayed, 0, -1, withscores=True),
            "records": {i: redis.hmget(keys.record(i), RECORD_FIELDS) for i in ids},
            "histories": {i: redis.lrange(keys.history(i), 0, -1) for i in ids[:5]},
            "workers": {w.name: w.process.poll() for w in self.rig.pool.workers},
            "cards": self.rig.pool.cards(),
        }

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "redis_url": self._links[0].url,
            "step_s": STEP_S,
            "retention_s": RETENTION_MS / 1000,
        }

    def _start(self, name: str) -> WorkerProcess:
        return self.rig.pool.start(name, **self._options)

    def _storm(self, faults: Faults) -> None:
        began_s = time.monotonic()
        sampling = Thread(target=self._sample, args=(began_s,), daemon=True)
        sampling.start()
        eventually(lambda: self._load.last.get("tokens"), 60)
        while time.monotonic() < began_s + self.seconds:
            faults.inject()
            time.sleep(PAUSE_S)
        sampling.join(30)

    def _sample(self, began_s: float) -> None:
        due_s = began_s
        while time.monotonic() < began_s + self.seconds:
            due_s += SAMPLE_EVERY_S
            time.sleep(max(0.0, due_s - time.monotonic()))
            try:
                self.samples.append(self._take(time.monotonic() - began_s))
            except (*REDIS_ERRORS, RuntimeError):
                continue  # the server is away, on purpose

    def _take(self, second: float) -> Sample:
        last = self._load.last
        ended = sum(last.get(name, 0) for name in ("done", "cancelled", "expired"))
        return Sample(
            round(second, 1),
            keys=count_keys(self.rig),
            server_mib=rss_mib(self.rig.server.pid),
            client_mib=rss_mib(self._load.process.pid),
            worker_mib=rss_mib(self._elder.process.pid),
            ended=ended,
            tokens=last.get("tokens", 0),
        )

    def _report(self, counts: dict[str, Any], faults: Faults, wrong: list[str]) -> dict[str, Any]:
        names = ("keys", "server_mib", "client_mib", "worker_mib")
        growth = {name: self._growth(name) for name in names}
        steep = [name for name, (before, after) in growth.items() if is_steep(name, before, after)]
        wrong += [f"{name} grew from {growth[name][0]} to {growth[name][1]}" for name in steep]
        ended = {name: counts[name] for name in ("done", "cancelled", "expired")}
        return {
            "seconds": self.seconds,
            "seed": self.seed,
            "streams": sum(ended.values()),
            **ended,
            "tokens": counts["tokens"],
            "lost": counts["lost"],
            "duplicated": counts["duplicated"],
            "rewinds": counts["rewinds"],
            "faults": dict(sorted(Counter(kind for _, kind in faults.history).items())),
            "second_and_last_quarter": growth,
            "wrong": wrong,
            "faults_at": [(round(second, 1), kind) for second, kind in faults.history],
            "samples": [asdict(sample) for sample in self.samples],
        }

    def _growth(self, name: str) -> tuple[float, float]:
        """Medians of the second and of the last quarter of the run."""

        def median(first: float, last: float) -> float:
            values = [
                getattr(sample, name)
                for sample in self.samples
                if first * self.seconds <= sample.second <= last * self.seconds
            ]
            return round(statistics.median(values), 1)

        return median(0.25, 0.5), median(0.75, 1.0)


def is_steep(name: str, before: float, after: float) -> bool:
    share, amount = GROWTH["keys" if name == "keys" else "rss_mib"]
    return after > before + max(share * before, amount)


def hold_still(rig: Rig) -> None:
    """Nothing may expire while it is looked at: what is about to goes now, the rest stays."""
    keys, client = rig.pool.keys, rig.redis
    prefix = keys.record("")
    for name in list(client.scan_iter(f"{prefix}*", count=1000)):
        request_id = name.removeprefix(prefix)
        parts = (name, keys.log(request_id), keys.history(request_id))
        if min(client.pttl(part) for part in parts) < RETENTION_MS / 4:
            client.delete(*parts)
        else:
            for part in parts:
                client.pexpire(part, POLICY.retention_ms)


def count_keys(rig: Rig) -> int:
    """On a connection of its own: the other belongs to the thread that injects faults."""
    with rig.connect() as client:
        return int(client.dbsize())


def picture(report: dict[str, Any]) -> str:
    samples = [Sample(**sample) for sample in report["samples"]]
    faults = sum(report["faults"].values())
    title = (
        f"{report['seconds']:g} s, {faults} faults (red), {report['streams']} streams, "
        f"{report['tokens']} tokens: {report['lost']} lost, {report['duplicated']} twice"
    )
    rates = [
        (later.second, (later.tokens - sooner.tokens) / (later.second - sooner.second))
        for sooner, later in pairwise(samples)
    ]
    panels = [
        Panel("tokens delivered in a second", {"tokens": rates}),
        Panel("keys in Redis", {"keys": [(s.second, s.keys) for s in samples]}),
        Panel(
            "resident memory, MiB",
            {
                "a worker": [(s.second, s.worker_mib) for s in samples],
                "the client": [(s.second, s.client_mib) for s in samples],
                "the server": [(s.second, s.server_mib) for s in samples],
            },
        ),
    ]
    marks = [second for second, _ in report["faults_at"]]
    return chart(title, panels, seconds=report["seconds"], marks=marks)


def text(report: dict[str, Any]) -> Sequence[str]:
    hidden = ("samples", "faults_at", "wrong")
    lines = [f"{name}: {value}" for name, value in report.items() if name not in hidden]
    return [*lines, *(f"WRONG: {line}" for line in report["wrong"])]


@click.command()
@click.option("--seconds", default=600.0, show_default=True, help="How long.")
@click.option("--seed", default=7, show_default=True, help="Of the faults and the load.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=TESTS.parent / "docs" / "pictures",
    help="Folder for soak.json and soak.svg.",
)
def main(seconds: float, seed: int, out: Path) -> None:
    """Load and random faults; fails if anything is lost, repeated, or grows."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-soak-") as folder:
        soak = Soak(Path(folder), seconds=seconds, seed=seed)
        try:
            report = soak.run()
        finally:
            soak.rig.close()
    out.mkdir(parents=True, exist_ok=True)
    (out / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "soak.svg").write_text(picture(report))
    for line in text(report):
        click.echo(line)
    if report["wrong"] or report["lost"] or report["duplicated"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
