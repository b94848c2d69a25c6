"""How large a step may be at present: as configured, and less for a while when memory ran out."""

from __future__ import annotations

from .config import SchedulerConfig

#: After so many steps without a failure, the limits grow by one part of `_PARTS`.
_STEPS_TO_GROW = 32
_PARTS = 4


class StepLimits:
    """`num_tokens` rows and `num_seqs` requests, at least 1 each; `num_seqs <= num_tokens`, so that
    every running request can decode in every step.

    The way down is halving: from any size, a step of one row is reached after a few failures. The
    way up is slow and in small parts, because each step that is too large costs preemptions.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.num_tokens = config.max_num_batched_tokens
        self.num_seqs = config.max_num_seqs
        self._good_steps = 0

    def halve(self, num_tokens: int, num_seqs: int) -> None:
        """Steps of `num_tokens` rows with `num_seqs` requests running are too large."""
        self._good_steps = 0
        self.num_tokens = max(1, num_tokens // 2)
        self.num_seqs = min(max(1, num_seqs // 2), self.num_tokens)

    def note_success(self) -> None:
        """A step of the present size did no harm."""
        config = self._config
        if (
            self.num_tokens == config.max_num_batched_tokens
            and self.num_seqs == config.max_num_seqs
        ):
            return
        self._good_steps += 1
        if self._good_steps < _STEPS_TO_GROW:
            return
        self._good_steps = 0
        self.num_tokens = _grown(self.num_tokens, config.max_num_batched_tokens)
        self.num_seqs = min(_grown(self.num_seqs, config.max_num_seqs), self.num_tokens)


def _grown(value: int, most: int) -> int:
    return min(value + max(value // _PARTS, 1), most)
