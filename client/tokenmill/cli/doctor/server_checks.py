"""Is each Redis server fit, and does it have room: version, eviction, persistence, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tokenmill import _server_check

from .finding import Finding
from .subject import Subject

#: Above this share of maxmemory the workers let no new requests in.
MEMORY_HIGH: Final = 0.85
MEMORY_RISING: Final = 0.7
#: Above this share of its client connections a server soon refuses the next.
CONNECTIONS_HIGH: Final = 0.8
#: Fields of INFO that say whether Redis can write to its disk, and what depends on it.
DISK_STATUS: Final = (
    "aof_last_write_status",
    "aof_last_bgrewrite_status",
    "rdb_last_bgsave_status",
)
_MIB: Final = 2**20


def check_fitness(subject: Subject) -> Iterator[Finding]:
    """What a worker looks at before it starts."""
    for info in subject.infos:
        for found in _server_check.findings(info, is_cluster=subject.is_cluster):
            problem, _, way_out = found.message.partition("; ")
            yield Finding(
                severity=found.severity,
                check=found.code,
                problem=problem,
                evidence=f"INFO: redis_version {info.get('redis_version', '?')}, "
                f"maxmemory_policy {info.get('maxmemory_policy', '?')}, "
                f"aof_enabled {info.get('aof_enabled', '?')}",
                way_out=way_out,
            )


def check_memory(subject: Subject) -> Iterator[Finding]:
    for info in subject.infos:
        used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
        evidence = f"INFO: used_memory {used // _MIB} MiB, maxmemory {most // _MIB} MiB"
        if not most:
            yield Finding(
                severity="note",
                check="memory",
                problem="Redis has no memory limit: when the machine's is used up, it is killed",
                evidence=evidence,
                way_out="set maxmemory to at most 70 % of the machine's memory",
            )
        elif used > MEMORY_RISING * most:
            is_high = used > MEMORY_HIGH * most
            yield Finding(
                severity="error" if is_high else "warning",
                check="memory",
                problem="new requests are refused: the memory of Redis is nearly full"
                if is_high
                else f"the memory of Redis fills up: at {MEMORY_HIGH:.0%} new requests are refused",
                evidence=evidence,
                way_out="raise maxmemory, or keep less: a shorter --retention-s, "
                "`tokenmill dlq purge`",
            )


def check_disk(subject: Subject) -> Iterator[Finding]:
    for info in subject.infos:
        failed = [name for name in DISK_STATUS if info.get(name, "ok") != "ok"]
        if failed:
            yield Finding(
                severity="error",
                check="redis-disk",
                problem="Redis cannot write to its disk; it may refuse every change (MISCONF)",
                evidence="INFO: " + ", ".join(f"{name} {info[name]}" for name in failed),
                way_out="free the disk that holds its dir, then BGREWRITEAOF or BGSAVE",
            )


def check_connections(subject: Subject) -> Iterator[Finding]:
    for info in subject.infos:
        now, most = int(info.get("connected_clients", 0)), int(info.get("maxclients", 0))
        if most and now > CONNECTIONS_HIGH * most:
            yield Finding(
                severity="warning",
                check="connections",
                problem="Redis soon refuses connections: most of those it allows are open",
                evidence=f"INFO: connected_clients {now}, maxclients {most}",
                way_out="raise maxclients (and its limit of open files); CLIENT LIST shows "
                "who keeps so many",
            )


def check_role(subject: Subject) -> Iterator[Finding]:
    for info in subject.infos:
        if info.get("role") == "slave":
            yield Finding(
                severity="error",
                check="role",
                problem="this Redis is a replica: it takes no writes",
                evidence=f"INFO: role slave, master_host {info.get('master_host', '?')}",
                way_out="name the master, or the Sentinels: redis+sentinel://host:26379/name",
            )
        elif _may_lose_on_failover(info):
            yield Finding(
                severity="note",
                check="replication",
                problem="after a failover an isolated master still takes writes, which get lost",
                evidence=f"INFO: connected_slaves {info['connected_slaves']}, "
                "min_slaves_good_slaves is not reported",
                way_out="set min-replicas-to-write 1 and min-replicas-max-lag 10",
            )


def _may_lose_on_failover(info: dict[str, Any]) -> bool:
    # Redis reports the field exactly when min-replicas-to-write is set.
    return int(info.get("connected_slaves", 0)) > 0 and "min_slaves_good_slaves" not in info
