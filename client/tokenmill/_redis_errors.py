"""Redis' errors: which may pass by themselves, what to tell the caller, and trying again."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from redis import exceptions

from ._redis import redact_url
from .errors import (
    AuthenticationFailed,
    ConfigurationError,
    ProtocolError,
    QueueUnavailable,
    TokenmillError,
)

T = TypeVar("T")

#: Everything that talking to Redis may raise.
REDIS_ERRORS: Final = (exceptions.RedisError, OSError)
_NETWORK = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_REFUSED_FOR_NOW = (
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
)
#: The same, and others without a class of their own, inside the error of a script.
_REFUSED_FOR_NOW_WORDS = (
    "OOM ", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY Redis",
    "MISCONF", "NOREPLICAS", "UNBLOCKED",
)  # fmt: skip


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    if _is_configuration(error):
        return False
    if isinstance(error, _NETWORK + _REFUSED_FOR_NOW):
        return True
    text = str(error)
    return isinstance(error, exceptions.ResponseError) and any(
        word in text for word in _REFUSED_FOR_NOW_WORDS
    )


def _is_configuration(error: BaseException) -> bool:
    refused = (
        exceptions.AuthenticationError,
        exceptions.AuthorizationError,
        exceptions.NoPermissionError,
        ssl.SSLCertVerificationError,
    )
    return any(isinstance(cause, refused) for cause in _causes(error))


def _causes(error: BaseException) -> tuple[BaseException | None, ...]:
    """redis-py's asyncio connection hides a refused password in a ConnectionError."""
    return error, error.__cause__, error.__context__


def translate(error: BaseException, url: str) -> TokenmillError:
    """Our exception for one of REDIS_ERRORS, in one line that names the server and no secret."""
    where = f"Redis at {redact_url(url)}"
    if any(isinstance(cause, exceptions.AuthenticationError) for cause in _causes(error)):
        return AuthenticationFailed(
            f"{where} refused the user or the password; put them into the URL "
            "(redis://user:password@host) or the password into a file named by "
            "TOKENMILL_REDIS_PASSWORD_FILE"
        )
    if _is_configuration(error) or "DB index" in str(error):
        return ConfigurationError(f"{where}{_way_out(error)}")
    if str(error).startswith("DENIED"):
        return ConfigurationError(
            f"{where} is in protected mode: it has no password and takes local clients only; "
            "give it a password, or --protected-mode no in a closed network"
        )
    if not is_retryable(error):
        return ProtocolError(f"{where} refused a command ({type(error).__name__})")
    if isinstance(error, exceptions.BusyLoadingError):
        return QueueUnavailable(f"{where} is loading its data; try again in a moment")
    kind = "cannot be reached" if isinstance(error, _NETWORK) else "refuses writes for now"
    return QueueUnavailable(f"{where} {kind} ({type(error).__name__})")


def _way_out(error: BaseException) -> str:
    if isinstance(error, exceptions.NoPermissionError | exceptions.AuthorizationError):
        return ": this user's ACL lacks a right that Tokenmill needs"
    if "DB index" in str(error):
        return " has no such database; use a lower number"
    return ": its certificate is not trusted; name the CA with ?ssl_ca_certs=FILE"


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turns redis-py's exceptions into ours."""
    try:
        yield
    except REDIS_ERRORS as error:
        raise translate(error, url) from error


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Pauses double from `base_s` to `cap_s`, each shortened at random by up to half, until
    `timeout_s` is over (0: one try; infinity: for ever)."""

    timeout_s: float = 5.0
    base_s: float = 0.02
    cap_s: float = 0.5

    def pauses(self) -> Iterator[float]:
        """Endless pauses, in seconds."""
        pause_s = self.base_s
        while True:
            # Half at random: clients that lost the same server must not come back in step.
            yield pause_s * random.uniform(0.5, 1.0)
            pause_s = min(2 * pause_s, self.cap_s)


def retry(operation: Callable[[], T], policy: RetryPolicy, url: str) -> T:
    """Call until it succeeds; `operation` must be idempotent.

    Raises:
        QueueUnavailable: retryable errors until the time was over.
        TokenmillError: any other error, at once.
    """
    give_up_at = time.monotonic() + policy.timeout_s
    pauses = policy.pauses()
    while True:
        try:
            return operation()
        except REDIS_ERRORS as error:
            pause_s = next(pauses)
            if not is_retryable(error) or time.monotonic() + pause_s > give_up_at:
                raise translate(error, url) from error
        time.sleep(pause_s)


async def aretry(operation: Callable[[], Awaitable[T]], policy: RetryPolicy, url: str) -> T:
    """`retry` for asyncio."""
    give_up_at = time.monotonic() + policy.timeout_s
    pauses = policy.pauses()
    while True:
        try:
            return await operation()
        except REDIS_ERRORS as error:
            pause_s = next(pauses)
            if not is_retryable(error) or time.monotonic() + pause_s > give_up_at:
                raise translate(error, url) from error
        await asyncio.sleep(pause_s)
