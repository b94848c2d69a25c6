"""The worker double that users' tests rely on, and its own promises."""

from __future__ import annotations

import pytest
import redis

from support_sdk import IDS, PIECES, TEXT
from tokenmill import Client, RequestFailed
from tokenmill.calls import QueuePolicy
from tokenmill.keys import Keyspace
from tokenmill.testing import FakeWorker, pieces_of, token_id_of


def test_a_step_is_one_token_for_every_request(client: Client, worker: FakeWorker) -> None:
    handles = [client.submit("x") for _ in range(3)]
    assert worker.running == []
    assert worker.step()
    assert sorted(worker.running) == sorted(handle.id for handle in handles)
    for _ in PIECES[1:]:
        assert worker.step()
    assert len(worker.running) == 3  # the end takes a step of its own
    assert worker.step()
    assert not worker.step()
    assert [client.result(handle.id).token_ids for handle in handles] == [IDS] * 3


def test_an_answer_may_come_in_pieces_of_its_own(
    client: Client, redis_client: redis.Redis, keyspace: Keyspace
) -> None:
    with FakeWorker(redis_client, lambda _: iter(["a", "bc", ""]), namespace=keyspace.namespace):
        completion = client.generate("x")
    assert completion.text == "abc"
    assert completion.token_ids == [token_id_of("a"), token_id_of("bc"), token_id_of("")]


def test_any_exception_ends_the_request_as_internal(
    client: Client, redis_client: redis.Redis, keyspace: Keyspace
) -> None:
    def broken(_: object) -> str:
        raise LookupError("not for the client")

    with (
        FakeWorker(redis_client, broken, namespace=keyspace.namespace),
        pytest.raises(RequestFailed, match="LookupError") as caught,
    ):
        client.generate("x")
    assert caught.value.code == "internal"
    assert "not for the client" not in str(caught.value)


def test_a_worker_that_vanished_is_replaced_after_its_lease(
    client: Client, redis_client: redis.Redis, keyspace: Keyspace
) -> None:
    policy = QueuePolicy(lease_ms=300)

    def make(worker_id: str) -> FakeWorker:
        return FakeWorker(
            redis_client,
            lambda _: TEXT,
            namespace=keyspace.namespace,
            worker_id=worker_id,
            policy=policy,
        )

    first, second = make("first"), make("second")
    handle = client.submit("x")
    first.step()
    first.step()
    first.vanish()
    with second:  # its ticks find the lost lease
        completion = client.result(handle.id)
    assert completion.attempts == 2
    assert completion.text == TEXT


def test_a_request_lost_to_another_is_dropped(client: Client, worker: FakeWorker) -> None:
    handle = client.submit("x")
    worker.step()
    client.cancel(handle.id)
    worker.tick()
    assert worker.running == []


def test_text_is_cut_without_loss() -> None:
    for text in ("", " ", "a", " a  b\nc ", TEXT):
        assert "".join(pieces_of(text)) == text
