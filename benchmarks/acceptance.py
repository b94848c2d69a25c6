"""What is promised about speed: ratios of two contestants in the same run, and the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .report import Outcome, pair_ratios

#: Fewer pairs than this are shown, and said to be too few.
LEAST_PAIRS = 3


@dataclass(frozen=True, slots=True)
class Line:
    """`must` and `aim` bound the ratio `over` ÷ `under` from below, or from above where
    `lower` is set."""

    name: str
    job: str
    figure: str
    over: str
    under: str
    must: float
    aim: float
    lower: bool = False

    def meets(self, ratio: float, bound: float) -> bool:
        return ratio <= bound if self.lower else ratio >= bound

    @property
    def title(self) -> str:
        return f"{self.job} {self.figure}, {self.over} / {self.under}"


def _latency(figure: str, aim: float = 1.0) -> Line:
    return Line(
        "c", "stream64", figure, "tokenmill-queue", "vllm-server", must=1.0, aim=aim, lower=True
    )


LINES = (
    Line("a", "mixed64", "output_tok_s", "tokenmill", "vllm", 1.05, 1.25),
    Line("a2", "mixed64", "output_tok_s", "tokenmill", "openvino", 1.0, 1.2),
    Line("b", "stream64", "output_tok_s", "tokenmill-queue", "vllm-server", 1.5, 1.9),
    _latency("ttft_p50_s"),
    _latency("ttft_p99_s"),
    _latency("itl_p50_ms"),
    _latency("itl_p99_ms", aim=0.3),
    Line("d", "single", "single_tok_s", "tokenmill", "vllm", 1.0, 1.15),
    Line("e", "decode64", "decode_step_ms", "vllm", "tokenmill", 1.1, 1.3),
    Line("f", "prefill", "prefill_tok_s", "tokenmill", "vllm", 0.97, 1.1),
    Line("g", "mixed64", "output_tok_s", "tokenmill", "transformers", 7, 10),
    Line("h", "prefix64", "output_tok_s", "tokenmill", "vllm", 1.0, 1.2),
    Line("i", "startup", "warm_ready_s", "vllm-startup", "tokenmill-startup", 6, 10),
    Line("i", "startup", "first_ready_s", "vllm-startup", "tokenmill-startup", 2, 5),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A line and the ratios of its pairs: at least one."""

    line: Line
    ratios: Sequence[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def meets_must(self) -> bool:
        return self.line.meets(self.ratio, self.line.must)

    @property
    def meets_aim(self) -> bool:
        return self.line.meets(self.ratio, self.line.aim)


def verdicts(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
    """Those whose two contestants met in some round."""
    for line in LINES:
        if ratios := pair_ratios(outcomes, line.job, line.figure, line.over, line.under):
            yield Verdict(line, ratios)


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per promise; empty where no two contestants met."""
    lines = [_row(verdict) for verdict in verdicts(outcomes)]
    if not lines:
        return ""
    header = f"{'':3} {'ratio of a round':55} {'median':>7}  {'range':15} {'must':>10} {'aim':>10}"
    return "\n".join([header, "-" * len(header), *lines])


def _row(verdict: Verdict) -> str:
    line, ratios = verdict.line, verdict.ratios
    sign = "≤" if line.lower else "≥"
    must = f"{sign} {line.must:g} {'ok' if verdict.meets_must else 'NO'}"
    aim = f"{sign} {line.aim:g} {'ok' if verdict.meets_aim else 'no'}"
    spread = f"{min(ratios):.3g} to {max(ratios):.3g}"
    few = "" if len(ratios) >= LEAST_PAIRS else f"  only {len(ratios)} of {LEAST_PAIRS} pairs"
    figures = f"{verdict.ratio:>7.3g}  {spread:15} {must:>10} {aim:>10}"
    return f"{line.name:3} {line.title:55} {figures}{few}"
