"""What happens when blocks run out: whom to preempt, and how not to thrash.

**Victim.** The running request that loses least: first by the policy (under `priority` the least
urgent class), then by sunk cost, then the newest. Never the leader, the running request that the
policy ranks first: it can take every other block, and no request is accepted that does not fit the
pool alone, so each step makes progress and every request becomes the leader in the end. A request
in need of blocks is a candidate like the others and then preempts itself.

**Hysteresis.** A waiting request is admitted only if, after it has blocks for *all* its known
tokens, a reserve stays free for the running ones to grow into:

    reserve = (2 * running requests + 1 % of the pool) * 2 ** (times this request was preempted)

With nothing else running the reserve is 0. Doubling bounds the preemptions of a request: once its
reserve exceeds the pool it waits until it runs alone, and whoever is admitted after it ranks behind
it. Under `fcfs` that makes at most 1 + log2(number of blocks) preemptions; under `priority` each
more urgent arrival can add one. After a preemption nobody is admitted in the same step.

Overtaking (see `admission`) leaves both arguments whole. With nothing running, the first of the
queue is tried first and fits, so whoever is admitted alone still ranks before all who wait. And a
request can be passed only so often, a passer that is preempted and passes again included, so each
becomes the first to be admitted, and then the leader, after a bounded number of others.

Out of memory in a step preempts as well (`Scheduler.relieve`); those preemptions come on top.

Two blocks per running request, because in a simulation (mixed lengths, a pool for some 14 of 64
requests) a third of all rows were recomputed without a reserve, 12 % with one block and 8 % with
two, at the same number of requests running; four blocks ran fewer for no gain in time.
"""

from __future__ import annotations

from collections.abc import Collection

from .kv_cache_manager import KVCacheManager
from .policy import Policy
from .request import Request

BLOCKS_PER_RUNNING = 2
_POOL_SHARE = 100  # the reserve holds one block of so many
_MAX_DOUBLINGS = 32  # beyond any pool; keeps the number small


class Preemption:
    """The two decisions above; holds no state of its own."""

    def __init__(self, policy: Policy, kv: KVCacheManager) -> None:
        self._policy = policy
        self._kv = kv

    def choose_victim(self, running: Collection[Request], requester: Request) -> Request:
        """Whom to preempt so that `requester` gets a block; possibly the requester itself."""
        leader = min(running, key=self._policy.rank)
        candidates = [
            request
            for request in running
            # Without blocks (restarted at the LongRoPE switch) there is nothing to gain.
            if request is not leader and (request.block_ids or request is requester)
        ]
        return min(candidates, key=self._victim_rank)

    def cheapest(self, running: Collection[Request], count: int) -> list[Request]:
        """The `count` that lose least, to shrink a step that was too large; never the leader."""
        leader = min(running, key=self._policy.rank)
        others = [request for request in running if request is not leader]
        return sorted(others, key=self._victim_rank)[: max(count, 0)]

    def reserve_blocks(self, request: Request, num_running: int) -> int:
        """Blocks that must stay free when `request` is admitted beside `num_running` others."""
        return self.least_reserve(num_running) << min(request.num_preemptions, _MAX_DOUBLINGS)

    def least_reserve(self, num_running: int) -> int:
        """The same for a request that was never preempted."""
        if num_running == 0:
            return 0
        return BLOCKS_PER_RUNNING * num_running + self._kv.num_blocks // _POOL_SHARE

    def _victim_rank(self, request: Request) -> tuple[int, ...]:
        return self._policy.victim_rank(request, self._kv.sunk_tokens(request))
