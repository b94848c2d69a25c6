"""In which order waiting requests are served: resumed ones first, then by priority and age."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

#: Resumed work was admitted once already, and somebody is in the middle of its answer.
RESUMED = "r"


def plan_reads(
    ages_ms: Mapping[str, Sequence[int]], *, count: int, aging_ms: int
) -> dict[str, int]:
    """How many entries to read from each ready class, beginning with the class served first.

    `ages_ms` holds the ages of the first waiting entries of each class. Every class that a request
    is lower costs it `aging_ms`: normal work (1) that has waited so long comes before high (0) that
    arrives now, low work (2) after twice that time. So nobody starves, whatever else arrives.

    When a single class waits, `count` are read from it, however few of its ages are known.
    """
    waiting = {ready_class: ages for ready_class, ages in ages_ms.items() if ages}
    if len(waiting) == 1:
        return dict.fromkeys(waiting, count)
    ranked = sorted(
        (_rank(ready_class, age_ms, aging_ms), ready_class)
        for ready_class, ages in waiting.items()
        for age_ms in ages
    )
    return dict(Counter(ready_class for _, ready_class in ranked[:count]))


def _rank(ready_class: str, age_ms: int, aging_ms: int) -> float:
    """Lowest first."""
    return -math.inf if ready_class == RESUMED else int(ready_class) * aging_ms - age_ms
