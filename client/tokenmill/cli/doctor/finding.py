"""What a check finds, and how findings are ranked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["error", "warning", "note"]
#: Severity → rank and exit status of a run whose worst finding it is.
EXIT_STATUS: Final[dict[Severity, int]] = {"error": 2, "warning": 1, "note": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An `error` loses requests or stops them, a `warning` will or may, a `note` is to be known.

    `check` names what was looked at; `evidence` is what was read there.
    """

    severity: Severity
    check: str
    problem: str
    evidence: str
    way_out: str


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, each once."""
    unique = dict.fromkeys(findings)
    return sorted(unique, key=lambda finding: -EXIT_STATUS[finding.severity])


def exit_status(findings: Iterable[Finding]) -> int:
    """0 nothing to do, 1 warnings, 2 errors."""
    return max((EXIT_STATUS[finding.severity] for finding in findings), default=0)
