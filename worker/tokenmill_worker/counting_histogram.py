"""A histogram that takes the same value many times at once, for what is measured per token."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class CountingHistogram(Collector):
    """Register it. `buckets` are upper bounds, inclusive and ascending; the last is +Inf.

    prometheus_client's own histogram takes one value at a time: two microseconds for each token
    where a whole step has one value.
    """

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], *, labels: Mapping[str, str]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._bounds = (*buckets, float("inf"))
        self._counts = [0] * len(self._bounds)  # not cumulative
        self._sum = 0.0
        self._lock = threading.Lock()  # the endpoint reads on another thread

    def observe(self, value: float, count: int = 1) -> None:
        """`value` was measured `count` times."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += count
            self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        with self._lock:
            totals, total_value = list(accumulate(self._counts)), self._sum
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        names = map(floatToGoString, self._bounds)
        family.add_metric(
            tuple(self._labels.values()),
            buckets=list(zip(names, map(float, totals), strict=True)),
            sum_value=total_value,
        )
        yield family
