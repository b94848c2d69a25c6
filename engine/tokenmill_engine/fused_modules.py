"""What a fused module runs in place of its own forward: products with what surrounds them.

What computes them belongs to the device (`fused_operations.py`). Each recognises its pattern by
structure, in any architecture; whether the result is the same is for `fusion.py` to check. What
attends falls back to the module's own forward outside the engine's step, as in the self-test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .attention import AttentionRule, AttentionSpec, CallKey, ForwardContext, current_context
from .fused_operations import (
    ACTIVATIONS,
    HeadPreparation,
    Norm,
    Operations,
    Product,
    prepares_heads,
)

Forward = Callable[..., Any]


class PackedPart(nn.Module):
    """One of the `nn.Linear` that a `Product` holds, for forwards that are not fused."""

    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, packed: Product, number: int, first: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._packed, self._number, self._first = packed, number, first

    @property
    def weight(self) -> torch.Tensor:
        """`[out_features, in_features]`"""
        rows = self._packed.unpacked(self._number)
        return rows[self._first : self._first + self.out_features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in_features]` to `[…, out_features]`"""
        return functional.linear(x, self.weight.to(x), self.bias)


class Fused(ABC):
    """A forward in place of a module's own, which still runs where `compute` gives nothing."""

    _own: Forward

    @abstractmethod
    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward returns, None where that must run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.compute(*args, **kwargs)
        return self._own(*args, **kwargs) if output is None else output


class FusedNorm(Fused):
    """RMS normalisation."""

    def __init__(
        self, module: nn.Module, norm: Norm, dtype: torch.dtype, operations: Operations
    ) -> None:
        self.norm = norm
        self._own: Forward = module.forward
        self._dtype, self._operations = dtype, operations

    @classmethod
    def variants(cls, module: nn.Module, operations: Operations) -> Iterator[FusedNorm]:
        """Architectures differ in when they round, and in whether the weight counts from 1."""
        parameters = dict(module.named_parameters())
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = parameters.get("weight")
        if weight is None or len(parameters) > 1 or not isinstance(epsilon, float):
            return
        if weight.dim() != 1 or weight.dtype not in operations.dtypes:
            return
        plain = weight.detach().float().contiguous()
        for norm in (Norm(plain, epsilon, True), Norm(plain, epsilon, False)):
            yield cls(module, norm, weight.dtype, operations)
        yield cls(module, Norm(1.0 + plain, epsilon, False), weight.dtype, operations)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.dtype != self._dtype:
            return None
        return self._operations.normalise(x.reshape(-1, x.shape[-1]), self.norm).view(x.shape)


class FusedMLP(Fused):
    """`down(act(gate(x)) · up(x))` in two products."""

    def __init__(self, module: nn.Module, gate: int, operations: Operations) -> None:
        self._own: Forward = module.forward
        pair = [getattr(module, name) for name in ("gate_proj", "up_proj")]
        down = module.down_proj
        assert isinstance(down, nn.Linear)
        self.gate_up = operations.product([linear.weight for linear in pair], gate=gate)
        self.down = operations.product([down.weight], bias=down.bias)
        self.parts = {
            "gate_proj": PackedPart(pair[0], self.gate_up, 0, 0),
            "up_proj": PackedPart(pair[1], self.gate_up, 1, 0),
            "down_proj": PackedPart(down, self.down, 0, 0),
        }

    @classmethod
    def of(cls, module: nn.Module, operations: Operations) -> FusedMLP | None:
        linears = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
        if not all(type(linear) is nn.Linear for linear in linears):
            return None
        if any(linear.bias is not None for linear in linears[:2] if linear is not None):
            return None
        gate = _gate_kind(getattr(module, "act_fn", None), operations)
        return None if gate is None else cls(module, gate, operations)

    def apply(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows `[T, K]` to `[T, K]`; the result may take the residual's memory."""
        return self.down.multiply(self.gate_up.multiply(x, norm=norm), residual=residual)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.dtype != self.down.dtype:
            return None
        return self.apply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.down.outputs)


