"""The zoo: one tiny configuration for each way in which transformers' decoders differ.

Windows and chunks are 7 or 8 tokens, much shorter than the sequences that the tests run, so that a
window that is ignored shows in the logits. Drawn from transformers 5.24.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support_models import tiny_config

S, F = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Variant:
    """`refusal`: part of the reason for which it must be refused; None: it must be served."""

    class_name: str
    config: dict[str, Any] = field(hash=False)
    refusal: str | None = None


def class_name(name: str) -> str:
    return name if "LMHead" in name or "For" in name else f"{name}ForCausalLM"


def served(name: str, **overrides: Any) -> Variant:
    return Variant(class_name(name), tiny_config(**overrides))


def exactly(name: str, **config: Any) -> Variant:
    """For classes that know none of the usual names."""
    return Variant(class_name(name), {"vocab_size": 300, **config})


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


def long_rope(switch: int, dims: int, **settings: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * dims, "long_factor": [1.0 + i for i in range(dims)]}
    parameters = rope("longrope", original_max_position_embeddings=switch, **factors, **settings)
    return {"original_max_position_embeddings": switch, **settings, **parameters}


SLIDING = {"sliding_window": 7}
ALTERNATING = {**SLIDING, "layer_types": [S, F, S, F]}
UPPER_LAYERS = {**SLIDING, "use_sliding_window": True, "max_window_layers": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
#: Multi-head latent attention: K has 24 numbers a head, V 12.
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
GEMMA_LAYERS = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    **SLIDING,
    "layer_types": [S, S, F, S, S, F],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
}
LLAMA4 = {
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "head_dim": 16,
    "attention_chunk_size": 8,
    "no_rope_layers": [1, 0, 1, 0],
    "moe_layers": [1, 3],
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
OPT = {
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
BERT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "is_decoder": True,
}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}

_LLAMA_LIKE = {
    "llama": served("Llama"),
    "llama mha bias": served("Llama", num_key_value_heads=4, attention_bias=True, head_dim=24),
    "llama mqa": served("Llama", num_key_value_heads=1),
    "llama rope llama3": served(
        "Llama",
        **rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama rope linear": served("Llama", **rope("linear", factor=4.0)),
    "llama rope yarn": served(
        "Llama", **rope("yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    "llama rope dynamic": served("Llama", **rope("dynamic", factor=4.0)),
    "phi3": served("Phi3"),
    "phi3 sliding": served("Phi3", **SLIDING),
    "phi3 longrope short": served("Phi3", **long_rope(128, 8)),
    "phi3 longrope mixed": served("Phi3", **long_rope(24, 8)),
    "phi4 longrope partial": served("Phi3", **long_rope(24, 6, partial_rotary_factor=0.75)),
    "mistral": served("Mistral", **SLIDING),
    "mistral no window": served("Mistral", sliding_window=None),
    "ministral": served("Ministral", **ALTERNATING, head_dim=16),
    "ministral3": served("Ministral3", sliding_window=None),
    "ministral3 query scale": served(
        "Ministral3",
        head_dim=16,
        **rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            llama_4_scaling_beta=0.1,
            max_position_embeddings=16,
            beta_fast=32.0,
            beta_slow=1.0,
            **MSCALE,
        ),
    ),
    "qwen2": served("Qwen2"),
    "qwen2 sliding": served("Qwen2", **UPPER_LAYERS),
    "qwen3": served("Qwen3", head_dim=24),
    "qwen3 sliding": served("Qwen3", head_dim=16, **UPPER_LAYERS),
    "gemma": served("Gemma", head_dim=32),
    "gemma2": served(
        "Gemma2",
        head_dim=32,
        **SLIDING,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        query_pre_attn_scalar=20,
    ),
    "gemma3": served("Gemma3", head_dim=32, **ALTERNATING, query_pre_attn_scalar=20),
    "gemma3n": served(
        "Gemma3n",
        **GEMMA_LAYERS,
        intermediate_size=[96] * 6,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5] * 2 + [0.0] * 4,
        altup_num_inputs=2,
    ),
    "gemma4": served("Gemma4", **GEMMA_LAYERS, global_head_dim=32),
    "gemma4 k is v": served(
        "Gemma4",
        **ALTERNATING,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
    ),
    "vaultgemma": served("VaultGemma", head_dim=32, **SLIDING),
    "vaultgemma capped": served("VaultGemma", head_dim=32, **SLIDING, attn_logit_softcapping=5.0),
    "phi": served("Phi", partial_rotary_factor=0.5),
    "olmo": served("Olmo", clip_qkv=2.0),
    "olmo2": served("Olmo2"),
    "olmo3": served("Olmo3", **ALTERNATING),
    "smollm3": served("SmolLM3", no_rope_layers=[1, 0, 1, 0]),
    "smollm3 sliding": served(
        "SmolLM3", no_rope_layers=[1, 0, 1, 0], use_sliding_window=True, **ALTERNATING
    ),
    "granite": served(
        "Granite",
        attention_multiplier=0.3,
        residual_multiplier=0.5,
        logits_scaling=2.0,
        embedding_multiplier=3.0,
    ),
    "granite sliding": served("GraniteSWA", **ALTERNATING),
    "cohere": served("Cohere", use_qk_norm=True),
    "cohere2": served("Cohere2", **SLIDING, layer_types=[S, S, S, F]),
    "starcoder2": served("Starcoder2", **SLIDING),
    "stablelm": served("StableLm", use_qkv_bias=True),
    "stablelm parallel": served("StableLm", use_parallel_residual=True, qk_layernorm=True),
    "glm": served("Glm", head_dim=16),
    "glm4": served("Glm4", head_dim=16),
    "exaone4": served(
        "Exaone4", **SLIDING, sliding_window_pattern="LLLG", layer_types=[S, S, S, F]
    ),
    "ernie4.5": served("Ernie4_5", head_dim=16),
    "hunyuan": served("HunYuanDenseV1", head_dim=16),
    "hunyuan alpha": served(
        "HunYuanDenseV1",
        head_dim=16,
        **rope("dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, **MSCALE),
    ),
    "nemotron": served("Nemotron", head_dim=16),
    "persimmon": served("Persimmon"),
    "helium": served("Helium", head_dim=16),
    "seed oss": served("SeedOss", head_dim=16),
    "arcee": served("Arcee"),
    "apertus": served("Apertus"),
    "bitnet": served("BitNet"),
    "diffllama": served("DiffLlama"),
    "nanochat": served("NanoChat"),
    "cwm": served("Cwm", **ALTERNATING),
    "modernbert decoder": served("ModernBertDecoder"),
    "modernbert decoder sliding": served(
        "ModernBertDecoder", local_attention=8, layer_types=[S, F, S, F]
    ),
    "hyperclovax": served("HyperCLOVAX"),
    "jais2": served("Jais2"),
    "hrm text": served("HrmText"),
    "beam": served("Beam"),
    "flint": served("Flint"),
    "kolibri1": served("Kolibri1"),
    "biogpt": served("BioGpt"),
}
_GPT_LIKE = {
    "gpt2": exactly("GPT2LMHeadModel", **GPT2),
    "gpt2 layer scale": exactly(
        "GPT2LMHeadModel",
        **GPT2,
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
    ),
    "gpt bigcode": exactly("GPTBigCode", **GPT2, multi_query=True),
    "gpt neox": served("GPTNeoX"),
    "gptj": exactly("GPTJ", **GPT2, rotary_dim=8),
    "codegen": exactly("CodeGen", **GPT2, rotary_dim=8),
    "opt": exactly("OPT", **OPT, word_embed_proj_dim=64),
    "opt projected": exactly("OPT", **OPT, word_embed_proj_dim=32, do_layer_norm_before=False),
    "bert": exactly("BertLMHeadModel", **BERT),
    "roberta": exactly("RobertaForCausalLM", **BERT),
}
_MIXTURES = {
    "qwen2 moe": served("Qwen2Moe", **EXPERTS, **SHARED_EXPERT),
    "qwen2 moe sliding": served("Qwen2Moe", **EXPERTS, **SHARED_EXPERT, **UPPER_LAYERS),
    "qwen3 moe": served("Qwen3Moe", **EXPERTS, head_dim=16),
    "qwen3 moe sliding": served(
        "Qwen3Moe", **EXPERTS, head_dim=16, use_sliding_window=True, **SLIDING
    ),
    "phimoe": served("Phimoe", **LOCAL_EXPERTS, sliding_window=None),
    "phimoe sliding": served("Phimoe", **LOCAL_EXPERTS, **SLIDING),
    "olmoe": served("Olmoe", num_experts=8, num_experts_per_tok=2),
    "flex olmo": served("FlexOlmo", **FEW_EXPERTS),
    "granite moe": served("GraniteMoe", **LOCAL_EXPERTS),
    "granite moe shared": served("GraniteMoeShared", **LOCAL_EXPERTS, shared_intermediate_size=32),
    "granite moe sliding": served("GraniteMoeSWA", **ALTERNATING, **LOCAL_EXPERTS),
    "granite hybrid, attention only": served(
        "GraniteMoeHybrid",
        num_local_experts=0,
        shared_intermediate_size=32,
        layer_types=["attention"] * 4,
    ),
    "cohere2 moe": served("Cohere2Moe", **ALTERNATING, **FEW_EXPERTS),
    "gpt oss": served(
        "GptOss",
        **LOCAL_EXPERTS,
        **ALTERNATING,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    ),
    "mixtral": served("Mixtral", **LOCAL_EXPERTS),
    "mixtral sliding": served("Mixtral", **LOCAL_EXPERTS, **SLIDING),
    "glm4 moe": served("Glm4Moe", **ROUTED_EXPERTS, head_dim=16, use_qk_norm=True),
    "exaone moe": served("ExaoneMoe", **EXPERTS, **SLIDING, layer_types=[S, S, S, F], head_dim=16),
    "ernie4.5 moe": served(
        "Ernie4_5_Moe",
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=32,
        moe_layer_start_index=1,
    ),
    "hunyuan moe": served("HunYuanMoEV1", head_dim=16, num_experts=4, moe_topk=2),
    "minimax m2": served("MiniMaxM2", **LOCAL_EXPERTS, head_dim=16),
    "llama4": served("Llama4", **LLAMA4, attn_temperature_tuning=False),
    "llama4 tuned, far below the switch": served(
        "Llama4", **LLAMA4, attn_temperature_tuning=True, floor_scale=64
    ),
    "dbrx": exactly(
        "Dbrx",
        d_model=64,
        n_layers=3,
        n_heads=4,
        max_seq_len=256,
        attn_config={"kv_n_heads": 2, "clip_qkv": 4.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "dots1": served("Dots1", **ROUTED_EXPERTS, **ALTERNATING),
    "jetmoe": served("JetMoe", kv_channels=16, **LOCAL_EXPERTS),
    "afmoe": served(
        "Afmoe",
        **FEW_EXPERTS,
        **ALTERNATING,
        moe_intermediate_size=32,
        num_dense_layers=1,
        head_dim=16,
    ),
    "mimo v2 flash": served("MiMoV2Flash", **SLIDING),
    "laguna": served("Laguna", **ALTERNATING, head_dim=16),
    "mellum": served("Mellum", **ALTERNATING, **FEW_EXPERTS, moe_intermediate_size=32, head_dim=16),
    "hy v3": served("HYV3"),
    "solar open": served("SolarOpen", **ROUTED_EXPERTS),
}
_LATENT_ATTENTION = {
    "deepseek v2": served("DeepseekV2", **LATENT, **ROUTED_EXPERTS),
    "deepseek v2 full q": served("DeepseekV2", **LATENT | {"q_lora_rank": None}, **ROUTED_EXPERTS),
    "deepseek v3": served("DeepseekV3", **LATENT, **ROUTED_EXPERTS),
    "deepseek v3 yarn": served(
        "DeepseekV3",
        **LATENT,
        **ROUTED_EXPERTS,
        **rope("yarn", factor=4.0, original_max_position_embeddings=16, **MSCALE),
    ),
    "mistral4": served("Mistral4", **LATENT, **ROUTED_EXPERTS),
    "glm4 moe lite": served("Glm4MoeLite", **LATENT, **ROUTED_EXPERTS),
    "minicpm3": served("MiniCPM3", **LATENT),
    "longcat flash": served(
        "LongcatFlash",
        **LATENT,
        num_layers=2,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        head_dim=8,
    ),
    "youtu": served("Youtu", **LATENT),
    "axk1": served("AXK1", **LATENT, **ROUTED_EXPERTS),
}

SERVED: dict[str, Variant] = {
    **_LLAMA_LIKE,
    **_GPT_LIKE,
    **_MIXTURES,
    **_LATENT_ATTENTION,
}
