"""Building the native kernels, and what happens where that is impossible."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support_models import tiny_model
from tokenmill_engine import kernel_choice
from tokenmill_engine.attention import AttentionBackend, AttentionSpec
from tokenmill_engine.config import EngineConfig, Kernels
from tokenmill_engine.device_sampling import choose_on_device
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.kernel_choice import choose_attention, choose_sampling, prepare_modules
from tokenmill_engine.kernels import build, prebuilt
from tokenmill_engine.kernels.build import KernelUnavailable, load_kernel
from tokenmill_engine.native_attention import NativePagedAttention
from tokenmill_engine.native_sampling import NativeSampling
from tokenmill_engine.packed_linear import PackedLinear
from tokenmill_engine.paged_attention_reference import TorchPagedAttention
from tokenmill_engine.sampler import TokenChooser, choose_by_torch
from tokenmill_engine.triton_attention import TritonPagedAttention

CPU = torch.device("cpu")
NAME = "paged_attention"


def spec(dtype: torch.dtype = torch.float32) -> AttentionSpec:
    return AttentionSpec(None, None, 1, 8, 8, dtype)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache; what other tests loaded is forgotten for a while."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_under_way", {})
    load_kernel.cache_clear()
    yield tmp_path / "tokenmill" / "kernels"
    load_kernel.cache_clear()


@pytest.fixture
def no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))


def test_a_kernel_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        load_kernel(NAME)
    except KernelUnavailable as why:
        pytest.skip(str(why))
    (library,) = cache.iterdir()
    made = library.stat().st_mtime_ns
    load_kernel.cache_clear()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    load_kernel(NAME)
    assert library.stat().st_mtime_ns == made


def test_kernels_that_are_built_ahead_are_waited_for_and_not_compiled_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"attend": 1, "later": 2, "linear": 3}
    for name, number in numbers.items():
        source = tmp_path / f"{name}.cpp"
        source.write_text(f'extern "C" int answer() {{ return {number}; }}')
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # so they are compiled one after the other
    compiled = []
    begun, go_on = threading.Event(), threading.Event()

    def compile_later(source: Path, compiler: str, library: Path) -> None:
        compiled.append(source.stem)
        begun.set()
        assert source.stem == "linear" or go_on.wait(60)
        compile_now(source, compiler, library)

    compile_now = build._compile
    monkeypatch.setattr(build, "_compile", compile_later)
    try:
        build._compiler()
    except KernelUnavailable as why:
        pytest.skip(str(why))
    build.build_ahead()
    build.build_ahead()
    assert begun.wait(60)
    assert load_kernel("linear").answer() == 3  # not begun yet, so nobody waits for its turn
    assert compiled == ["attend", "linear"]
    go_on.set()
    assert [load_kernel(name).answer() for name in numbers] == [1, 2, 3]
    assert sorted(compiled) == sorted(numbers)


@pytest.mark.usefixtures("no_compiler")
def test_what_keeps_a_kernel_from_being_built_ahead_is_told_when_it_is_asked_for() -> None:
    build.build_ahead()
    with pytest.raises(KernelUnavailable, match="install g"):
        load_kernel(NAME)


def test_another_source_is_another_library(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kernel.cpp"
    keys = set()
    for text in ("int one;", "int two;"):
        source.write_text(text)
        keys.add(build._key(source, "c++"))
    monkeypatch.setattr(build, "_processor", lambda: "another processor")
    keys.add(build._key(source, "c++"))
    assert len(keys) == 3


def test_a_source_that_does_not_compile_is_told_and_leaves_nothing(
    cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.cpp").write_text("this is not C++")
    with pytest.raises(KernelUnavailable, match=r"broken\.cpp"):
        build._compile(tmp_path / "broken.cpp", "c++", cache / "broken.so")
    assert not list(cache.iterdir())


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_does_it_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        backend = choose_attention("auto", [spec()], CPU)
    assert isinstance(backend, TorchPagedAttention)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "install g++" in record.message


@pytest.mark.usefixtures("no_compiler")
def test_native_without_a_compiler_is_refused() -> None:
    with pytest.raises(ConfigError, match="kernels: no C\\+\\+ compiler"):
        choose_attention("native", [spec()], CPU)


def test_a_type_that_the_kernel_does_not_know_is_left_to_torch() -> None:
    assert isinstance(choose_attention("auto", [spec(torch.float16)], CPU), TorchPagedAttention)
    with pytest.raises(ConfigError, match="float16"):
        choose_attention("native", [spec(), spec(torch.float16)], CPU)


def test_the_choice_is_respected() -> None:
    assert isinstance(choose_attention("torch", [spec()], CPU), TorchPagedAttention)
    try:
        NativePagedAttention([])
    except KernelUnavailable as why:
        pytest.skip(str(why))
    assert isinstance(choose_attention("auto", [spec()], CPU), NativePagedAttention)
    with pytest.raises(ConfigError, match="kernels"):
        EngineConfig(model="m", kernels="cuda")  # type: ignore[arg-type]


def chosen_sampling(
    kernels: Kernels = "auto", device: str = "cpu", backend: AttentionBackend | None = None
) -> TokenChooser:
    backend = backend or TorchPagedAttention()
    return choose_sampling(kernels, torch.device(device), backend, vocab_size=300)


def test_tokens_are_chosen_by_the_native_kernel_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        NativeSampling()
    except KernelUnavailable as why:
        pytest.skip(str(why))
    with caplog.at_level(logging.INFO):
        for kernels in ("auto", "native"):
            assert isinstance(chosen_sampling(kernels), NativeSampling)
        assert chosen_sampling("torch") is choose_by_torch
        assert chosen_sampling(device="cuda") is choose_by_torch
    said = [record.message for record in caplog.records]
    assert said == ["sampling: native kernel"] * 2 + ["sampling: plain torch"] * 2


def test_tokens_are_chosen_by_triton_where_the_attention_is() -> None:
    pytest.importorskip("triton", reason="the dev extra brings triton on Linux")
    assert chosen_sampling(backend=TritonPagedAttention([], CPU)) is choose_on_device


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_chooses_the_tokens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen_sampling() is choose_by_torch
    assert "sampling: plain torch, several times slower: no C++ compiler" in caplog.text
    with pytest.raises(ConfigError, match="kernels: no C\\+\\+ compiler"):
        chosen_sampling("native")


@pytest.mark.parametrize(
    ("by_torch", "by_kernel", "kernels", "packs"),
    [
        (True, 0, "auto", False),  # such as one that was compiled ahead
        (True, 0, "native", True),
        (True, 1, "auto", True),
        (True, 2, "auto", True),
        (True, 3, "auto", True),
        (False, 0, "auto", True),
        (True, None, "auto", False),
    ],
)
def test_bfloat16_is_left_to_torch_where_only_torch_multiplies_it(
    by_torch: bool, by_kernel: int | None, kernels: Kernels, packs: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    try:
        load_kernel("linear")
    except KernelUnavailable as why:
        pytest.skip(str(why))

    def products() -> int:
        if by_kernel is None:
            raise KernelUnavailable("no C++ compiler")
        return by_kernel

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: by_torch)
    monkeypatch.setattr(kernel_choice, "bfloat16_products", products)
    model = tiny_model().bfloat16()
    with caplog.at_level(logging.INFO):
        prepare_modules(kernels, model, TorchPagedAttention(), {}, max_model_len=256)
    assert isinstance(model.lm_head, PackedLinear) is packs
    assert ("plain torch, whose bfloat16 is faster" in caplog.text) is not packs


V3 = "flags : fpu avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("processor", "levels"),
    [
        ("", []),
        ("flags : fpu sse2 avx", []),
        (V3, ["x86-64-v3"]),
        (f"{V3} avx512f", ["x86-64-v3"]),
        (V4, ["x86-64-v4", "x86-64-v3"]),
        (f"{V4} avx512_bf16 amx_tile amx_int8", ["x86-64-v4", "x86-64-v3"]),
        (
            f"{V4} avx512_bf16 amx_tile amx_int8 amx_bf16",
            ["x86-64-v4-amx", "x86-64-v4", "x86-64-v3"],
        ),
        (V4.replace(" fma", ""), []),
    ],
)
def test_the_levels_of_a_processor(processor: str, levels: list[str]) -> None:
    assert prebuilt.levels_of(processor) == levels


@pytest.fixture
def tiny_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles at once, beside which prebuilt libraries are looked for."""
    source = tmp_path / "tiny.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "_source", lambda _name: source)
    monkeypatch.setenv(prebuilt.FOLDER_VARIABLE, str(tmp_path / "ahead"))
    if "x86-64-v3" not in prebuilt.levels_of(build._processor()):
        pytest.skip("no prebuilt kernels for this processor")
    try:
        build.compile_for("tiny", "x86-64-v3", prebuilt.folder())
    except KernelUnavailable as why:
        pytest.skip(str(why))
    return source


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_a_prebuilt_kernel_is_loaded_and_the_log_says_so(
    tiny_kernel: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.INFO):
        assert load_kernel("tiny").answer() == 42
    assert "prebuilt for x86-64-v3" in caplog.text


@pytest.mark.usefixtures("cache")
def test_a_prebuilt_kernel_of_another_source_is_not_loaded(
    tiny_kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    tiny_kernel.write_text('extern "C" int answer() { return 41; }')
    with pytest.raises(KernelUnavailable, match="install g"):
        load_kernel("tiny")


def test_every_kernel_is_prebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def note(source: Path, _compiler: str, library: Path, *, processor: tuple[str, ...]) -> None:
        made.append((source.name, library.parent, processor))

    monkeypatch.setattr(build, "_compile", note)
    monkeypatch.setattr(build, "_compiler", lambda: "c++")
    assert prebuilt.main(["--level", "x86-64-v4", "--output", str(tmp_path)]) == 0
    kernels = ("layers.cpp", "linear.cpp", "paged_attention.cpp", "sample.cpp")
    assert made == [(kernel, tmp_path, ("-march=x86-64-v4",)) for kernel in kernels]
    assert len(capsys.readouterr().out.splitlines()) == len(kernels)
