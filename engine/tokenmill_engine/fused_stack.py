"""Fused layers that follow each other and run as one: the first computes, the others hand on.

A model's own loop over its layers goes on as it is. Where it does something to what one layer gives
before the next one gets it, a stack ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .fused_modules import Forward, Fused, FusedLayer
from .fused_operations import Stack
from .fusion_check import Record


class StackStart(Fused):
    """In place of the first layer: gives what the last one gives."""

    def __init__(self, layers: Sequence[FusedLayer], stack: Stack) -> None:
        self._own: Forward = layers[0]
        self._first, self._stack = layers[0], stack
        self.result: weakref.ref[torch.Tensor] | None = None  # while the others are still to come

    def compute(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.result = None
        rotary = kwargs.get("position_embeddings")
        context = None if args else self._first.attention.ready(hidden_states, rotary)
        if context is None or rotary is None:
            return None
        result = self._stack.run(hidden_states[0], rotary, context).unsqueeze(0)
        self.result = weakref.ref(result)
        return result


class StackRest(Fused):
    """In place of each further layer; the last one tells the first that all have come.

    Raises RuntimeError where it is given something else.
    """

    def __init__(self, start: StackStart, layer: FusedLayer, *, is_last: bool) -> None:
        self._own: Forward = layer
        self._start, self._is_last = start, is_last

    def compute(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        result = self._start.result
        if result is None:  # the first has not run as a stack
            return None
        if result() is not hidden_states:
            raise RuntimeError("something has come between the layers since they were fused")
        if self._is_last:
            self._start.result = None
        return hidden_states


class InTurn(Fused):
    """The layers one by one, for comparison."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._layers = layers

    def compute(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for layer in self._layers:
            hidden_states = layer.compute(hidden_states, *args, **kwargs)
        return hidden_states


def chains(records: Mapping[nn.Module, Record]) -> Iterator[list[nn.Module]]:
    """Fused layers of which each was given what the one before it gave, and the same rotary."""
    chain: list[nn.Module] = []
    for module, record in records.items():
        if not isinstance(module.__dict__.get("forward"), FusedLayer):
            continue
        if chain and not _follows(records[chain[-1]], record):
            yield chain
            chain = []
        chain.append(module)
    if chain:
        yield chain


def _follows(record: Record, then: Record) -> bool:
    tables = (each.kwargs.get("position_embeddings") for each in (record, then))
    first, second = tables
    given = then.args[0] if then.args else then.kwargs.get("hidden_states")
    return given is record.output and first is second


def whole_record(records: Sequence[Record]) -> Record:
    """Of a chain as if it were one module."""
    calls = [call for record in records for call in record.calls]
    return Record(records[0].args, records[0].kwargs, records[-1].output, calls)