def _gate_kind(activation: object, operations: Operations) -> int | None:
    if not callable(activation):
        return None
    x = torch.linspace(-8, 8, 101)
    for gate in operations.gates:
        if torch.allclose(activation(x), ACTIVATIONS[gate](x), atol=1e-6):
            return gate
    return None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The one call of the attention interface that a forward of the module made."""

    key: CallKey
    spec: AttentionSpec
    rule: AttentionRule


class FusedAttention(Fused):
    """One product for Q, K and V; the heads' norms and rotary embedding in the attention kernel."""

    def __init__(
        self,
        module: nn.Module,
        call: AttentionCall,
        operations: Operations,
        *,
        rotates: bool,
        norms: tuple[Norm | None, Norm | None],
    ) -> None:
        self._own: Forward = module.forward
        self.call, self.rotates, self.norms = call, rotates, norms
        linears = [getattr(module, f"{name}_proj") for name in "qkv"]
        out = module.o_proj
        assert isinstance(out, nn.Linear)
        self.query_key_value = operations.product(
            [linear.weight for linear in linears], bias=_joined_bias(linears)
        )
        self.out = operations.product([out.weight], bias=out.bias)
        widths = [linear.out_features for linear in linears]
        firsts = (0, widths[0], widths[0] + widths[1])
        self.num_heads = widths[0] // call.spec.key_dim
        self.parts = {
            f"{name}_proj": PackedPart(linear, self.query_key_value, 0, first)
            for name, linear, first in zip("qkv", linears, firsts, strict=True)
        }
        self.parts["o_proj"] = PackedPart(out, self.out, 0, 0)

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        linears = [getattr(module, f"{name}_proj", None) for name in "qkvo"]
        return all(type(linear) is nn.Linear for linear in linears)

    def ready(self, x: object, rotary: object) -> ForwardContext | None:
        """The context of the step, None where the module's own forward must run."""
        context = current_context()
        if context is None or not prepares_heads(context.backend):
            return None
        if not isinstance(x, torch.Tensor) or x.dtype != self.out.dtype:
            return None
        if not isinstance(rotary, tuple) or len(rotary) != 2:
            return None
        return context if all(self._is_table(part, x) for part in rotary) else None

    def _is_table(self, table: object, x: torch.Tensor) -> bool:
        """Of cosines or sines, a row for each row of x."""
        if not isinstance(table, torch.Tensor) or table.dtype != x.dtype:
            return False
        rows_match = table.dim() == x.dim() == 3 and table.shape[:2] == x.shape[:2]
        return rows_match and len(x) == 1 and table.shape[2] <= self.call.spec.key_dim

    def attend(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        context: ForwardContext,
        *,
        norm: Norm | None = None,
    ) -> torch.Tensor:
        """Rows `[T, K]`, cos and sin `[1, T, R]`, to what `out` takes."""
        spec, heads = self.call.spec, self.num_heads
        qkv = self.query_key_value.multiply(x, norm=norm)
        rows, keys = len(qkv), heads * spec.key_dim
        values = keys + spec.num_kv_heads * spec.key_dim
        cos, sin = (part[0].contiguous() for part in rotary)
        if not self.rotates:
            cos, sin = cos[:, :0], sin[:, :0]
        assert prepares_heads(context.backend)
        return context.backend.write_and_attend(
            qkv[:, :keys].view(rows, heads, spec.key_dim),
            qkv[:, keys:values].view(rows, spec.num_kv_heads, spec.key_dim),
            qkv[:, values:].view(rows, spec.num_kv_heads, spec.value_dim),
            context.layers[self.call.key],
            context.metadata,
            self.call.rule,
            heads=HeadPreparation(cos, sin, *self.norms),
        ).view(rows, -1)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        x, rotary = kwargs.get("hidden_states"), kwargs.get("position_embeddings")
        if args and x is None:
            x, args = args[0], args[1:]
        context = None if args else self.ready(x, rotary)
        if context is None or x is None or rotary is None:
            return None
        return self.out.multiply(self.attend(x[0], rotary, context)).unsqueeze(0), None


def _joined_bias(linears: list[nn.Linear]) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    parts: list[torch.Tensor] = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        for linear in linears
    ]
    return torch.cat(parts).detach()


class FusedLayer(Fused):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`: no pass of its own for norms and sums."""

    def __init__(
        self,
        module: nn.Module,
        norms: tuple[Norm, Norm],
        attention: FusedAttention,
        mlp: FusedMLP,
        operations: Operations,
    ) -> None:
        self._own: Forward = module.forward
        self.norms, self.attention, self.mlp = norms, attention, mlp
        self._operations = operations

    @classmethod
    def of(cls, module: nn.Module, operations: Operations) -> FusedLayer | None:
        """Of a layer whose parts are fused already."""
        names = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
        before, between, attention, mlp = (
            getattr(getattr(module, name, None), "forward", None) for name in names
        )
        if not (isinstance(before, FusedNorm) and isinstance(between, FusedNorm)):
            return None
        if not (isinstance(attention, FusedAttention) and isinstance(mlp, FusedMLP)):
            return None
        return cls(module, (before.norm, between.norm), attention, mlp, operations)

    def compute(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rotary = kwargs.get("position_embeddings")
        context = None if args else self.attention.ready(hidden_states, rotary)
        if context is None or rotary is None:
            return None
        x = hidden_states[0]
        attended = self.attention.attend(x, rotary, context, norm=self.norms[0])
        total, rows, norm = self._operations.add_product(
            self.attention.out, attended, x, self.norms[1]
        )
        return self.mlp.apply(rows, norm=norm, residual=total).unsqueeze(0)
