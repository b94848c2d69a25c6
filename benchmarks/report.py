"""Medians, ratios within a round, and the table that is printed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .measure import Figures

#: Whom a contestant is compared with, in the same round of the same job.
REFERENCE = {
    "tokenmill": "vllm",
    "openvino": "vllm",
    "transformers": "vllm",
    "tokenmill-queue": "vllm-server",
    "tokenmill-startup": "vllm-startup",
}
LOWER_IS_BETTER = ("_s", "_ms")
HIDDEN = ("duration_s", "steps")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `busy_cores` is what other processes used in the second before it."""

    contestant: str
    job: str
    round: int
    busy_cores: float
    figures: Figures


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per job, contestant and figure: median, range, ratio to the reference."""
    header = f"{'job':11} {'contestant':17} {'figure':22} {'median':>9}  {'range':19} ratio"
    lines = [header, "-" * len(header)]
    for job, contestant in _unique((run.job, run.contestant) for run in outcomes):
        runs = [run for run in outcomes if (run.job, run.contestant) == (job, contestant)]
        for figure in runs[0].figures:
            if figure not in HIDDEN:
                lines.append(_line(job, contestant, figure, outcomes))
    return "\n".join(lines)


def _line(job: str, contestant: str, figure: str, outcomes: Sequence[Outcome]) -> str:
    values = list(_by_round(outcomes, job, contestant, figure).values())
    spread = f"{min(values):.4g} to {max(values):.4g}"
    ratio = median_ratio(outcomes, job, contestant, figure)
    shown = ""
    if ratio is not None:
        better = (ratio < 1) == _lower_is_better(figure)
        shown = f"{ratio:.2f} of {REFERENCE[contestant]}{'' if better else ' (behind)'}"
    median = statistics.median(values)
    return f"{job:11} {contestant:17} {figure:22} {median:>9.4g}  {spread:19} {shown}".rstrip()


def median_ratio(
    outcomes: Sequence[Outcome], job: str, contestant: str, figure: str
) -> float | None:
    """The median over rounds of own figure ÷ the reference's figure of the same round."""
    reference = REFERENCE.get(contestant)
    if reference is None:
        return None
    ratios = pair_ratios(outcomes, job, figure, contestant, reference)
    return statistics.median(ratios) if ratios else None


def pair_ratios(
    outcomes: Sequence[Outcome], job: str, figure: str, over: str, under: str
) -> list[float]:
    """One contestant's figure ÷ the other's of the same round, for each round that has both."""
    upper = _by_round(outcomes, job, over, figure)
    lower = _by_round(outcomes, job, under, figure)
    return [upper[turn] / lower[turn] for turn in upper if lower.get(turn)]


def _by_round(
    outcomes: Sequence[Outcome], job: str, contestant: str, figure: str
) -> dict[int, float]:
    return {
        run.round: run.figures[figure]
        for run in outcomes
        if (run.job, run.contestant) == (job, contestant) and figure in run.figures
    }


def _lower_is_better(figure: str) -> bool:
    return figure.endswith(LOWER_IS_BETTER) and not figure.endswith("tok_s")


def _unique(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(pairs))
