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

from ._url import redact_url
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
    # ASK: the slot is on its way to another node. It is not followed: a script could find some of
    # its keys here and some there.
    exceptions.AskError,
)
#: The same, and others without a class of their own, inside the error of a script.
_REFUSED_FOR_NOW_WORDS = (
    "OOM ", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY Redis",
    "MISCONF", "NOREPLICAS", "UNBLOCKED", "access a non local key",
)  # fmt: skip
#: The other side ended the connection, as a server does that is sent TLS, or no TLS, by mistake.
_HUNG_UP = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)
_REFUSED = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.NoPermissionError,
    ssl.SSLCertVerificationError,
    ConfigurationError,
)
#: How the message begins where the error has no class of its own, and the way out.
_REFUSED_WORDS: Final = {
    "DB index": "has no such database; use a lower number",
    "DENIED": "is in protected mode: it has no password and takes local clients only; give it a "
    "password, or --protected-mode no in a closed network",
}
#: What a TLS handshake fails with when trying again is of no use, and the way out.
_TLS_WAYS_OUT: Final = {
    "WRONG_VERSION_NUMBER": "does not speak TLS on this port; use its TLS port, or redis://",
    "RECORD_LAYER_FAILURE": "does not speak TLS on this port; use its TLS port, or redis://",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "wants a certificate; add ?ssl_certfile= and ssl_keyfile=",
    "TLSV1_ALERT_UNKNOWN_CA": "does not trust the certificate of ?ssl_certfile=",
}
#: X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL.
_OTHER_HOST: Final = frozenset({62, 64})


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
    """Whether somebody has to change something before the call can succeed."""
    return any(isinstance(cause, _REFUSED) or _tls_way_out(cause) for cause in _causes(error)) or (
        isinstance(error, exceptions.RedisError)
        and (str(error).startswith(tuple(_REFUSED_WORDS)) or lacks_right(error))
    )


def lacks_right(error: BaseException) -> bool:
    """NOPERM, also inside the error of a script, as Redis and as Valkey word it."""
    words = ("executing the script can't", "ACL failure in script")
    return isinstance(error, exceptions.NoPermissionError) or any(w in str(error) for w in words)


def _tls_way_out(error: BaseException) -> str | None:
    return _TLS_WAYS_OUT.get(error.reason or "") if isinstance(error, ssl.SSLError) else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it hides: redis-py wraps what goes wrong while it connects."""
    cause: BaseException | None = error
    for _ in range(4):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def translate(error: BaseException, url: str) -> TokenmillError:
    """Our exception for one of REDIS_ERRORS, in one line that names the server and no secret."""
    where = f"Redis at {redact_url(url)}"
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ConfigurationError):
            return cause
    if any(isinstance(cause, exceptions.AuthenticationError) for cause in causes):
        return AuthenticationFailed(
            f"{where} refused the user or the password; put them into the URL "
            "(redis://user:password@host) or the password into a file named by "
            "TOKENMILL_REDIS_PASSWORD_FILE"
        )
    if _is_configuration(error):
        return ConfigurationError(f"{where} {_way_out(error)}")
    if not is_retryable(error):
        return ProtocolError(f"{where} refused a command ({type(error).__name__})")
    return QueueUnavailable(f"{where} {_why_not_now(error, url)}")


def _why_not_now(error: BaseException, url: str) -> str:
    if isinstance(error, exceptions.BusyLoadingError):
        return "is loading its data; try again in a moment"
    uses_tls = url.startswith("rediss")
    if any(isinstance(cause, _HUNG_UP) for cause in _causes(error)) or "closed by" in str(error):
        hint = (
            "asks for a certificate, add ?ssl_certfile= and ssl_keyfile="
            if uses_tls
            else ("expects TLS, use rediss://")
        )
        return f"ends the connection; if it {hint}"
    if uses_tls and str(error).startswith("Timeout connecting"):
        return "does not answer in time; if it speaks no TLS on this port, use redis://"
    kind = "cannot be reached" if isinstance(error, _NETWORK) else "refuses writes for now"
    return f"{kind} ({type(error).__name__})"


def _way_out(error: BaseException) -> str:
    found = [way_out for cause in _causes(error) if (way_out := _way_out_of(cause))]
    return found[0] if found else "refuses this configuration"


def _way_out_of(cause: BaseException) -> str | None:
    if isinstance(cause, exceptions.NoPermissionError | exceptions.AuthorizationError) or (
        lacks_right(cause)
    ):
        return "does not let this user do that: its ACL lacks a right that Tokenmill needs"
    if isinstance(cause, ssl.SSLCertVerificationError):
        if getattr(cause, "verify_code", None) in _OTHER_HOST:
            return "has a certificate for another host name; use the name it was made for"
        return "has a certificate that is not trusted; name the CA with ?ssl_ca_certs=FILE"
    words = (way_out for start, way_out in _REFUSED_WORDS.items() if str(cause).startswith(start))
    return _tls_way_out(cause) or next(words, None)


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
