"""Repeating a Redis call until it is answered. redis-py's own retry is off, see `tokenmill._redis`.

Every script is idempotent, so a lost reply is answered by the same call once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from tokenmill._redis_errors import REDIS_ERRORS, RetryPolicy, is_retryable

from .cancellation import raise_if_cancelled
from .errors import describe
from .logs import fields
from .metrics import Metrics

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Retrier:
    """Counts failed calls and logs the first of a row."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._failing: set[str] = set()

    async def until_answered(self, name: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """The answer of an idempotent `call`; raises only what does not go away by itself."""
        pauses = self.pauses()
        while True:
            raise_if_cancelled()
            try:
                result = await call()
            except REDIS_ERRORS as error:
                if not is_retryable(error):
                    raise
                self.note(name, error)
                await asyncio.sleep(next(pauses))
            else:
                self.note_success(name)
                return result

    def pauses(self) -> Iterator[float]:
        """Growing pauses, in seconds, with jitter: a fleet must not come back in step."""
        return RetryPolicy().pauses()

    def note(self, name: str, error: BaseException) -> None:
        self._metrics.call_retries[name].inc()
        if name not in self._failing:
            self._failing.add(name)
            logger.warning("redis call fails", extra=fields(call=name, error=describe(error)))

    def note_success(self, name: str) -> None:
        if name in self._failing:
            self._failing.discard(name)
            logger.info("redis call works again", extra=fields(call=name))
