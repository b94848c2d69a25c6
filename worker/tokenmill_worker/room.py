"""How much room this worker has: the credit over its deliveries and the engine's latest figures."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill_engine.outputs import EngineStats

from .credit import Credit, HeldSize
from .delivery import AllDeliveries, Delivery


class Room:
    """Answers anew at every question; `stats` are the engine's after its latest step."""

    def __init__(
        self, max_num_seqs: int, deliveries: AllDeliveries, stats: Callable[[], EngineStats]
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._credit = Credit(max_num_seqs)
        self._deliveries = deliveries
        self._stats = stats

    def num_requests(self) -> int:
        """So many more may be leased now. Asked after every step of a worker that is full."""
        if len(self._deliveries) >= self._max_num_seqs:
            return 0
        return self._credit.num_requests(self._stats(), self._sizes())

    def tokens(self) -> int:
        """Of one more request that would find room."""
        return self._credit.room_tokens(self._stats(), self._sizes())

    def expected_tokens(self, delivery: Delivery) -> int:
        """Prompt and output of a held request when it will have ended."""
        return self._credit.expected_tokens(_size_of(delivery), self._stats())

    def learn(self, delivery: Delivery) -> None:
        """A request that ended well says how large requests are."""
        self._credit.observe(delivery.usage.prompt_tokens, delivery.num_output_tokens)

    def _sizes(self) -> list[HeldSize]:
        return [_size_of(delivery) for delivery in self._deliveries]


def _size_of(delivery: Delivery) -> HeldSize:
    num_tokens = delivery.num_output_tokens
    has_ended = delivery.ending is not None  # its blocks are free; its end is yet to be written
    return HeldSize(
        delivery.attempt_id,
        prompt_tokens=delivery.prompt_tokens or 0 if has_ended else delivery.prompt_tokens,
        output_tokens=num_tokens,
        max_tokens=num_tokens if has_ended else delivery.max_tokens,
        has_blocks=has_ended or delivery.latest is not None,
    )
