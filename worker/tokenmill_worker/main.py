"""Running a worker as a process: logging, exit codes, one line for what keeps it from starting."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from typing import NoReturn

from .engine_port import EngineFactory
from .errors import StartupError, WorkerError, describe
from .logs import set_up_logging
from .settings import Settings
from .worker import Worker

#: Exit codes of a worker that could not start.
NOT_STARTED = (os.EX_CONFIG, os.EX_UNAVAILABLE)


def run_worker(settings: Settings, engine_factory: EngineFactory) -> int:
    """Serve until a signal; returns the exit code. Reports failures to start on stderr."""
    worker = Worker(settings, engine_factory)
    set_up_logging(settings.log_level, settings.log_format, worker.id)
    try:
        return asyncio.run(worker.run())
    except StartupError as error:
        report(str(error))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the text of an unforeseen error may quote a prompt
        report(f"unexpected {describe(error)}")
        return WorkerError.exit_code


def report(message: str) -> None:
    """One line for the operator."""
    sys.stderr.write(f"tokenmill worker: {' '.join(message.split())}\n")


def leave(code: int) -> NoReturn:
    """End the process, even while the engine's thread is inside a call that cannot be stopped.

    A worker that has served ends at once: taking torch and all else apart first would only delay
    whoever waits for its drain.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    has_engine = any(thread.name == "engine" for thread in threading.enumerate())
    if code in NOT_STARTED and not has_engine:
        sys.exit(code)
    os._exit(code)
