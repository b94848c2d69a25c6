"""Where options come from, and which are refused."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from tokenmill_engine.config import EngineConfig
from tokenmill_worker.commands.worker import worker
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.settings import Settings, load_settings
from tokenmill_worker.ways import _policy


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("TOKENMILL_", "REDIS_")):
            monkeypatch.delenv(name)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path, "c.toml", "lease_ms = 9000\nflush_ms = 5\nseed = 1\n")
    monkeypatch.setenv("TOKENMILL_LEASE_MS", "8000")
    monkeypatch.setenv("TOKENMILL_FLUSH_MS", "6")

    settings = load_settings({"config": config, "lease_ms": "7000"})

    assert (settings.lease_ms, settings.flush_ms, settings.seed) == (7000, 6, 1)
    assert settings.max_num_seqs == 128


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'pool = "chat"\nmax-num-seqs = 4\nenable_prefix_caching = false\n'),
        ("c.yaml", "pool: chat\nmax-num-seqs: 4\nenable_prefix_caching: false\n"),
        ("c.json", '{"pool":"chat","max-num-seqs":4,"enable_prefix_caching":false}'),
    ],
)
def test_three_kinds_of_file(tmp_path: Path, name: str, text: str) -> None:
    settings = load_settings({"config": write(tmp_path, name, text)})

    assert (settings.pool, settings.max_num_seqs) == ("chat", 4)
    assert settings.enable_prefix_caching is False


def test_the_file_can_be_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_CONFIG", str(write(tmp_path, "c.json", '{"pool":"chat"}')))

    assert load_settings({}).pool == "chat"


def test_redis_url_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://common:6379/1")
    assert load_settings({}).redis_url_with_password() == "redis://common:6379/1"
    monkeypatch.setenv("TOKENMILL_REDIS_URL", "redis://ours:6379/0")
    assert load_settings({}).redis_url_with_password() == "redis://ours:6379/0"


def test_a_password_file_fills_in_the_url(tmp_path: Path) -> None:
    secret = write(tmp_path, "secret", "p@ss/word\n")

    settings = load_settings({
        "redis_url": "redis://user:old@host:6379/0", "redis_password_file": str(secret)
    })  # fmt: skip

    assert settings.redis_url_with_password() == "redis://user:p%40ss%2Fword@host:6379/0"
    assert "p@ss" not in repr(settings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lease_ms": "1000", "heartbeat_ms": "400"}, "heartbeat_ms: three of them"),
        ({"socket_timeout_s": "0.9"}, "socket_timeout_s: must be at least 1"),
        ({"lease_ms": "soon"}, "lease_ms: "),
        ({"dtype": "int4"}, "dtype: "),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill: cannot be switched off"),
        ({"redis_url": "http://host"}, "redis_url: must start with redis://"),
        ({"namespace": "a:b"}, "namespace: use"),
        ({"name": "{x}"}, "name: "),
        ({"metrics_port": "70000"}, "metrics_port: "),
        ({"redis_password_file": "/nowhere/secret"}, "redis_password_file: cannot be read"),
    ],
)
def test_wrong_options_are_refused_in_one_line(flags: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(flags)

    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "max_num_sequences = 3", "unknown option max_num_sequences; the options are: "),
        ("c.toml", "lease_ms = ", "is no valid TOML"),
        ("c.yaml", "a: [", "is no valid YAML"),
        ("c.json", "{", "is no valid JSON"),
        ("c.json", "[1]", "must hold option names and values"),
        ("c.ini", "a=1", "must end in .toml"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings({"config": write(tmp_path, name, text)})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        load_settings({"config": tmp_path / "none.toml"})


def test_a_mistyped_variable_is_refused_and_a_strangers_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKENMILL_GATEWAY_PORT", "1")
    assert load_settings({}).pool == "default"
    monkeypatch.setenv("TOKENMILL_MAX_NUM_SEQ", "4")
    with pytest.raises(SettingsError, match="unknown option TOKENMILL_MAX_NUM_SEQ"):
        load_settings({})


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_MAX_MODEL_LEN", "")

    assert load_settings({}).max_model_len is None


def test_every_engine_option_is_an_option_of_the_worker_with_the_same_default() -> None:
    settings = load_settings({"model": "a/b"})

    assert settings.engine_config() == EngineConfig(model="a/b")
    assert {item.name for item in fields(EngineConfig)} <= set(Settings.model_fields)


def test_every_option_is_a_flag_with_help() -> None:
    flags = {parameter.name: parameter for parameter in worker.params}

    assert set(flags) == {*Settings.model_fields, "config", "print_config"}
    for name, parameter in flags.items():
        assert parameter.opts[0] == f"--{name.replace('_', '-')}"
        assert getattr(parameter, "help", None)
        assert parameter.default is None or name in {"config", "print_config"}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"model": "org/small"}, ("org/small", "small")),
        ({"model": "small"}, ("small",)),
        ({"model": "/models/small"}, ("small", "/models/small")),
        ({"model": "org/small", "served_model_name": "chat"}, ("chat",)),
    ],
)
def test_names_of_the_model(options: dict[str, str], names: tuple[str, ...]) -> None:
    assert load_settings(options).model_names == names


def test_settings_can_be_written_as_json_without_secrets() -> None:
    settings = load_settings({"redis_url": "redis://u:canary@h/0"})

    assert "canary" not in json.dumps(settings.model_dump(mode="json"))


def test_the_cap_on_a_tenant_is_the_workers_to_say() -> None:
    """What `tick` notes in Redis for everybody."""
    settings = load_settings({"max_running_per_tenant": "3"})

    assert _policy(settings, in_cluster=False).max_running_per_tenant == 3
