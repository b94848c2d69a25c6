"""Builders of the script calls that an operator makes on a whole queue."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from . import limits
from .calls import QueuePolicy, check_batch
from .dead_letters import DeadLetter
from .keys import Keyspace
from .replies import MoveCode, RequeueReply, TenantShare
from .scripts import Argument, ScriptCall, load_script


@dataclass(frozen=True, slots=True)
class Waiting:
    """Which waiting requests are meant; what is left out allows any. `created_before_ms` is a time
    by the clock of Redis."""

    ready_class: str = ""
    tenant: str = ""
    created_before_ms: int = 0


@dataclass(frozen=True, slots=True)
class OperatorCalls:
    """The calls on one partition. Sends nothing: pass a call to `scripts.run` or `scripts.arun`."""

    keys: Keyspace
    policy: QueuePolicy

    def probe(self) -> ScriptCall[list[str]]:
        """The commands that enqueueing and working take and this user may not call."""
        return ScriptCall(load_script("probe"), self.keys.owners, (self._options(),), _names)

    def set_pause(self, what: Literal["pause", "resume"], for_ms: int = 0) -> ScriptCall[int]:
        """Stop leasing, for `for_ms` or until `resume`; since when it was paused (ms), or 0."""
        args = (self._options(), what, for_ms)
        return ScriptCall(load_script("set_pause"), self.keys.owners, args, int)

    def cancel_waiting(
        self, request_ids: Sequence[str], meant: Waiting, *, message: str
    ) -> ScriptCall[int]:
        """Cancel those that still wait and are meant; how many that were."""
        check_batch("cancel_waiting", len(request_ids), limits.MAX_REQUESTS_PER_SWEEP)
        options = self._options(
            "retention_ms", "window", **{"class": meant.ready_class}, tenant=meant.tenant,
            created_before=meant.created_before_ms,
        )  # fmt: skip
        args = (options, message, *request_ids)
        return ScriptCall(load_script("cancel_waiting"), self.keys.owners, args, int)

    def move(self, request_ids: Sequence[str], ready_class: str) -> ScriptCall[list[MoveCode]]:
        """Give waiting requests another priority class; one code each, in order."""
        check_batch("move", len(request_ids), limits.MAX_REQUESTS_PER_SWEEP)
        args = (self._options("window"), ready_class, *request_ids)
        return ScriptCall(load_script("move"), self.keys.owners, args, _codes)

    def requeue_dead(self, request_id: str) -> ScriptCall[RequeueReply]:
        """Give a dead request another life under its id; its dead letter goes."""
        return ScriptCall(
            load_script("requeue_dead"),
            self.keys.owners,
            (self._options("retention_ms", "window"), request_id),
            RequeueReply.parse,
        )

    def purge(self, letters: Iterable[DeadLetter]) -> ScriptCall[int]:
        """Forget dead letters and their requests; how many letters there were."""
        args: list[Argument] = [self._options()]
        for letter in letters:
            args += (letter.entry_id, letter.request_id)
        check_batch("purge", len(args) // 2, limits.MAX_LETTERS_PER_PURGE)
        return ScriptCall(load_script("purge"), self.keys.owners, tuple(args), int)

    def set_weight(self, tenant: str, weight: int) -> ScriptCall[int]:
        """Give a tenant `weight` times the window of others (1 to 100); the weight it had."""
        if not 1 <= weight <= limits.MAX_TENANT_WEIGHT:
            raise ValueError(f"weight: must be from 1 to {limits.MAX_TENANT_WEIGHT}")
        args = (self._options("window"), tenant, weight)
        return ScriptCall(load_script("set_weight"), self.keys.owners, args, int)

    def tenants(self) -> ScriptCall[list[TenantShare]]:
        """Every tenant with a weight of its own or with waiting requests, by name."""
        args = (self._options(),)
        return ScriptCall(load_script("tenants"), self.keys.owners, args, TenantShare.parse_all)

    def _options(self, *names: str, **values: Any) -> str:
        options = {name: getattr(self.policy, name) for name in ("publish", *names)}
        return json.dumps({**options, **values})


def _names(reply: list[str]) -> list[str]:
    return reply


def _codes(reply: list[str]) -> list[MoveCode]:
    return list(map(MoveCode, reply))
