"""The part of the zoo that cannot be served exactly, with what the refusal has to name."""

from __future__ import annotations

from typing import Any

from support_models import tiny_config
from support_zoo import (
    ALTERNATING,
    EXPERTS,
    LATENT,
    LOCAL_EXPERTS,
    ROUTED_EXPERTS,
    SHARED_EXPERT,
    F,
    Variant,
    class_name,
)

INDEXER = {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 16}
LINEAR_HEADS = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def refused(name: str, reason: str, **overrides: Any) -> Variant:
    return Variant(class_name(name), tiny_config(**overrides), reason)


def exactly_refused(name: str, reason: str, **config: Any) -> Variant:
    return Variant(class_name(name), {"vocab_size": 300, **config}, reason)


_OTHER_LAYERS = "layers without a paged KV cache"
_OFF_INTERFACE = "does not use the transformers attention interface"
REFUSED: dict[str, Variant] = {
    "gemma3 bidirectional": refused(
        "Gemma3", "not causal", head_dim=32, **ALTERNATING, use_bidirectional_attention=True
    ),
    "granite hybrid": refused(
        "GraniteMoeHybrid",
        _OTHER_LAYERS,
        **LOCAL_EXPERTS,
        shared_intermediate_size=32,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
    ),
    "qwen3 next": refused(
        "Qwen3Next", _OTHER_LAYERS, **EXPERTS, **SHARED_EXPERT, **LINEAR_HEADS, head_dim=16
    ),
    "qwen3.5": refused("Qwen3_5", _OTHER_LAYERS, **LINEAR_HEADS, head_dim=16),
    "qwen3.5 moe": refused(
        "Qwen3_5Moe", _OTHER_LAYERS, **EXPERTS, **SHARED_EXPERT, **LINEAR_HEADS, head_dim=16
    ),
    "olmo hybrid": refused("OlmoHybrid", _OTHER_LAYERS),
    "minimax 01": refused("MiniMax", _OTHER_LAYERS, **LOCAL_EXPERTS, head_dim=16, block_size=16),
    "kimi linear": refused("KimiLinear", _OTHER_LAYERS),
    "nemotron h": refused("NemotronH", _OTHER_LAYERS),
    "lfm2": refused("Lfm2", _OTHER_LAYERS, layer_types=["conv", F] * 2),
    "lfm2 moe": refused(
        "Lfm2Moe", _OTHER_LAYERS, **EXPERTS, layer_types=["conv", F] * 2, num_dense_layers=1
    ),
    "zaya": refused("Zaya", _OTHER_LAYERS),
    "inkling": refused("Inkling", _OTHER_LAYERS),
    "jamba": refused(
        "Jamba",
        _OTHER_LAYERS,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
    ),
    "bamba": refused(
        "Bamba",
        _OTHER_LAYERS,
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
    ),
    "falcon h1": refused(
        "FalconH1",
        _OTHER_LAYERS,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_ssm=128,
        mamba_d_state=16,
    ),
    "recurrent gemma": refused(
        "RecurrentGemma", _OTHER_LAYERS, attention_window_size=7, lru_width=64
    ),
    "mamba": exactly_refused("Mamba", _OTHER_LAYERS, hidden_size=64, num_hidden_layers=2),
    "mamba2": exactly_refused(
        "Mamba2",
        _OTHER_LAYERS,
        hidden_size=64,
        num_hidden_layers=2,
        head_dim=16,
        num_heads=8,
        state_size=16,
    ),
    "rwkv": exactly_refused("Rwkv", "recurrent state", hidden_size=64, num_hidden_layers=2),
    "deepseek v3.2": refused("DeepseekV32", _OTHER_LAYERS, **LATENT, **ROUTED_EXPERTS, **INDEXER),
    "deepseek v4": refused("DeepseekV4", _OTHER_LAYERS, **ROUTED_EXPERTS),
    "glm moe dsa": refused("GlmMoeDsa", _OTHER_LAYERS, **LATENT, **ROUTED_EXPERTS, **INDEXER),
    "hy v4": refused("HYV4", _OTHER_LAYERS),
    "gpt neo": exactly_refused(
        "GPTNeo",
        _OFF_INTERFACE,
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=7,
        max_position_embeddings=256,
    ),
    "bloom": exactly_refused("Bloom", _OFF_INTERFACE, hidden_size=64, n_layer=3, n_head=4),
    "mpt": exactly_refused(
        "Mpt", _OFF_INTERFACE, d_model=64, n_layers=3, n_heads=4, max_seq_len=256
    ),
    "falcon": exactly_refused(
        "Falcon",
        _OFF_INTERFACE,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        alibi=False,
    ),
    "falcon alibi": exactly_refused(
        "Falcon",
        _OFF_INTERFACE,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        alibi=True,
    ),
    "xglm": exactly_refused(
        "XGLM", _OFF_INTERFACE, d_model=64, ffn_dim=96, num_layers=3, attention_heads=4
    ),
    "doge": refused("Doge", "attention mask of its own"),
    "t5": exactly_refused(
        "T5ForConditionalGeneration",
        "encoder-decoder",
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
    ),
    "bart": exactly_refused("BartForConditionalGeneration", "encoder-decoder", d_model=64),
    "bart decoder": exactly_refused("BartForCausalLM", "takes no position_ids", d_model=64),
}
