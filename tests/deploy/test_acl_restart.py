"""A Redis with our ACL file comes back from a restart with everything that scripts wrote.

Redis 7.0 replays a script's writes from its log as a transaction of the default user, and checks
that user's rights: without any, each transaction is left out, and only single commands come back.
"""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest
import redis
from redis.exceptions import AuthenticationError

from support_queue import Queue
from support_redis import unique_keyspace
from support_servers import Server, binary_of, single
from support_worker_process import eventually
from tokenmill.keys import Keyspace

ACL = Path(__file__).resolve().parents[2] / "deploy" / "redis"
FILES = {"valkey-9": "users.acl", "redis-7.0": "users.acl", "redis-6.2": "users-6.2.acl"}


@pytest.mark.parametrize("release", FILES)
def test_what_was_accepted_is_there_after_a_restart(release: str, tmp_path: Path) -> None:
    binary_of(release)
    file = tmp_path / "users.acl"
    file.write_text((ACL / FILES[release]).read_text().replace(" on ", " on >secret "))
    with single(release, "--aclfile", str(file), "--appendonly", "yes") as server:
        keys = Keyspace(pool=unique_keyspace().namespace)
        with closing(server.client(username="worker", password="secret")) as client:
            queue = Queue(client, keys)
            lease = queue.leased("a")
            queue.append(lease, 1, i=0, k=[7], t="x")
            queue.enqueue("b")
        server.kill(signal.SIGTERM)
        server.start()
        with closing(server.client(username="worker", password="secret")) as client:
            eventually(lambda: is_loaded(client))
            queue = Queue(client, keys)
            assert queue.record("a").state == "leased"
            assert queue.record("b").state == "queued"
            assert client.xlen(keys.log("a")) == 1
            assert queue.append(lease, 2, i=1, k=[8], t="y")
        assert_nobody_is_let_in_without_a_password(server)


def is_loaded(client: redis.Redis) -> bool:
    return not client.info("persistence")["loading"]


def assert_nobody_is_let_in_without_a_password(server: Server) -> None:
    with closing(server.client()) as client, pytest.raises(AuthenticationError):
        client.get("a")
