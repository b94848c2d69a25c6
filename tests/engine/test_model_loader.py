"""From options to a runner: the limits in force, and why they are lower than asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from support_models import tiny_config, tiny_model
from tokenmill_engine import fusion_check
from tokenmill_engine.checkpoint import LoadedModel
from tokenmill_engine.config import EngineConfig
from tokenmill_engine.errors import ConfigError, UnsupportedModel
from tokenmill_engine.kernels.build import KernelUnavailable, load_kernel
from tokenmill_engine.model_loader import ModelFacts, build_runner, load_runner

CHUNKED = tiny_config(
    intermediate_size_mlp=96,
    num_local_experts=4,
    num_experts_per_tok=1,
    head_dim=16,
    attention_chunk_size=8,
    no_rope_layers=[1, 0, 1, 0],
    moe_layers=[1, 3],
)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture
def native_linears() -> None:
    try:
        load_kernel("linear")
    except KernelUnavailable as why:
        pytest.skip(str(why))


def facts_of(model: PreTrainedModel, **options: object) -> ModelFacts:
    options = {"block_size": 4, "num_gpu_blocks_override": 100} | options
    return build_runner(LoadedModel(model), EngineConfig(model="m", **options))[1]


def test_facts_of_a_plain_model(llama: PreTrainedModel) -> None:
    facts = facts_of(llama)
    assert facts.vocab_size == 300
    assert (facts.num_blocks, facts.block_size) == (100, 4)
    assert facts.max_model_len == 256
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (128, 2048)
    assert facts.rope_switch_tokens is None
    assert facts.dtype is torch.float32
    assert facts.device == torch.device("cpu")
    # 4 layers × (K + V) × 2 heads × 16 numbers of 4 bytes, for 100 blocks of 4 tokens
    assert facts.kv_cache_bytes == 4 * 2 * 2 * 16 * 4 * 400
    assert facts.notes == ()


def test_cache_bytes_follow_the_layers_that_are_there() -> None:
    latent = tiny_model(
        "MiniCPM3ForCausalLM",
        **tiny_config(
            num_key_value_heads=4,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
        ),
    )
    assert facts_of(latent).kv_cache_bytes == 4 * 4 * (24 + 12) * 4 * 400


def test_a_longer_context_than_the_model_has(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="max_model_len: is 257; the model ends at 256 tokens"):
        facts_of(llama, max_model_len=257)


def test_too_small_a_cache_lowers_the_length(llama: PreTrainedModel) -> None:
    facts = facts_of(llama, num_gpu_blocks_override=10)
    assert facts.max_model_len == 40
    assert "max_model_len lowered" in facts.notes[0]


def test_dynamic_rope_is_capped_where_it_starts_to_look_at_the_batch() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_model(**tiny_config(max_position_embeddings=64, rope_parameters=rope))
    model.config.max_position_embeddings = 128  # as if the checkpoint advertised the scaled length
    facts = facts_of(model)
    assert facts.max_model_len == 64
    assert "dynamic RoPE" in facts.notes[0]
    with pytest.raises(ConfigError, match="exact up to 64 tokens only"):
        facts_of(model, max_model_len=65)


def test_temperature_tuning_caps_sequences_and_steps() -> None:
    model = tiny_model("Llama4ForCausalLM", **CHUNKED, attn_temperature_tuning=True, floor_scale=40)
    facts = facts_of(model)
    assert (facts.max_model_len, facts.max_num_batched_tokens, facts.max_num_seqs) == (39, 39, 39)
    assert [note.split()[0] for note in facts.notes] == [
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
    ]
    assert facts_of(model, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=39).notes == ()
    with pytest.raises(ConfigError, match="exact up to 39 tokens only: attention temperature"):
        facts_of(model, max_model_len=40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_finds_what_depends_on_the_neighbours(dtype: torch.dtype) -> None:
    """A layer that looks across rows, which nothing in the class or the configuration tells."""
    llama = tiny_model().to(dtype)

    def mix_rows(
        module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor
    ) -> torch.Tensor:
        return output + output.mean(1, keepdim=True)

    hook = llama.model.layers[1].mlp.register_forward_hook(mix_rows)
    try:
        with pytest.raises(UnsupportedModel, match="other results in a batch than alone"):
            facts_of(llama)
        assert facts_of(llama, skip_self_test=True).num_blocks == 100
    finally:
        hook.remove()
    assert facts_of(llama).num_blocks == 100


@pytest.mark.usefixtures("native_linears")
def test_the_self_test_finds_modules_that_were_fused_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the model before it was fused: afterwards all its forwards may be wrong alike."""

    def model_with_a_louder_layer() -> PreTrainedModel:
        model = tiny_model()
        mlp = model.model.layers[1].mlp
        own = mlp.forward
        mlp.forward = lambda x: 1.5 * own(x)
        return model

    assert facts_of(model_with_a_louder_layer()).num_blocks == 100
    monkeypatch.setattr(fusion_check, "same", lambda *_: True)
    with pytest.raises(UnsupportedModel, match="other results in a batch than alone"):
        facts_of(model_with_a_louder_layer())


def test_load_runner_reads_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(tmp_path)
    said: list[str] = []
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    options = EngineConfig(model=str(tmp_path), num_gpu_blocks_override=20, num_threads=3)
    runner, facts = load_runner(options, said.append)
    assert threads == [3]
    assert runner.kv_cache.num_blocks == facts.num_blocks == 20
    assert said[-1] == "warming up"
