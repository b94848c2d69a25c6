"""Disturbances that several scenarios share, and what to look for afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from chaos.audience import Request
from chaos.observer import Observer
from chaos.rig import Rig
from support_worker_process import WorkerProcess, starts_of


def outage(rig: Rig, seconds: float) -> Callable[[], None]:
    """The server is killed, and comes back with what it had written."""

    def kill_and_restart() -> None:
        rig.server.kill()
        time.sleep(seconds)
        rig.server.restart()
        rig.redis.connection_pool.disconnect()

    return kill_and_restart


def taken_over(rig: Rig, wanted: list[Request]) -> int:
    """Requests whose second attempt has begun to write."""
    return sum(len(starts_of(rig.pool.events(request.id))) > 1 for request in wanted)


def check_published_is_stored(rig: Rig, observer: Observer) -> None:
    """What was published is the log, each event once and in its order: fences hold."""
    for request_id, published in observer.messages.items():
        log = [fields["d"] for _, fields in rig.redis.xrange(rig.pool.keys.log(request_id))]
        assert published == log, f"{request_id}: published {len(published)}, stored {len(log)}"


class Supervisor:
    """Starts another worker for each that was lost, as systemd or compose would."""

    def __init__(
        self, rig: Rig, workers: Sequence[WorkerProcess], start: Callable[[str], WorkerProcess]
    ) -> None:
        self.num_deaths = 0
        self._rig = rig
        self._start = start
        self._watched = list(workers)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._closing.wait(0.05):
            for index, worker in enumerate(self._watched):
                if worker.process.poll() is not None:
                    self.num_deaths += 1
                    self._rig.expected_exits[worker.name] = worker.process.returncode
                    name = f"again-{self.num_deaths}"
                    self._watched[index] = self._start(name)
