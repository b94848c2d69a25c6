"""Paged attention in plain torch: runs everywhere, and is what faster kernels are tested against.

Decode rows follow flash-decoding (Dao et al., 2023) over the block table: the step's (row, block)
pairs form one flat list, each block is reduced on its own to (maximum, sum, weighted values) in
float32, and the parts of a row are merged by log-sum-exp. Nothing is padded to the longest one.
A row's result depends on its own blocks only, summed in position order, never on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from .attention import AttentionMetadata, AttentionRule, AttentionSpec, LayerCache
from .paged_attention_plan import AttentionPlan, PageTile, PromptTile, build_plan

_MINUS_INFINITY = float("-inf")


class TorchPagedAttention:
    """`AttentionBackend` with K as `[block, Hkv, slot, D]` and V as `[block, Hkv, slot, Dv]`."""

    def __init__(self) -> None:
        self._meta: AttentionMetadata | None = None  # the step that `_plans` belong to
        self._plans: dict[tuple[int | None, int | None, bool], AttentionPlan] = {}

    def cache_shapes(
        self, spec: AttentionSpec, num_blocks: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        head = (num_blocks, spec.num_kv_heads, block_size)
        return (*head, spec.key_dim), (*head, spec.value_dim)

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """See `AttentionBackend.write_and_attend`."""
        layer.key[meta.slot_blocks, :, meta.slot_offsets] = key
        layer.value[meta.slot_blocks, :, meta.slot_offsets] = value
        # Torch's fused kernel knows neither a softcap nor sinks, and wants K as wide as V.
        fused = rule.softcap is None and rule.sinks is None and key.shape[-1] == value.shape[-1]
        plan = self._plan(meta, rule, fused, query.device)
        step = _Step(query, key, value, layer, rule)
        output = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
        if plan.page_tiles:
            output[plan.decode_rows] = step.decode(plan).to(output.dtype)
        for tile in plan.prompt_tiles:
            output[tile.rows] = step.prompt_fused(tile) if fused else step.prompt_exact(tile)
        return output

    def _plan(
        self, meta: AttentionMetadata, rule: AttentionRule, fused: bool, device: torch.device
    ) -> AttentionPlan:
        if meta is not self._meta:
            self._meta, self._plans = meta, {}
        plan_key = (rule.window, rule.chunk, fused)
        if plan_key not in self._plans:
            self._plans[plan_key] = build_plan(meta, rule, whole_prompts=fused, device=device)
        return self._plans[plan_key]


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One attention call of one step: Hkv KV heads, each shared by G query heads."""

    query: torch.Tensor  # [T, H, D]
    key: torch.Tensor  # [T, Hkv, D]
    value: torch.Tensor  # [T, Hkv, Dv]
    layer: LayerCache
    rule: AttentionRule

    def decode(self, plan: AttentionPlan) -> torch.Tensor:
        """-> `[R, H, Dv]` float32"""
        queries = self.query.index_select(0, plan.decode_rows).float() * self.rule.scaling
        queries = queries.view(len(queries), self.key.shape[1], -1, self.key.shape[2])
        parts = [self._reduce_pages(queries, tile) for tile in plan.page_tiles]
        maximum, total, weighted = (torch.cat(part) for part in zip(*parts, strict=True))
        # Merge: scale every part to the maximum of its row, then add up.
        row_maximum = _per_row(maximum, plan, "max")
        scale = torch.exp(maximum - row_maximum.index_select(0, plan.pair_rows))
        row_total = _per_row(total * scale, plan, "sum")
        if self.rule.sinks is not None:
            row_total = row_total + torch.exp(self.rule.sinks.float() - row_maximum)
        row_weighted = _per_row(weighted.mul_(scale[..., None]), plan, "sum")
        return row_weighted / row_total[..., None]

    def _reduce_pages(
        self, queries: torch.Tensor, tile: PageTile
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> maximum `[P, H]`, sum `[P, H]` and weighted values `[P, H, Dv]` of each pair"""
        keys = self.layer.key.index_select(0, tile.pages).float()  # [P, Hkv, slot, D]
        scores = queries.index_select(0, tile.rows) @ keys.transpose(2, 3)  # [P, Hkv, G, slot]
        scores = _softcapped(scores, self.rule.softcap)
        scores.masked_fill_(tile.hidden[:, None, None], _MINUS_INFINITY)
        maximum = scores.amax(-1, keepdim=True)  # finite: a pair has at least one visible slot
        weights = scores.sub_(maximum).exp_()
        values = self.layer.value.index_select(0, tile.pages).float()  # [P, Hkv, slot, Dv]
        # A weight of zero does not silence what an unwritten slot may hold: 0 · NaN is NaN.
        written = values[tile.partial].masked_fill_(tile.unwritten[:, None, :, None], 0.0)
        values[tile.partial] = written
        return (
            maximum.flatten(1),
            weights.sum(-1).flatten(1),
            (weights @ values).flatten(1, 2),
        )

    def prompt_fused(self, tile: PromptTile) -> torch.Tensor:
        """-> `[rows, H, Dv]`, by torch's fused kernel"""
        queries, keys, values = self._prompt_operands(tile)
        groups = queries.shape[1]
        output = functional.scaled_dot_product_attention(
            queries,
            keys[:, None].expand(-1, groups, -1, -1),
            values[:, None].expand(-1, groups, -1, -1),
            attn_mask=tile.visible,
            is_causal=tile.visible is None,
            scale=self.rule.scaling,
        )
        return output.flatten(0, 1).transpose(0, 1)

    def prompt_exact(self, tile: PromptTile) -> torch.Tensor:
        """-> `[rows, H, Dv]`, step by step in float32"""
        queries, keys, values = self._prompt_operands(tile)
        num_kv_heads, groups, num_rows, _ = queries.shape
        packed = queries.flatten(1, 2).float() * self.rule.scaling  # heads of a KV head as rows
        scores = packed @ keys.float().transpose(1, 2)
        scores = scores.view(num_kv_heads, groups, num_rows, -1)
        scores = _softcapped(scores, self.rule.softcap)
        if tile.visible is not None:
            scores.masked_fill_(~tile.visible, _MINUS_INFINITY)
        maximum = scores.amax(-1, keepdim=True)
        weights = scores.sub_(maximum).exp_()
        total = weights.sum(-1, keepdim=True)
        if self.rule.sinks is not None:
            sinks = self.rule.sinks.float().view(num_kv_heads, groups, 1, 1)
            total = total + torch.exp(sinks - maximum)
        output = weights.flatten(1, 2) @ values.float()
        output = output.view(num_kv_heads, groups, num_rows, -1) / total
        return output.flatten(0, 1).transpose(0, 1).to(self.query.dtype)

    def _prompt_operands(self, tile: PromptTile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> q `[Hkv, G, rows, D]`, k `[Hkv, keys, D]`, v `[Hkv, keys, Dv]`"""
        queries = self.query[tile.rows].transpose(0, 1)
        queries = queries.reshape(self.key.shape[1], -1, *queries.shape[1:])
        keys = slice(tile.first_slot, tile.first_slot + tile.num_keys)
        if tile.pages is None:
            return queries, self.key[keys].transpose(0, 1), self.value[keys].transpose(0, 1)
        return (
            queries,
            _pages_end_to_end(self.layer.key, tile.pages)[:, keys],
            _pages_end_to_end(self.layer.value, tile.pages)[:, keys],
        )


def _pages_end_to_end(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """`[block, Hkv, slot, D]` to `[Hkv, N * slot, D]`"""
    return cache.index_select(0, pages).transpose(0, 1).flatten(1, 2)


def _softcapped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _per_row(parts: torch.Tensor, plan: AttentionPlan, mode: str) -> torch.Tensor:
    """Reduce `[P, …]` to `[R, …]` over the pairs of each row.

    `embedding_bag` reduces each bag on its own and in order, unlike the scatter family on a GPU.
    """
    pairs = torch.arange(parts.shape[0], device=parts.device)
    reduced = functional.embedding_bag(pairs, parts.flatten(1), plan.row_offsets, mode=mode)
    return reduced.view(-1, *parts.shape[1:])
