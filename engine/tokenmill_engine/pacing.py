"""How many prompt tokens a step may take along without making those wait who stream already."""

from __future__ import annotations

#: A prompt gets at least so many tokens into each step, however slow the steps are.
LEAST_TOKENS = 32
#: The allowance moves by at most these factors per step: one slow step is not the machine's speed.
SHRINK_AT_MOST = 0.5
GROW_AT_MOST = 1.25


class ChunkPacer:
    """Holds steps in which some requests decode near a target time, by the size of prompt chunks.

    A proportional controller: the time of a step grows with its rows, so the allowance is scaled
    by target / measured after every step that was as large as it could be. No model of the
    hardware is needed, and a change of load is followed within a few steps. Where decoding alone
    takes longer than the target, the allowance goes down to `LEAST_TOKENS`, not to zero.

    `target_ms` None: prompts take what the token budget leaves.
    """

    def __init__(self, target_ms: float | None, max_tokens: int) -> None:
        self._target_s = None if target_ms is None else target_ms / 1000
        self._max_tokens = max_tokens
        self._allowance = float(max_tokens)

    @property
    def chunk_tokens(self) -> int | None:
        """Prompt tokens of the next step if others decode in it; None: no limit."""
        return None if self._target_s is None else round(self._allowance)

    def observe(self, *, num_decodes: int, num_chunk_tokens: int, seconds: float) -> None:
        """A step ran. Only one in which both kinds met and the allowance was used up tells."""
        if self._target_s is None or not num_decodes or seconds <= 0:
            return
        too_slow = seconds > self._target_s and num_chunk_tokens > 0
        if num_chunk_tokens < round(self._allowance) and not too_slow:
            return
        factor = min(max(self._target_s / seconds, SHRINK_AT_MOST), GROW_AT_MOST)
        # From the rows that the step really had: an allowance that was not used up says nothing.
        scaled = min(self._allowance, float(num_chunk_tokens)) * factor
        scaled = max(scaled, self._allowance * SHRINK_AT_MOST)
        self._allowance = min(max(scaled, LEAST_TOKENS), self._max_tokens)
