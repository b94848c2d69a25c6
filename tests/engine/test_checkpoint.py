"""Loading a model: what is refused, in one line each, and which dtype the rest gets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import JambaConfig, T5Config

from support_models import tiny_model
from tokenmill_engine.checkpoint import load_model
from tokenmill_engine.config import EngineConfig
from tokenmill_engine.errors import ConfigError, ModelLoadError, UnsupportedModel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete float32 model."""
    tiny_model().save_pretrained(tmp_path)
    return tmp_path


def refusal(model: Path | str, kind: type[Exception] = ModelLoadError, **options: object) -> str:
    with pytest.raises(kind) as caught:
        load_model(EngineConfig(model=str(model), **options))
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_loads_a_folder_and_says_what_it_does(folder: Path) -> None:
    said: list[str] = []
    loaded = load_model(EngineConfig(model=str(folder)), said.append)
    expected = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert torch.equal(loaded.model.model.norm.weight, expected)
    assert not loaded.model.training
    assert loaded.dtype is torch.float32
    assert loaded.notes == ()
    assert any("weights" in line for line in said)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(name: str) -> None:
    assert f"no folder {name}" in refusal(name)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    assert "is a file" in refusal(folder / "model.safetensors")


def test_an_unknown_hub_id_while_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = refusal("tokenmill-tests/there-is-no-such-model")
    assert "there-is-no-such-model" in message
    assert "cannot be read" in message


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refusal(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "convert them to safetensors" in refusal(folder)


def test_pickled_weights_beside_safetensors_are_not_read(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert load_model(EngineConfig(model=str(folder))).dtype is torch.float32


def test_damaged_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "weights cannot be read" in refusal(folder)


def test_missing_tensors_are_not_drawn_at_random(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = refusal(folder)
    assert "lacks 1 tensors" in message
    assert "model.layers.1.mlp.up_proj.weight" in message


def test_an_unreadable_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "configuration cannot be read" in refusal(folder)


def test_an_unknown_model_type(folder: Path) -> None:
    edit_config(folder, model_type="nonesuch")
    assert "nonesuch" in refusal(folder)


def test_quantized_weights(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantized (gptq)" in refusal(folder, UnsupportedModel)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "encoder-decoder"),
        (JambaConfig(use_mamba_kernels=False), "without a paged KV cache"),
    ],
    ids=["t5", "jamba"],
)
def test_refused_before_the_weights_are_read(
    tmp_path: Path, config: T5Config | JambaConfig, reason: str
) -> None:
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"whoever reads this fails otherwise")
    assert reason in refusal(tmp_path, UnsupportedModel)


def test_code_of_the_model_is_not_run_unasked(folder: Path) -> None:
    ran = folder / "ran"
    (folder / "code.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "code.OwnConfig"})
    assert "set trust_remote_code" in refusal(folder)
    assert not ran.exists()


def test_bfloat16_checkpoints_stay_so_where_the_cpu_is_good_at_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model().bfloat16().save_pretrained(folder)
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        answer = SimpleNamespace(_is_mkldnn_bf16_supported=lambda supported=supported: supported)
        monkeypatch.setattr(torch.ops, "mkldnn", answer)
        loaded = load_model(EngineConfig(model=str(folder), device="cpu"))
        assert loaded.dtype is expected
        assert bool(loaded.notes) is not supported


def test_a_dtype_that_was_asked_for_is_used(folder: Path) -> None:
    tiny_model().bfloat16().save_pretrained(folder)
    for name in ("float32", "bfloat16"):
        loaded = load_model(EngineConfig(model=str(folder), dtype=name, device="cpu"))
        assert loaded.dtype is getattr(torch, name)


def test_float16_checkpoints_become_float32_on_a_cpu(folder: Path) -> None:
    tiny_model().half().save_pretrained(folder)
    loaded = load_model(EngineConfig(model=str(folder), device="cpu"))
    assert loaded.dtype is torch.float32
    assert "float16" in loaded.notes[0]


def test_options_that_do_not_fit_the_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "bfloat16" in refusal(folder, ConfigError, dtype="float16", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" in refusal(folder, ConfigError, device="cuda")
