"""The HTTP endpoints."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.client import RemoteDisconnected
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from support_worker_process import eventually
from tokenmill_worker.endpoints import Endpoints, Reply, json_reply
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.health import Health


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    endpoints = Endpoints(
        "127.0.0.1",
        0,
        {
            "/good": lambda: json_reply(True, {"a": 1}),
            "/bad": lambda: json_reply(False, {}),
            "/text": lambda: (HTTPStatus.OK, b"x 1\n", "text/plain; version=0.0.4"),
        },
    )
    yield endpoints
    endpoints.close()


def test_routes_answer(endpoints: Endpoints) -> None:
    with urlopen(f"http://{endpoints.address}/good?verbose") as response:
        assert response.headers["Content-Type"] == "application/json"
        assert json.load(response) == {"a": 1}
    with urlopen(f"http://{endpoints.address}/text") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4"
        assert response.read() == b"x 1\n"


@pytest.mark.parametrize(("path", "status"), [("/bad", 503), ("/nowhere", 404), ("/", 404)])
def test_other_answers_have_their_status(endpoints: Endpoints, path: str, status: int) -> None:
    with pytest.raises(HTTPError) as refused:
        urlopen(f"http://{endpoints.address}{path}")
    refused.value.close()

    assert refused.value.code == status


def test_a_taken_port_is_a_clear_error(endpoints: Endpoints) -> None:
    host, _, port = endpoints.address.rpartition(":")

    with pytest.raises(SettingsError, match="metrics_port: cannot listen"):
        Endpoints(host, int(port), {})


def test_a_prober_that_hangs_up_is_one_quiet_line(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="tokenmill_worker.endpoints")
    asked, gone = threading.Event(), threading.Event()

    def slow() -> Reply:
        asked.set()
        gone.wait(20)
        return HTTPStatus.OK, b"x" * 50_000_000, "text/plain"  # more than any socket's buffer

    endpoints = Endpoints("127.0.0.1", 0, {"/slow": slow})
    try:
        host, _, port = endpoints.address.rpartition(":")
        with socket.create_connection((host, int(port))) as prober:
            prober.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            assert asked.wait(20)
            reset = struct.pack("ii", 1, 0)  # closed at once: what is sent to it is refused
            prober.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        gone.set()
        (line,) = eventually(lambda: caplog.records)
    finally:
        endpoints.close()

    assert (line.levelname, line.getMessage()) == ("DEBUG", "prober hung up")
    assert capfd.readouterr().err == ""


def test_a_route_that_fails_is_a_log_line_without_a_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Reply:
        raise ValueError("a prompt")

    endpoints = Endpoints("127.0.0.1", 0, {"/broken": broken})
    try:
        with pytest.raises(RemoteDisconnected):
            urlopen(f"http://{endpoints.address}/broken")
        (line,) = eventually(lambda: caplog.records)
    finally:
        endpoints.close()

    assert (line.levelname, line.getMessage()) == ("ERROR", "no answer to a prober")
    assert "ValueError in broken" in str(line.__dict__["fields"])
    assert "a prompt" not in capfd.readouterr().err + caplog.text


def test_readiness_needs_a_loaded_engine_and_living_loops() -> None:
    health = Health(stale_after_s=10)
    assert not health.is_ready
    health.enter("ready")
    assert not health.is_ready  # it has no lane yet
    lane = health.lane(0)
    assert health.is_ready
    assert health.changed.is_set()

    long_ago_s = time.monotonic() - 11
    lane.last_fetch_s = long_ago_s
    assert health.stuck_loops == ["fetch"]
    assert not health.is_ready
    lane.is_full = True  # a full worker has no reason to fetch
    assert health.is_ready
    lane.last_heartbeat_s = long_ago_s
    assert health.stuck_loops == ["heartbeat"]
    lane.beaten()
    assert health.is_ready

    health.enter("draining")
    assert not health.is_ready


def test_a_step_that_does_not_end_makes_it_unready() -> None:
    health = Health(stale_after_s=10)
    health.enter("ready")
    health.lane(0)
    busy_s = 29.0
    health.watch_engine(lambda: busy_s, 30.0)
    assert health.is_ready

    busy_s = 31.0
    assert not health.is_ready
    assert health.stuck_loops == ["engine"]


def test_one_partition_that_can_be_reached_is_enough() -> None:
    health = Health(stale_after_s=10)
    health.enter("ready")
    lanes = [health.lane(number) for number in (0, 2)]

    lanes[1].last_fetch_s = time.monotonic() - 11
    assert health.is_ready
    assert health.stuck_loops == ["fetch.2"]
    lanes[0].last_heartbeat_s = time.monotonic() - 11
    assert not health.is_ready
