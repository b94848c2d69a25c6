"""How the queue grows: CPU time per token of Redis, of the workers and of the clients, and the time
until the streams of a killed worker go on; for 1 to 64 workers and up to 16,384 streams.

No model: what the engine would take is slept (`scale_fleet`). CPU times are of whole processes, so
a run holds everything: enqueue, leases, heartbeats, events, ends. Two lengths of answers tell the
cost of a request from that of a token. Results: a table, JSON, and a picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import environments, machine, scale_picture
from .contestant import progress
from .scale_model import Model, fit
from .scale_run import Row, Scenario, measure

RESULTS = environments.REPOSITORY / "benchmarks" / "results"


def main() -> None:
    arguments = _parse()
    if arguments.show:
        record = json.loads(arguments.show.read_text())
        _show(record, _rows(record["rows"]), arguments.picture)
        return
    busy = machine.busy_cores()
    rows = []
    for scenario in plan(arguments.quick, arguments.parts):
        rows.append(measure(scenario))
        progress(line(rows[-1]))
    record = {
        "machine": machine.describe(environments.REPOSITORY),
        "busy_cores": round(busy, 2),
        "rows": [asdict(row) for row in rows],
    }
    path = arguments.output or RESULTS / "scale.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    _show(record, rows, arguments.picture)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The queue under 1 to 64 workers, without a model")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--parts", help="comma-separated, as in streams,flush; default: all")
    parser.add_argument("--output", type=Path, help="JSON; default: benchmarks/results/scale.json")
    parser.add_argument("--picture", type=Path, help="SVG to write")
    parser.add_argument("--show", type=Path, help="JSON of an earlier run; nothing is run")
    return parser.parse_args()


def _rows(records: Iterable[dict[str, Any]]) -> list[Row]:
    return [Row(**{**each, "scenario": Scenario(**each["scenario"])}) for each in records]


def _show(record: dict[str, Any], rows: Sequence[Row], drawn: Path | None) -> None:
    print(header(), *map(line, rows), sep="\n")
    model = fit(rows)
    print(
        f"\nRedis, µs of CPU: {model.call_us:.1f} a call, {model.event_us:.2f} an event, "
        f"{model.request_us:.0f} a request; an idle worker {model.idle_ms_s:.2f} ms a second; "
        f"errors: median {model.median_error:.0%}, worst {model.worst_error:.0%}"
    )
    for batch in (8, 64, 128):
        print(_ends(model, batch))
    if drawn:
        facts = record["machine"]
        title = f"Redis and tokens, {facts['cpu']}, {str(facts['date'])[:10]}"
        drawn.write_text(scale_picture.picture(title, model, rows))


def _ends(model: Model, batch: int) -> str:
    """Where one core ends, for 16 workers and answers of 200 tokens."""
    shown = ", ".join(
        f"{per_event:g} tokens per event {ends:,.0f} tok/s"
        for per_event in (1, 4, 16)
        for ends in [
            model.tok_s_of_a_core(
                workers=scale_picture.WORKERS,
                batch=batch,
                tokens=scale_picture.ANSWER_TOKENS,
                tokens_per_event=per_event,
            )
        ]
    )
    return f"one Redis core ends, {batch} streams per worker: {shown}"


def plan(quick: bool = False, parts: str | None = None) -> list[Scenario]:
    """Each part changes one thing."""
    scenarios = _quick_plan() if quick else _whole_plan()
    return [each for each in scenarios if parts is None or each.name in parts.split(",")]


def _quick_plan() -> list[Scenario]:
    base = Scenario("streams", workers=1, streams=16, tokens=10, step_ms=50)
    killed = replace(base, name="recovery", workers=2, lease_ms=1500, tokens=30, kills=True)
    return [base, replace(base, name="workers", workers=2), killed]


def _whole_plan() -> list[Scenario]:
    streams = Scenario("streams", workers=4, streams=64, tokens=40, step_ms=250)
    workers = Scenario("workers", workers=1, streams=1024, tokens=40, step_ms=250)
    flush = Scenario("flush", workers=2, streams=256, tokens=200, step_ms=25)
    killed = Scenario(
        "recovery", workers=2, streams=256, tokens=60, step_ms=200, lease_ms=4000, kills=True
    )
    return [
        # More streams take longer steps, as on a machine that is full anyway.
        *(
            replace(
                streams, streams=n, step_ms=max(250, 0.36 * n), tokens=max(10, min(40, 81920 // n))
            )
            for n in (64, 256, 1024, 4096, 16_384)
        ),
        replace(streams, name="tokens", streams=1024, tokens=10),
        replace(streams, name="tokens", streams=1024, tokens=80),
        *(replace(workers, workers=n) for n in (1, 4, 16, 64)),
        *(replace(flush, flush_ms=n) for n in (0, 50, 100, 250)),
        *(replace(workers, name="partitions", workers=4, partitions=n) for n in (1, 2, 4, 8)),
        *(replace(workers, name="nodes", workers=4, partitions=16, nodes=n) for n in (1, 2, 4)),
        *(replace(killed, workers=n) for n in (2, 4, 16, 64)),
    ]


COLUMNS = (
    ("at once", "peak_streams", 8, 0),
    ("tok/s", "tok_s", 10, 0),
    ("tok/event", "tokens_per_event", 10, 2),
    ("redis µs", "redis_us", 10, 2),
    ("busiest", "busiest_node", 9, 2),
    ("worker µs", "workers_us", 10, 2),
    ("client µs", "client_us", 10, 2),
    ("redis MB", "redis_mb", 10, 1),
    ("idle redis ms/s", "idle_redis_ms_s", 16, 1),
    ("recovery s", "recovery_p50_s", 11, 2),
    ("longest s", "longest_gap_s", 10, 2),
)


def header() -> str:
    names = "".join(f"{title:>{width}}" for title, _, width, _ in COLUMNS)
    shape = f"{'part':10} {'workers':>7} {'streams':>7} {'flush':>5} {'parts':>5} {'nodes':>5}"
    return f"{shape} {'tokens':>6}{names}"


def line(row: Row) -> str:
    of = row.scenario
    figures = "".join(
        f"{getattr(row, name):{width}.{places}f}" for _, name, width, places in COLUMNS
    )
    shape = f"{of.name:10} {of.workers:>7} {of.streams:>7} {of.flush_ms:>5} {of.partitions:>5}"
    return f"{shape} {of.nodes:>5} {of.tokens:>6}{figures}"


if __name__ == "__main__":
    main()
