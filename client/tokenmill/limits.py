"""Limits of the protocol, enforced in the SDK, in the scripts and again in the worker."""

from typing import Final

MAX_BODY_BYTES: Final = 256 * 1024
MAX_META_BYTES: Final = 4 * 1024
MAX_TOKENS: Final = 8192
MAX_MESSAGES: Final = 1024
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_BAD_WORDS: Final = 256
MAX_LOGIT_BIAS: Final = 4096
MAX_LOGPROBS: Final = 20
MAX_JSON_DEPTH: Final = 32
MAX_SEED: Final = 2**63 - 1
MAX_TOKEN_ID: Final = 2**31 - 1
DEFAULT_DEADLINE_S: Final = 600.0
MAX_DEADLINE_S: Final = 86_400.0
#: How far ahead `not_before` may lie.
MAX_DELAY_S: Final = 86_400.0
#: The record and the event log stay this long after the end of a request.
DEFAULT_RETENTION_S: Final = 600.0
MAX_QUEUED: Final = 10_000
MAX_QUEUED_PER_TENANT: Final = 1_000
#: At most this many requests of one tenant and class stand in the ready stream at a time.
TENANT_WINDOW: Final = 16
#: A tenant's weight: so many times this window.
MAX_TENANT_WEIGHT: Final = 100
#: The client reads the event log in pages of this many entries.
REPLAY_PAGE: Final = 500
MAX_REQUESTS_PER_APPEND: Final = 128
MAX_REQUESTS_PER_HEARTBEAT: Final = 512
MAX_LETTERS_PER_PURGE: Final = 512
MAX_REQUESTS_PER_SWEEP: Final = 128
REQUEST_ID_PATTERN: Final = r"^[A-Za-z0-9_-]{1,64}$"
TENANT_PATTERN: Final = r"^[A-Za-z0-9_.-]{1,64}$"
