"""What becomes of a held request: outputs go to its delivery, and every way to end removes it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tokenmill_engine.outputs import EngineStats, RequestOutput

from .conversion import book, failure, refusal
from .delivery import AllDeliveries, Delivery, Ending
from .engine_thread import EngineThread, Refused, Stepped
from .errors import describe
from .logs import fields
from .metrics import Metrics

logger = logging.getLogger(__name__)


class Dispatcher:
    """Feeds the engine's events into the deliveries."""

    def __init__(
        self,
        deliveries: AllDeliveries,
        engine: EngineThread,
        metrics: Metrics,
        *,
        on_done: Callable[[Delivery], None] = lambda _delivery: None,
        on_over: Callable[[Delivery, Ending | None], None] = lambda _delivery, _ending: None,
    ) -> None:
        self._deliveries = deliveries
        self._engine = engine
        self._metrics = metrics
        self._on_done = on_done  # gets each request that ended well
        self._on_over = on_over  # gets each that is over for this worker; None: its lease is gone
        self.stats = EngineStats()

    async def run(self) -> None:
        while True:
            match await self._engine.events.get():
                case Stepped(outputs, stats):
                    self._on_step(outputs, stats)
                case Refused(attempt_id, error):
                    self._on_refused(attempt_id, error)
            self._deliveries.write_soon()

    def hold(self, delivery: Delivery) -> None:
        """From now on the delivery is this worker's: renewed, and dropped at its deadline."""
        lease = delivery.lease
        self._deliveries.add(delivery)
        # The deadline is Redis' to declare; this only ends the work in time.
        delivery.expiry = asyncio.get_running_loop().call_later(
            max(lease.remaining_ms, 0) / 1000, self.drop, delivery, "deadline"
        )
        self._metrics.leases.inc()
        if lease.strikes:
            self._metrics.leases_suspected.inc()
        if lease.num_events:
            self._metrics.leases_resumed.inc()
        else:
            self._metrics.queue_time.observe(lease.waited_ms / 1000)

    def drop(self, delivery: Delivery, reason: str = "taken") -> None:
        """The lease is gone, or the deadline passed: forget the request without a word."""
        if delivery not in self._deliveries:
            return
        self._deliveries.remove(delivery)
        self._metrics.wasted_tokens.inc(delivery.num_unstored_tokens)
        self._engine.abort(delivery.attempt_id)
        self._metrics.leases_lost[reason].inc()
        self._metrics.request_success["abort"].inc()
        self._on_over(delivery, None)
        logger.info("request dropped", extra=fields(**delivery.ids, reason=reason))

    def refuse(self, delivery: Delivery, error: Exception) -> None:
        """End a request that did not get as far as the engine's batch."""
        ending = refusal(error)
        if ending is None:
            logger.error(
                "request failed",
                extra=fields(**delivery.ids, error=describe(error)),
            )
            ending = failure("internal", "the worker failed on this request")
        self.end(delivery, ending)

    def end(self, delivery: Delivery, ending: Ending) -> None:
        """Let the publisher write the end event."""
        delivery.ending = ending
        self._deliveries.write_soon()

    def conclude(self, delivery: Delivery, ending: Ending) -> None:
        """The end event is stored."""
        self._deliveries.remove(delivery)
        now_s = time.monotonic()
        self._metrics.request_success[ending.finish_reason].inc()
        if ending.status == "done":
            self._on_done(delivery)
            self._observe_end(delivery, now_s)
        self._on_over(delivery, ending)
        logger.info(
            "request ended",
            extra=fields(
                **delivery.ids,
                status=ending.status,
                code=ending.code or "-",
                finish=ending.finish_reason,
                prompt_tokens=delivery.usage.prompt_tokens,
                tokens=delivery.num_tokens,
                attempt=delivery.lease.attempt,
                seconds=round(now_s - delivery.times.leased_s, 3),
            ),
        )

    def _on_step(self, outputs: list[RequestOutput], stats: EngineStats) -> None:
        self.stats = stats
        self._metrics.on_step(stats)
        now_s = time.monotonic()
        gaps_s: dict[float, int] = {}
        delivery_of = self._deliveries.get
        for output in outputs:
            delivery = delivery_of(output.request_id)
            if delivery is None:  # dropped while the step was under way
                self._metrics.wasted_tokens.inc(len(output.new_token_ids))
                continue
            if output.new_token_ids:
                times = delivery.times
                last_s, times.last_token_s = times.last_token_s, now_s
                if last_s is None:
                    self._observe_first(delivery, now_s)
                else:
                    gaps_s[last_s] = gaps_s.get(last_s, 0) + 1
            book(delivery, output.read())  # the text is made here: the engine computes meanwhile
        # Whoever was in the step before has waited as long as its neighbours: few different gaps.
        for last_s, count in gaps_s.items():
            self._metrics.inter_token_latency.observe(now_s - last_s, count)
        self._deliveries.changed.set()  # the engine may have room again

    def _on_refused(self, attempt_id: str, error: Exception) -> None:
        delivery = self._deliveries.get(attempt_id)
        if delivery is not None:
            self.refuse(delivery, error)

    def _observe_first(self, delivery: Delivery, now_s: float) -> None:
        delivery.times.first_token_s = now_s
        if not delivery.lease.num_events:
            prefill_s = now_s - delivery.times.leased_s
            self._metrics.prefill_time.observe(prefill_s)
            self._metrics.time_to_first_token.observe(delivery.lease.waited_ms / 1000 + prefill_s)

    def _observe_end(self, delivery: Delivery, now_s: float) -> None:
        metrics, times = self._metrics, delivery.times
        inference_s = now_s - times.leased_s
        metrics.inference_time.observe(inference_s)
        metrics.e2e_latency.observe(delivery.lease.waited_ms / 1000 + inference_s)
        if times.first_token_s is not None and times.last_token_s is not None:
            decode_s = times.last_token_s - times.first_token_s
            metrics.decode_time.observe(decode_s)
            intervals = delivery.num_tokens - delivery.num_resumed_tokens - 1
            metrics.time_per_output_token.observe(decode_s / max(intervals, 1))
        metrics.prompt_tokens.observe(delivery.usage.prompt_tokens)
        metrics.generation_tokens.observe(delivery.num_tokens)
        metrics.max_generation_tokens.observe(delivery.num_tokens)  # the same: n is always 1
        metrics.max_tokens.observe(delivery.max_tokens)
        metrics.choices.observe(1)
        usage = delivery.usage
        metrics.prefill_computed_tokens.observe(max(usage.prompt_tokens - usage.cached_tokens, 0))
        metrics.num_preemptions.observe(delivery.latest.num_preemptions if delivery.latest else 0)
