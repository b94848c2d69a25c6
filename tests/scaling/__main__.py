"""Compare signals for the autoscaler on one curve: a table, and a picture if a file is named.

PYTHONPATH=tests python -m scaling [PICTURE.svg]
"""

from __future__ import annotations

import sys
from pathlib import Path

from chaos.svg import Panel, chart
from scaling.autoscaler import lag, pending, work
from scaling.curve import duration_s
from scaling.simulate import Replay, replay, target_of_the_manifest


def signals() -> list[Replay]:
    return [
        replay("work", [work(target_of_the_manifest())]),
        replay("lag and pending", [lag(), pending()]),
        replay("lag alone", [lag()]),
    ]


def table(replays: list[Replay]) -> str:
    lines = [
        "| signal | first token p50 | p99 | worker hours | most workers | handed over "
        "| started again from nothing | unfinished |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in replays:
        p50_s, p99_s = each.wait_quantile_s(0.5), each.wait_quantile_s(0.99)
        cells = (
            each.name, f"{p50_s:.1f} s", f"{p99_s:.0f} s", f"{each.worker_hours:.1f}", each.most,
            each.handovers, each.restarts, each.unfinished,
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def picture(replays: list[Replay]) -> str:
    panels = [Panel("requests per second", {"arriving": replays[0].points["requests"]})]
    for title in ("replicas", "waiting", "running"):
        panels.append(Panel(title, {each.name: each.points[title] for each in replays}))
    return chart("One load curve, three signals (simulated)", panels, seconds=duration_s())


def main() -> None:
    replays = signals()
    sys.stdout.write(table(replays))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(picture(replays))


if __name__ == "__main__":
    main()
