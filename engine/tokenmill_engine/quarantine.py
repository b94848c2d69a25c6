"""Suspects are prefilled alone, so that a crash in their prefill has one possible culprit.

A request is a suspect (`alone`) when the worker that had it last died before it gave a token. It is
admitted only while no other request is being prefilled, and until its prefill is over nobody else
is admitted; decodes go on, for each of those has proven itself by a prefill of its own. Others wait
for a few steps at most, because a prefill under way always ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from .request import Request


class Quarantine:
    """Watches over the admissions of one step, given the requests that run already."""

    __slots__ = ("_has_suspect", "_is_prefilling")

    def __init__(self, running: Iterable[Request]) -> None:
        self._is_prefilling = self._has_suspect = False
        for request in running:
            if request.is_prefilling:
                self.note(request)

    def admits(self, request: Request) -> bool:
        return not (self._is_prefilling if request.alone else self._has_suspect)

    def note(self, request: Request) -> None:
        """`request` is being prefilled."""
        self._is_prefilling = True
        self._has_suspect = self._has_suspect or request.alone
