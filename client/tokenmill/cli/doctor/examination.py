"""All checks, one after another: what one cannot look at does not keep the others from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

from tokenmill._redis_errors import REDIS_ERRORS, lacks_right

from . import queue_checks, server_checks, way_checks
from .finding import Finding
from .subject import Subject

Check = Callable[[Subject], Iterable[Finding]]
#: Of another package, about the machine that the doctor runs on: options in, findings out.
MachineCheck = Callable[[], Iterable[Finding]]
ENTRY_POINT_GROUP: Final = "tokenmill.checks"

CHECKS: Final[dict[str, Check]] = {
    "rights": way_checks.check_rights,
    "latency": way_checks.check_latency,
    "clock": way_checks.check_clock,
    "fitness": server_checks.check_fitness,
    "role": server_checks.check_role,
    "memory": server_checks.check_memory,
    "disk": server_checks.check_disk,
    "connections": server_checks.check_connections,
    "workers": queue_checks.check_workers,
    "partitions": queue_checks.check_partitions,
    "models": queue_checks.check_models,
    "protocol": queue_checks.check_protocol,
    "pause": queue_checks.check_pause,
    "maintenance": queue_checks.check_maintenance,
    "lag": queue_checks.check_lag,
    "pending": queue_checks.check_pending,
    "dead letters": queue_checks.check_dead_letters,
    "queue room": queue_checks.check_queue_room,
}


@dataclass(frozen=True, slots=True)
class Report:
    """`looked_at` are the checks that could be made."""

    findings: Sequence[Finding]
    looked_at: Sequence[str]


def examine(subject: Subject) -> Report:
    """Raises what redis-py raises when the server is gone."""
    findings: list[Finding] = []
    looked_at = []
    for name, check in CHECKS.items():
        try:
            findings += check(subject)
        except REDIS_ERRORS as error:
            if not lacks_right(error):
                raise
            findings.append(_not_allowed(name, error))
        else:
            looked_at.append(name)
    return Report(findings, looked_at)


def examine_machine() -> Report:
    """What installed packages check about this machine; nothing where only the SDK is."""
    findings: list[Finding] = []
    looked_at = []
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        check: MachineCheck = point.load()
        findings += check()
        looked_at.append(point.name)
    return Report(findings, looked_at)


def _not_allowed(name: str, error: Exception) -> Finding:
    return Finding(
        severity="note",
        check=name,
        problem="not checked: this user may not look",
        evidence=str(error),
        way_out="ask as a user that may, such as `admin` of deploy/redis/users.acl",
    )
