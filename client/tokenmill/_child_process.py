"""Child processes that end with the process that started them, also when it is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(how: signal.Signals = signal.SIGTERM) -> Callable[[], None] | None:
    """A `preexec_fn`: Linux sends the child `how` when the thread that started it ends.

    Everything is looked up here: between fork and exec only the system call itself is safe.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, how, 0, 0, 0)
        if os.getppid() != parent:  # it died before the request was made
            os._exit(1)

    return ask
