"""The clock of Redis jumps: nobody is declared lost, and nothing ends too early."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.audience import requests
from chaos.rig import Rig
from chaos.servers import BOTH_SERVERS
from tokenmill import Client

pytestmark = [pytest.mark.scenario, pytest.mark.slow]

SOURCE = Path(__file__).with_name("clock_shim.c")


@pytest.fixture
def move_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the clock of servers started from now on, in seconds beside the true time."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the clock shim")
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    subprocess.run([compiler, "-shared", "-fPIC", "-O", "-o", library, SOURCE], check=True)
    offset.write_bytes(struct.pack("q", 0))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CHAOS_CLOCK_FILE", str(offset))

    def move(seconds: int) -> None:
        with offset.open("r+b") as file:  # in place: the server has it mapped
            file.write(struct.pack("q", seconds))

    return move


@pytest.mark.parametrize("binary", BOTH_SERVERS)
@pytest.mark.parametrize("seconds", [pytest.param(20, id="fwd20"), pytest.param(-20, id="back20")])
def test_clock(
    make_rig: Callable[..., Rig],
    move_clock: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    seconds: int,
    binary: Path | None,
) -> None:
    rig = make_rig(kind="disagreeing", binary=binary, append_only=False)
    monkeypatch.undo()  # the workers keep the true time
    rig.start("first", "second")
    rig.tasks().read(requests())
    rig.until_streaming()
    began_s, before_s = time.monotonic(), rig.redis.time()[0]

    rig.fault(lambda: move_clock(seconds))

    def moved_s() -> float:
        return rig.redis.time()[0] - before_s - (time.monotonic() - began_s)

    # Not with the next command: a server keeps the time that it has read for a while.
    rig.until(lambda: abs(moved_s() - seconds) <= 2)
    rig.until_all_ended()
    with Client(rig.server.url, namespace=rig.pool.keys.namespace) as client:
        assert "ended" in str(client.explain("request-000"))
    assert rig.finish(oracle=False, clock_went_back=seconds < 0).requeued == 0
