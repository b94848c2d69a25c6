"""Names in Redis."""

import pytest
from redis.crc import key_slot

from tokenmill.errors import ConfigurationError
from tokenmill.keys import Keyspace


def test_all_keys_of_a_pool_share_a_cluster_slot():
    keys = Keyspace("ns", "chat")
    names = [
        *keys.ready_streams.values(),
        keys.record("a"),
        keys.log("b}{c"),
        keys.channel("c"),
        keys.owners,
        keys.deadlines,
        keys.delayed,
        keys.counters,
        keys.windows,
        keys.maintenance,
        keys.dead_letters,
        keys.memory_flag,
        keys.backlog("1", "t"),
        keys.worker_card("w"),
    ]
    assert len({key_slot(name.encode()) for name in names}) == 1
    assert len(set(names)) == len(names)


def test_pools_do_not_share_keys():
    assert Keyspace(pool="a").owners != Keyspace(pool="b").owners
    assert Keyspace(partition=0).owners != Keyspace(partition=1).owners
    assert Keyspace(namespace="a").owners != Keyspace(namespace="b").owners


def test_request_of_channel_inverts_channel():
    keys = Keyspace()
    assert keys.request_of_channel(keys.channel("id:1")) == "id:1"


@pytest.mark.parametrize("name", ["", "a b", "a{b}", "a:b", "x" * 65, "*"])
def test_a_name_that_would_break_keys_is_refused(name):
    with pytest.raises(ConfigurationError, match="namespace"):
        Keyspace(namespace=name)
    with pytest.raises(ConfigurationError, match="pool"):
        Keyspace(pool=name)
