"""Fixtures that every area of the tests may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support_redis import FakeBackend, RedisBackend, ServerBackend, unique_keyspace
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill_worker.model_store import default_model_folder

# Before anything imports Triton, which reads this when a kernel is defined: tests need no GPU.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """A real server on a unix socket, shared by the whole run: use `keyspace`, never FLUSHALL.

    TOKENMILL_TEST_SERVER names another binary, such as a redis-server of an older release.
    """
    binary = os.environ.get("TOKENMILL_TEST_SERVER")
    with EmbeddedServer(binary=Path(binary) if binary else None) as server:
        yield server


@pytest.fixture
def fake() -> FakeBackend:
    """An emulated server of this test's own."""
    return FakeBackend()


@pytest.fixture(params=["fakeredis", "valkey"])
def redis_backend(request: pytest.FixtureRequest) -> RedisBackend:
    """The test runs twice: over fakeredis and over the real server."""
    if request.param == "fakeredis":
        return request.getfixturevalue("fake")
    return ServerBackend(request.getfixturevalue("server"))


@pytest.fixture
def redis_client(redis_backend: RedisBackend) -> Iterator[redis.Redis]:
    with redis_backend.client() as client:
        yield client


@pytest.fixture
def keyspace() -> Keyspace:
    return unique_keyspace()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct; tests that use it carry the marker `model`."""
    given = os.environ.get("TOKENMILL_TEST_MODEL")
    folder = Path(given).expanduser() if given else default_model_folder()
    if not (folder / "model.safetensors").is_file():
        pytest.fail(f"no model in {folder}: run `make setup`, or set TOKENMILL_TEST_MODEL")
    return folder
