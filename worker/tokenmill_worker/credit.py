"""How many more requests a worker may lease: what its KV cache has room for. Pure arithmetic.

    credit = free blocks - the growth still expected of what the worker holds

A ready entry does not tell how large its request is, so credit is turned into requests by their
expected size, the running mean of those that ended. What turns out larger waits inside the engine,
where it does not count against the credit: smaller requests may still be leased and start before
it, but no more of them than the engine lets pass. And however many blocks are free, no more prompts
are leased than two steps can begin with: the others are better left to the peers. All sizes are in
tokens or blocks of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenmill_engine.outputs import EngineStats, WaitingRequest
from tokenmill_engine.preemption import BLOCKS_PER_RUNNING

#: One ended request in so many is what the mean remembers.
_MEMORY = 16
#: Prompts are leased for so many steps ahead.
_STEPS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class HeldSize:
    """What is known of a held request. `has_blocks`: the engine has computed all known tokens."""

    attempt_id: str
    prompt_tokens: int | None  # None: not tokenized yet
    output_tokens: int
    max_tokens: int
    has_blocks: bool


class Credit:
    """Knows the sizes of the requests that ended; everything else it is told at each question."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._mean_prompt: float | None = None
        self._mean_output = 0.0

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request ended by itself, with these sizes."""
        if self._mean_prompt is None:
            self._mean_prompt, self._mean_output = float(prompt_tokens), float(output_tokens)
            return
        self._mean_prompt += (prompt_tokens - self._mean_prompt) / _MEMORY
        self._mean_output += (output_tokens - self._mean_output) / _MEMORY

    def num_requests(self, stats: EngineStats, held: Collection[HeldSize]) -> int:
        """So many more may be leased now."""
        num_places = self._max_num_seqs - len(held)
        if num_places <= 0 or not stats.num_blocks:
            return max(num_places, 0)
        if not held:
            # Whatever it is, the engine refuses it or has room for it.
            return min(max(self._by_blocks(stats, held), 1), num_places)
        blocked = [one for one in stats.waiting if one.is_blocked]
        most = min(num_places, self._by_blocks(stats, held), self._by_prompts(stats, held))
        if blocked:
            most = min(most, _places_before(blocked, stats, len(held)))
        return max(most, 0)

    def room_tokens(self, stats: EngineStats, held: Collection[HeldSize]) -> int:
        """Tokens of one more request that would start at once; 0 while others wait to start."""
        if len(held) >= self._max_num_seqs or stats.num_waiting:
            return 0
        return max(self._free_blocks(stats, held), 0) * stats.block_size

    def expected_tokens(self, size: HeldSize, stats: EngineStats) -> int:
        """Prompt and output, when the request will have ended."""
        prompt, output = self._means(stats)
        if size.prompt_tokens is None:
            return round(prompt + output)
        expected = min(size.max_tokens, max(round(output), size.output_tokens + 1))
        return size.prompt_tokens + expected

    def _by_blocks(self, stats: EngineStats, held: Collection[HeldSize]) -> int:
        prompt, output = self._means(stats)
        # It must have its blocks at the start, and the engine then keeps more free beside it.
        at_start = _blocks(round(prompt), stats) + BLOCKS_PER_RUNNING
        expected = max(_blocks(round(prompt + output), stats), at_start)
        return self._free_blocks(stats, held) // expected

    def _by_prompts(self, stats: EngineStats, held: Collection[HeldSize]) -> int:
        """As many as the next steps can begin with; no bound until sizes are known."""
        if self._mean_prompt is None or not stats.step_tokens:
            return self._max_num_seqs
        is_blocked = {one.request_id for one in stats.waiting if one.is_blocked}
        mean = max(round(self._mean_prompt), 1)
        to_start = [
            mean if size.prompt_tokens is None else size.prompt_tokens
            for size in held
            if not size.has_blocks and size.attempt_id not in is_blocked
        ]
        num_fitting = (_STEPS_AHEAD * stats.step_tokens - sum(to_start)) // mean
        return max(num_fitting, 0 if to_start else 1)

    def _free_blocks(self, stats: EngineStats, held: Collection[HeldSize]) -> int:
        is_blocked = {one.request_id: one.is_blocked for one in stats.waiting}
        growth = to_start = 0
        for size in held:
            expected = _blocks(self.expected_tokens(size, stats), stats)
            if not size.has_blocks or size.attempt_id in is_blocked:
                to_start += 0 if is_blocked.get(size.attempt_id) else expected
            else:
                known = (size.prompt_tokens or 0) + size.output_tokens
                growth += max(expected - _blocks(known, stats), 0)
        # The blocks of a prefill are taken, but its request still counts with its whole size.
        free = stats.num_free_blocks + stats.num_prefill_blocks
        return free - max(growth, stats.reserve_blocks) - to_start

    def _means(self, stats: EngineStats) -> tuple[float, float]:
        """Of prompt and output. Until a request has ended: each has its share of the cache."""
        if self._mean_prompt is None:
            share = stats.num_blocks * stats.block_size / self._max_num_seqs
            return share / 2, share / 2
        return self._mean_prompt, self._mean_output


def _places_before(blocked: Sequence[WaitingRequest], stats: EngineStats, num_held: int) -> int:
    """How many that are not held yet may start before the blocked ones: those on their way do so
    first."""
    on_their_way = num_held - stats.num_running - len(blocked)
    return min(one.overtakes_left for one in blocked) - on_their_way


def _blocks(num_tokens: int, stats: EngineStats) -> int:
    return -(-num_tokens // stats.block_size)
