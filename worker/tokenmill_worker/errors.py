"""What ends a worker, and with which exit code (the numbers are those of sysexits.h).

WorkerError
├── StartupError           the worker cannot start; the text is one line for the operator
│   ├── SettingsError      an option, the config file or the model is wrong       (78)
│   └── QueueNotReady      Redis cannot be used: unreachable, too old, unsafe     (69 or 78)
├── EngineFailed           a step of the engine raised; the worker exits          (70)
└── EngineStalled          a step did not return; the worker exits                (70)
"""

from __future__ import annotations

import os
from pathlib import Path


class WorkerError(Exception):
    """Base of the tree. `exit_code` is what the process returns when this ends it."""

    exit_code = os.EX_SOFTWARE


class StartupError(WorkerError):
    """The worker cannot start. The text is one line and names the way out."""

    exit_code = os.EX_CONFIG


class SettingsError(StartupError):
    """An option or the config file is wrong."""


class QueueNotReady(StartupError):
    """Redis cannot be used as it is."""

    def __init__(self, message: str, *, exit_code: int = os.EX_CONFIG) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineFailed(WorkerError):
    """A step of the engine raised: its state is unknown, so the process must not go on."""


class EngineStalled(WorkerError):
    """A step of the engine did not return in time."""


def describe(error: BaseException) -> str:
    """Type and place of an error, without its text: that may quote a prompt."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" in {code.co_name} ({Path(code.co_filename).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}{place}"
