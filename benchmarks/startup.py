"""From the start of a process until it says that it is ready: the first start ever, and the next.

Every cache of compiled code is an empty folder at first, as on a machine that is new; the second
start finds what the first has left there. The model's folder, the installed packages and the
system's page cache are there in both. Standard library only.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from .measure import Figures, Job

#: Where the contestants and what they are built on keep compiled code, below one empty folder.
CACHES = {
    "XDG_CACHE_HOME": "cache",
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TRITON_CACHE_DIR": "triton",
}

#: Starts the process with these variables added; entered when it is ready, it ends on exit.
StartServer = Callable[[Mapping[str, str]], AbstractContextManager[object]]


def startup_jobs(start_server: StartServer) -> dict[str, Job]:
    def startup() -> Figures:
        with tempfile.TemporaryDirectory(prefix="caches-") as folder:
            caches = {name: str(Path(folder) / below) for name, below in CACHES.items()}
            return {
                "first_ready_s": _ready_s(start_server, caches),
                "warm_ready_s": _ready_s(start_server, caches),
            }

    return {"startup": startup}


def _ready_s(start_server: StartServer, environment: Mapping[str, str]) -> float:
    began_s = time.perf_counter()
    with start_server(environment):
        return time.perf_counter() - began_s
