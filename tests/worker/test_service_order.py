"""The order of service: resumed work, then class against age."""

from __future__ import annotations

import pytest

from tokenmill_worker.service_order import plan_reads


@pytest.mark.parametrize(
    ("ages_ms", "count", "plan"),
    [
        ({}, 4, []),
        ({"r": [], "0": [], "1": [], "2": []}, 4, []),
        ({"1": [3]}, 100, [("1", 100)]),  # alone: as many as there is room for
        ({"r": [0], "0": [90_000]}, 1, [("r", 1)]),
        ({"r": [0, 0], "0": [5], "2": [1]}, 3, [("r", 2), ("0", 1)]),
        ({"0": [1, 1], "1": [1], "2": [1]}, 4, [("0", 2), ("1", 1), ("2", 1)]),
        ({"0": [0], "1": [9_999]}, 1, [("0", 1)]),
        ({"0": [0], "1": [10_001]}, 1, [("1", 1)]),
        ({"0": [0], "2": [19_999]}, 1, [("0", 1)]),
        ({"0": [0], "2": [20_001]}, 1, [("2", 1)]),
        # Only the old ones of the low class come before the high one, not all of the class.
        ({"0": [0, 0], "2": [20_002, 20_001, 500]}, 3, [("2", 2), ("0", 1)]),
        ({"0": [7], "1": [10_007]}, 1, [("0", 1)]),  # a tie goes to the higher class
    ],
)
def test_who_is_read_first(
    ages_ms: dict[str, list[int]], count: int, plan: list[tuple[str, int]]
) -> None:
    assert list(plan_reads(ages_ms, count=count, aging_ms=10_000).items()) == plan


def test_low_work_is_served_within_the_bound_beside_endless_urgent_work() -> None:
    """One request is served every 100 ms, and two urgent ones arrive in that time."""
    aging_ms, now_ms = 1000, 0
    urgent: list[int] = []
    served_low_at_ms = None
    while served_low_at_ms is None:
        now_ms += 100
        urgent += [now_ms, now_ms]
        ages_ms = {"0": [now_ms - at for at in urgent[:8]], "2": [now_ms]}
        (served,) = plan_reads(ages_ms, count=1, aging_ms=aging_ms)
        if served == "2":
            served_low_at_ms = now_ms
        else:
            urgent.pop(0)
    # It ranks like urgent work that came two classes' worth of aging later: of that, there are 40
    # requests, each served in 100 ms.
    assert served_low_at_ms <= 2 * aging_ms + 40 * 100 + 100
