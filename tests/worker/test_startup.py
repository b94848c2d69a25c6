"""What keeps a worker from starting: one line and an exit code, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from support_worker_process import clean_environment
from tokenmill._redis import connect
from tokenmill.embedded import EmbeddedServer
from tokenmill_worker.commands.worker import worker


def start(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenmill_worker", *flags],
        capture_output=True, text=True, timeout=60, env=clean_environment() | environment,
        check=False,
    )  # fmt: skip


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--bogus", "1"], os.EX_CONFIG, "No such option '--bogus'."),
        (["--dtype", "int4"], os.EX_CONFIG, "Invalid value for '--dtype'"),
        (["--lease-ms", "0"], os.EX_CONFIG, "lease_ms: "),
        (["--redis-url", "redis://127.0.0.1:1/0"], os.EX_UNAVAILABLE, "cannot be reached"),
        (["--redis-url", "redis://u:canary@h"], os.EX_CONFIG, "no password on the command line"),
        (["--redis-url", "redis://queue.example.com"], os.EX_CONFIG, "--insecure-redis"),
    ],
)
def test_options(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], code: int, message: str
) -> None:
    for name in [name for name in os.environ if name.startswith(("TOKENMILL_", "REDIS_"))]:
        monkeypatch.delenv(name)

    done = CliRunner().invoke(worker, flags)

    assert done.exit_code == code
    assert message in done.stderr.splitlines()[-1]
    assert "canary" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refused_password() -> None:
    with EmbeddedServer(tcp=True) as server:
        with connect(server.url) as admin:
            admin.config_set("requirepass", "right")
        url = server.url.replace("redis://", "redis://:wrong@")
        done = start(TOKENMILL_REDIS_URL=url)

        assert done.returncode == os.EX_CONFIG
        assert "refused the user or the password" in last_line(done)
        assert "wrong" not in done.stderr.replace("***", "")


def test_a_server_that_evicts() -> None:
    with EmbeddedServer(extra_args=("--maxmemory-policy", "allkeys-lru")) as server:
        done = start("--redis-url", server.url)

        assert done.returncode == os.EX_CONFIG
        assert "maxmemory-policy" in last_line(done)


def test_a_model_that_is_not_there(server: EmbeddedServer, tmp_path: Path) -> None:
    done = start("--redis-url", server.url, "--model", str(tmp_path / "none"))

    assert done.returncode == os.EX_CONFIG
    assert "model: no such folder" in last_line(done)


def test_the_library_that_is_linked_ahead_is_the_one_that_torch_uses() -> None:
    """Two copies of torch's code or of OpenMP in one process would not know of each other."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux tells what a process has loaded")
    code = (
        "from tokenmill_worker.model_engine import _link_torch\n"
        "_link_torch(); ahead = open('/proc/self/maps').read()\n"
        "import torch; torch.ones(1 << 20).sum()\n"
        "print(ahead); print('====='); print(open('/proc/self/maps').read())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, env=clean_environment(), check=True,
    )  # fmt: skip
    ahead, afterwards = (_libraries(part) for part in done.stdout.split("====="))
    if not ahead:
        pytest.skip("this torch is not linked ahead: it comes with CUDA")
    assert ahead <= afterwards
    assert len(afterwards) == len({Path(library).name.split("-")[0] for library in afterwards})


def _libraries(maps: str) -> set[str]:
    paths = {line.split()[-1] for line in maps.splitlines() if line.strip()}
    return {path for path in paths if Path(path).name.startswith(("libtorch_cpu", "libgomp"))}
