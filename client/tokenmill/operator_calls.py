"""Builders of the script calls that an operator makes on a whole queue."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .calls import QueuePolicy
from .keys import Keyspace
from .scripts import ScriptCall, load_script


def _names(reply: list[str]) -> list[str]:
    return reply


@dataclass(frozen=True, slots=True)
class OperatorCalls:
    """The calls on one partition. Sends nothing: pass a call to `scripts.run` or `scripts.arun`."""

    keys: Keyspace
    policy: QueuePolicy

    def probe(self) -> ScriptCall[list[str]]:
        """The commands that enqueueing and working take and this user may not call."""
        return ScriptCall(load_script("probe"), self.keys.owners, (self._options(),), _names)

    def _options(self, *names: str, **values: Any) -> str:
        options = {name: getattr(self.policy, name) for name in ("publish", *names)}
        return json.dumps({**options, **values})
