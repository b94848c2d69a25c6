"""`--print-config`, secrets from files, and the table of options in the docs."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tokenmill._redis import redis_url
from tokenmill.errors import ConfigurationError
from tokenmill_worker.commands.worker import worker
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.option_table import option_table, with_table
from tokenmill_worker.settings import Settings, load_settings

URL = "redis+sentinel://u:{0}@h:26379/mymaster?sentinel_password={0}"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("TOKENMILL_", "REDIS_")):
            monkeypatch.delenv(name)


def print_config(*arguments: str) -> Result:
    return CliRunner().invoke(worker, [*arguments, "--print-config"])


def origins_of(text: str) -> dict[str, str]:
    """Option → what the comment behind it says."""
    lines = [line.removeprefix("# ") for line in text.splitlines()[1:]]
    return {line.split()[0]: line.rpartition("  # ")[2] for line in lines}


def test_every_option_is_printed_with_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "w.toml"
    file.write_text('lease-ms = 9000\nflush_ms = 5\npool = "chat"\nmax_num_seqs = 7\n')
    monkeypatch.setenv("TOKENMILL_FLUSH_MS", "6")
    monkeypatch.setenv("tokenmill_seed", "3")
    monkeypatch.setenv("TOKENMILL_NAMESPACE", "")  # as compose passes on what is unset
    monkeypatch.setenv("REDIS_URL", "redis://common:6379/1")

    done = print_config("--config", str(file), "--lease-ms", "8000", "--no-enable-prefix-caching")

    assert (done.exit_code, done.stderr) == (0, "")
    found = origins_of(done.stdout)
    assert found.keys() == Settings.model_fields.keys()
    assert {name: where for name, where in found.items() if where != "default"} == {
        "redis_url": "environment REDIS_URL",
        "lease_ms": "flag --lease-ms",
        "enable_prefix_caching": "flag --enable-prefix-caching",
        "flush_ms": "environment TOKENMILL_FLUSH_MS",
        "seed": "environment TOKENMILL_SEED",
        "pool": f"file {file}",
        "max_num_seqs": f"file {file}",
    }


def test_what_is_printed_is_a_config_file_of_the_same_settings(tmp_path: Path) -> None:
    flags = {"pool": "a-b", "itl_target_ms": "12.5", "trust_remote_code": True, "lease_ms": "9000"}
    arguments = [
        "--pool", "a-b", "--itl-target-ms", "12.5", "--trust-remote-code", "--lease-ms", "9000",
    ]  # fmt: skip
    file = tmp_path / "printed.toml"
    file.write_text(print_config(*arguments).stdout)

    assert tomllib.loads(file.read_text())["itl_target_ms"] == 12.5
    assert load_settings({"config": file}).model_dump() == load_settings(flags).model_dump()


def test_no_secret_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "password"
    secret.write_text("canary-in-file\n")
    monkeypatch.setenv("TOKENMILL_REDIS_URL", URL.format("canary"))
    monkeypatch.setenv("TOKENMILL_REDIS_PASSWORD_FILE", str(secret))

    shown = print_config().stdout

    assert "canary" not in shown
    assert URL.format("***") in shown
    assert str(secret) in shown


def test_a_wrong_option_ends_it_as_it_would_end_the_worker() -> None:
    code = "from tokenmill_worker.commands.worker import worker; worker()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--lease-ms", "1", "--print-config"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("tokenmill worker: lease_ms: ")


# Secrets from files


def test_the_url_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "url"
    file.write_text("rediss+sentinel://u:p@s1:26379/mymaster?sentinel_password=q\n")
    monkeypatch.setenv("REDIS_URL", "redis://common:6379/1")
    monkeypatch.setenv("TOKENMILL_REDIS_URL_FILE", str(file))

    assert load_settings({}).redis_url_with_password() == file.read_text().strip()
    assert redis_url() == file.read_text().strip()
    assert origins_of(print_config().stdout)["redis_url"] == "default"
    with pytest.raises(SettingsError, match="redis_url_file: give it or redis_url"):
        load_settings({"redis_url": "redis://other:6379/0"})
    monkeypatch.setenv("TOKENMILL_REDIS_URL", "redis://ours:6379/0")
    assert redis_url() == "redis://ours:6379/0"


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_REDIS_URL_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="TOKENMILL_REDIS_URL_FILE: the file cannot"):
        redis_url()
    with pytest.raises(SettingsError, match="redis_url_file: cannot be read"):
        load_settings({})


# The table


def test_the_table_in_the_docs_is_the_one_of_the_model() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run `python -m tokenmill_worker.option_table docs/config…`"


def test_the_table_names_every_option_once_with_its_default() -> None:
    rows = [line.split("|") for line in option_table().splitlines()[2:]]
    assert [row[1].strip(" `-").replace("-", "_") for row in rows] == [*Settings.model_fields]
    by_flag = {row[1].strip(" `"): [cell.strip(" `") for cell in row[2:5]] for row in rows}
    assert by_flag["--lease-ms"][:2] == ["TOKENMILL_LEASE_MS", "15000"]
    assert by_flag["--lease-ms"][2].endswith("300 to 3,600,000.")
    assert by_flag["--dtype"][2].startswith("Type of the weights; auto: as they are stored. One of")
    assert by_flag["--max-model-len"][1] == "unset"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold"):
        with_table("# nothing")
