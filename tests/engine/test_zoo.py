"""Every way in which transformers' decoders differ, against `generate`, one request at a time.

Tokens alone would prove little: with tied embeddings they hardly depend on attention. So logits
are compared, and whatever a model uses beyond plain causal attention is also taken away once, which
must show.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from support_models import random_prompts, reference, run_batched, tiny_model, tiny_runner
from support_zoo import SERVED
from support_zoo_refused import REFUSED
from tokenmill_engine.attention import AttentionMetadata, AttentionRule, LayerCache
from tokenmill_engine.errors import UnsupportedModel
from tokenmill_engine.paged_attention_reference import TorchPagedAttention

PROMPT_TOKENS = (3, 17, 41, 9, 26)
MAX_TOKENS = 12
TOLERANCE = 2e-3  # worst seen 3e-4 (unscaled attention logits), typically 1e-5
VISIBLE = 1e-2

#: One for each thing that can go wrong; the others run in `make test-all`.
FAST = {
    "llama",
    "phi4 longrope partial",
    "qwen3 sliding",
    "gemma2",
    "gemma3n",
    "gpt oss",
    "phimoe sliding",
    "llama4",
    "deepseek v3",
    "gpt2 layer scale",
    "diffllama",
    "opt projected",
    "granite hybrid, attention only",
    "jamba",
    "rwkv",
    "bloom",
    "doge",
    "deepseek v3.2",
    "gemma3 bidirectional",
    "t5",
    "bart decoder",
}


class RuleSpy(TorchPagedAttention):
    """Notes what the model uses; `without` takes one of these things away."""

    def __init__(self, without: str | None = None) -> None:
        super().__init__()
        self.used: set[str] = set()
        self._without = without

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        rule: AttentionRule,
    ) -> torch.Tensor:
        plain = {"scaling": query.shape[-1] ** -0.5}
        longest = max(PROMPT_TOKENS) + MAX_TOKENS
        uses = {  # and so that it can show in a test this short
            "window": rule.window is not None and rule.window < longest,
            "chunk": rule.chunk is not None and rule.chunk < longest,
            "softcap": rule.softcap is not None and rule.softcap < 20,  # scores stay below
            "sinks": rule.sinks is not None,
            "scaling": rule.scaling != pytest.approx(plain["scaling"]),
        }
        self.used |= {thing for thing, is_used in uses.items() if is_used}
        if self._without is not None:
            rule = replace(rule, **{self._without: plain.get(self._without)})
        return super().write_and_attend(query, key, value, layer, meta, rule)


def params(names: Iterable[str]) -> list[object]:
    return [pytest.param(n, marks=() if n in FAST else pytest.mark.slow, id=n) for n in names]


@pytest.mark.parametrize("name", params(SERVED))
def test_equals_generate(name: str) -> None:
    variant = SERVED[name]
    model = tiny_model(variant.class_name, **variant.config)
    prompts = random_prompts(model, PROMPT_TOKENS)
    wanted = [reference(model, prompt, MAX_TOKENS) for prompt in prompts]
    continuations = [generation.token_ids for generation in wanted]

    def largest_difference(spy: RuleSpy, **options: object) -> tuple[float, bool]:
        runner = tiny_runner(model, backend=spy, **options)
        switch = runner.rope_switch_tokens
        logits = run_batched(runner, prompts, continuations, rope_switch_tokens=switch)
        got, expected = torch.cat(logits), torch.cat([one.logits for one in wanted])
        same_tokens = torch.equal(got.argmax(-1), expected.argmax(-1))
        return float((got - expected).abs().max()), same_tokens

    spy = RuleSpy()
    difference, same_tokens = largest_difference(spy)
    assert difference < TOLERANCE
    assert same_tokens
    for thing in sorted(spy.used):
        without, _ = largest_difference(RuleSpy(without=thing), skip_self_test=True)
        assert without > VISIBLE, f"{thing} makes no difference"


@pytest.mark.parametrize("name", params(REFUSED))
def test_refused_with_the_reason(name: str) -> None:
    variant = REFUSED[name]
    model = tiny_model(variant.class_name, **variant.config)
    with pytest.raises(UnsupportedModel, match=variant.refusal):
        tiny_runner(model)


def test_the_zoo_is_complete() -> None:
    assert SERVED.keys() | REFUSED.keys() >= FAST
    assert len(SERVED) == 119
    assert len(REFUSED) == 34
