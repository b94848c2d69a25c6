"""Log lines: a message and fields, as text or as JSON. Fields are ids and numbers, no prompts."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Literal

#: Libraries that may log what they work on.
_QUIET = (
    "transformers", "torch", "redis", "asyncio", "urllib3", "httpx", "huggingface_hub",
    "opentelemetry",
)  # fmt: skip


def fields(**values: object) -> dict[str, Mapping[str, object]]:
    """For a log call's `extra`: `logger.info("drained", extra=fields(released=3))`."""
    return {"fields": values}


def set_up_logging(level: str, form: Literal["plain", "json"], worker_id: str) -> None:
    """Log to stderr from now on. Replaces the handlers of the root logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(worker_id) if form == "json" else _PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    return getattr(record, "fields", {})


class _PlainFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO ready model=m seconds=3.1`"""

    def format(self, record: logging.LogRecord) -> str:
        values = "".join(f" {name}={value}" for name, value in _fields_of(record).items())
        return f"{_timestamp(record)} {record.levelname} {record.getMessage()}{values}"


class _JsonFormatter(logging.Formatter):
    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self._worker_id = worker_id

    def format(self, record: logging.LogRecord) -> str:
        head = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "worker": self._worker_id,
            "message": record.getMessage(),
        }
        return json.dumps(head | dict(_fields_of(record)), default=str)
