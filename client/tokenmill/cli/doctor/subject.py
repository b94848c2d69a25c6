"""What the doctor examines: the partitions of one pool, and what was read of them once for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenmill._link import Home
from tokenmill.cli.snapshot import QueueSnapshot, read_snapshot


@dataclass(frozen=True)
class Subject:
    """`homes` are all partitions; `is_cluster`: each may lie on a server of its own."""

    homes: Sequence[Home]
    is_cluster: bool

    @property
    def servers(self) -> Sequence[Home]:
        """One partition for each server to look at."""
        return self.homes if self.is_cluster else self.homes[:1]

    @cached_property
    def infos(self) -> list[dict[str, Any]]:
        """The reply of each server to INFO."""
        return [home.redis.info() for home in self.servers]

    @cached_property
    def snapshot(self) -> QueueSnapshot:
        return read_snapshot(self.homes)
