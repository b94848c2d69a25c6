"""The random faults of the soak: seeded, one at a time, each over before the next."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from chaos.faults import outage
from chaos.proxy import Proxy
from chaos.rig import Rig
from support_worker_process import WorkerProcess


@dataclass
class Faults:
    """`staff` dies and is replaced; `elder`, whose memory is looked at, only freezes."""

    rig: Rig
    elder: WorkerProcess
    staff: list[WorkerProcess]
    worker_link: Proxy
    client_link: Proxy
    start: Callable[[str], WorkerProcess]
    seed: int
    history: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._began_s = time.monotonic()
        self._hired = 0

    def inject(self) -> None:
        """One fault, drawn at random; returns when it is over."""
        self._replace_the_gone()
        kinds: list[Callable[[], None]] = [
            self.kill, self.kill, self.stop, self.freeze, self.kill_clients, self.cut_workers,
            self.cut_readers, self.cut_replies, self.black_hole, self.restart_redis,
        ]  # fmt: skip
        fault = self._random.choice(kinds)
        self.history.append((time.monotonic() - self._began_s, fault.__name__))
        fault()

    def kill(self) -> None:
        """kill -9, and a new worker a little later."""
        worker = self._dismiss()
        self.rig.kill(worker)
        time.sleep(self._random.uniform(0.0, 2.0))
        self._hire()

    def stop(self) -> None:
        """SIGTERM; the new one starts while the old one hands over."""
        worker = self._dismiss()
        worker.process.send_signal(signal.SIGTERM)
        self._hire()

    def freeze(self) -> None:
        """SIGSTOP, for shorter or longer than a lease."""
        worker = self._random.choice([self.elder, *self.staff])
        worker.process.send_signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(0.3, 3.0))
        worker.process.send_signal(signal.SIGCONT)

    def kill_clients(self) -> None:
        for kind in ("normal", "pubsub"):
            self.rig.redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

    def cut_workers(self) -> None:
        self.worker_link.cut()

    def cut_readers(self) -> None:
        self.client_link.cut()

    def cut_replies(self) -> None:
        """For a second, one reply in twenty takes its connection with it."""
        for link in (self.worker_link, self.client_link):
            link.cut_share = 0.05
        time.sleep(1.0)
        for link in (self.worker_link, self.client_link):
            link.cut_share = 0.0

    def black_hole(self) -> None:
        """Longer than a lease: every worker behind this link is taken for dead, and is not."""
        self.worker_link.mode = "hole"
        time.sleep(2.5)
        self.worker_link.mode = "pass"

    def restart_redis(self) -> None:
        outage(self.rig, self._random.uniform(0.1, 1.0))()

    def _replace_the_gone(self) -> None:
        """A worker that finds no Redis when it starts ends, for its supervisor to try again."""
        for worker in list(self.staff):
            if worker.process.poll() is not None:
                self.staff.remove(worker)
                self._hire()

    def _dismiss(self) -> WorkerProcess:
        return self.staff.pop(self._random.randrange(len(self.staff)))

    def _hire(self) -> None:
        self._hired += 1
        self.staff.append(self.start(f"staff-{self._hired}"))
