"""The sync client against a worker double: over fakeredis and over a real server."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from support_sdk import IDS, PIECES, TEXT
from support_waiting import wait_until
from tokenmill import (
    Client,
    DeadlineExceeded,
    EndEvent,
    InvalidRequest,
    Message,
    QueueFull,
    RequestCancelled,
    RequestConflict,
    RequestFailed,
    ResultTimeout,
    SamplingParams,
    StartEvent,
    StreamDiverged,
    TokenEvent,
    UnknownRequest,
)
from tokenmill.calls import QueuePolicy
from tokenmill.keys import Keyspace
from tokenmill.protocol import GenerateRequest
from tokenmill.testing import FakeWorker, token_id_of


def test_generate_returns_the_whole_answer(client: Client, running_worker: FakeWorker) -> None:
    completion = client.generate("Once upon a time", meta={"order": 7})
    assert completion.text == TEXT
    assert completion.token_ids == IDS
    assert completion.finish_reason == "stop"
    assert completion.usage.prompt_tokens == 4
    assert completion.usage.completion_tokens == len(IDS)
    assert completion.attempts == 1
    assert completion.logprobs is None
    assert completion.meta == {"order": 7}


def test_sampling_parameters_travel(client: Client, running_worker: FakeWorker) -> None:
    completion = client.generate("x", max_tokens=3, logprobs=0)
    assert completion.finish_reason == "length"
    assert completion.text == "".join(PIECES[:3])
    assert completion.logprobs is not None
    assert [[entry.token_id for entry in token] for token in completion.logprobs] == [
        [token_id] for token_id in IDS[:3]
    ]
    params = SamplingParams(max_tokens=2)
    assert client.generate("x", sampling_params=params).token_ids == IDS[:2]


def test_prompts_arrive_as_they_were_given(
    client: Client, redis_client: redis.Redis, keyspace: Keyspace
) -> None:
    seen: list[Any] = []

    def answer(prompt: Any) -> str:
        seen.append(prompt)
        return "ok"

    messages = [{"role": "user", "content": "Hi"}, Message(role="assistant", content="Hello")]
    with FakeWorker(redis_client, answer, namespace=keyspace.namespace):
        client.generate("text")
        client.generate([1, 2, 3])
        client.chat(messages)
    assert seen[:2] == ["text", [1, 2, 3]]
    assert seen[2] == [
        Message(role="user", content="Hi"),
        Message(role="assistant", content="Hello"),
    ]


def test_a_stream_hands_out_each_token_as_it_comes(client: Client, worker: FakeWorker) -> None:
    with client.stream("x") as stream:
        texts = iter(stream)
        for piece in PIECES:
            worker.step()
            assert next(texts) == piece  # the worker has not gone further than this token
            assert not stream.finished
        worker.step()
        assert list(texts) == []
        assert stream.finished
        assert stream.completion().text == TEXT


def test_live_messages_need_no_reading_of_the_log(client: Client, worker: FakeWorker) -> None:
    with client.stream("x") as stream:
        texts = iter(stream)
        worker.step()
        next(texts)  # the subscription is confirmed, and the log was read behind it
        reads = stream._state.stats.reads
        for _ in PIECES:
            worker.step()
        assert list(texts) == PIECES[1:]
        assert stream._state.stats.reads == reads


def test_events_come_once_and_in_order(client: Client, running_worker: FakeWorker) -> None:
    with client.stream("x") as stream:
        events = list(stream.events())
    assert [event.seq for event in events] == list(range(1, len(PIECES) + 3))
    assert [type(event) for event in events] == [
        StartEvent, *[TokenEvent] * len(PIECES), EndEvent,
    ]  # fmt: skip


def test_attach_from_another_client_continues_behind_an_event(
    make_client: Callable[..., Client], worker: FakeWorker
) -> None:
    producer, reader = make_client(), make_client()
    handle = producer.submit("x", request_id="my-own-id")
    assert handle.id == "my-own-id"
    for _ in range(3):
        worker.step()
    with reader.attach(handle.id) as stream:
        texts = iter(stream)
        first = [next(texts), next(texts)]
        cursor = stream.last_seq
    assert producer.status(handle.id).state == "leased"  # leaving an attached stream ends nothing
    while worker.step():
        pass
    resumed = make_client().attach(handle.id, after=cursor)
    assert first + list(resumed) == PIECES
    assert resumed.completion().text == TEXT  # of the whole, not of the rest


def test_leaving_a_stream_early_cancels_the_request(client: Client, worker: FakeWorker) -> None:
    with client.stream("x") as stream:
        worker.step()
        assert next(iter(stream)) == PIECES[0]
    assert client.status(stream.id).state == "cancelled"
    worker.step()
    assert worker.running == []


def test_leaving_an_iteration_without_a_block_cancels_too(
    client: Client, worker: FakeWorker
) -> None:
    stream = client.stream("x")
    texts = iter(stream)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, texts)
        wait_until(worker.step)
        first.result()
    texts.close()  # type: ignore[attr-defined]  # what leaving a for loop does
    assert client.status(stream.id).state == "cancelled"


def test_an_error_in_the_block_cancels_and_is_not_replaced(client: Client) -> None:
    stream = client.stream("x")
    with pytest.raises(KeyboardInterrupt), stream:
        raise KeyboardInterrupt
    assert client.status(stream.id).state == "cancelled"


def test_cancel_in_the_queue(client: Client, worker: FakeWorker) -> None:
    handle = client.submit("x")
    assert client.cancel(handle.id) is True
    assert client.cancel(handle.id) is False
    with pytest.raises(RequestCancelled) as caught:
        client.result(handle.id)
    assert caught.value.code == "cancelled"
    assert caught.value.completion is not None
    assert caught.value.completion.token_ids == []
    worker.step()
    assert worker.running == []


def test_cancel_in_mid_stream_keeps_what_there_is(client: Client, worker: FakeWorker) -> None:
    with client.stream("x") as stream:
        texts = iter(stream)
        worker.step()
        worker.step()
        assert [next(texts), next(texts)] == PIECES[:2]
        assert stream.cancel() is True
        with pytest.raises(RequestCancelled) as caught:
            next(texts)
    assert caught.value.completion is not None
    assert caught.value.completion.text == "".join(PIECES[:2])


def test_a_failed_request_raises_what_the_worker_said(
    client: Client, redis_client: redis.Redis, keyspace: Keyspace
) -> None:
    def refuse(_: object) -> str:
        raise InvalidRequest("prompt", "has 9 tokens; the model takes 8")

    with (
        FakeWorker(redis_client, refuse, namespace=keyspace.namespace),
        pytest.raises(RequestFailed, match="has 9 tokens") as caught,
    ):
        client.generate("x")
    assert caught.value.code == "invalid_request"


def test_the_deadline_ends_a_request(client: Client, worker: FakeWorker) -> None:
    handle = client.submit("x", deadline_s=0.02)

    def expired() -> bool:
        worker.tick()
        return client.status(handle.id).state == "expired"

    wait_until(expired)
    with pytest.raises(DeadlineExceeded):
        client.result(handle.id)


def test_status_follows_a_request(client: Client, worker: FakeWorker) -> None:
    handle = client.submit("x", priority="high", tenant="acme")
    queued = client.status(handle.id)
    assert (queued.state, queued.priority, queued.tenant) == ("queued", "high", "acme")
    assert queued.leased_at is None
    worker.step()
    assert client.status(handle.id).worker == "fake-worker"
    while worker.step():
        pass
    done = client.status(handle.id)
    assert done.ended
    assert done.usage is not None
    assert done.usage.completion_tokens == len(IDS)
    assert done.ended_at is not None
    assert done.leased_at is not None
    assert done.created_at <= done.leased_at <= done.ended_at < done.deadline_at


@pytest.mark.parametrize("ask", ["status", "cancel", "result"])
def test_an_unknown_id_is_an_unknown_request(client: Client, ask: str) -> None:
    with pytest.raises(UnknownRequest):
        getattr(client, ask)("nobody")
    with pytest.raises(UnknownRequest):
        list(client.attach("nobody"))


def test_result_waits_no_longer_than_told(client: Client, worker: FakeWorker) -> None:
    handle = client.submit("x")
    with pytest.raises(ResultTimeout):
        client.result(handle.id, timeout_s=0.01)
    assert client.status(handle.id).state == "queued"
    with pytest.raises(ResultTimeout):
        client.result(handle.id, timeout_s=0)
    with worker:
        assert client.result(handle.id).text == TEXT
    assert client.result(handle.id, timeout_s=0).text == TEXT  # it is there already


def test_submitting_the_same_request_again_is_harmless(
    make_client: Callable[..., Client], running_worker: FakeWorker
) -> None:
    client, other = make_client(), make_client()
    first = client.submit("x", request_id="once", temperature=0.5)
    again = other.submit("x", request_id="once", temperature=0.5)
    assert (first.is_new, again.is_new) == (True, False)
    assert client.generate("x", request_id="once", temperature=0.5).text == TEXT
    assert client.status("once").attempts == 1
    with pytest.raises(RequestConflict, match="once"):
        client.submit("y", request_id="once")


def test_leaving_a_stream_of_somebody_elses_request_does_not_cancel_it(
    make_client: Callable[..., Client], worker: FakeWorker
) -> None:
    make_client().submit("x", request_id="shared")
    client = make_client()
    with client.stream("x", request_id="shared"):
        pass
    assert client.status("shared").state == "queued"


def test_a_full_queue_says_when_to_try_again(make_client: Callable[..., Client]) -> None:
    client = make_client(policy=QueuePolicy(max_queued=2, max_queued_per_tenant=1))
    client.submit("x", tenant="a")
    with pytest.raises(QueueFull) as caught:
        client.submit("x", tenant="a")
    assert caught.value.code == "tenant_full"
    client.submit("x", tenant="b")
    with pytest.raises(QueueFull) as caught, client.stream("x", tenant="c"):
        raise AssertionError("not reached")
    assert caught.value.code == "queue_full"
    assert caught.value.retry_after_s > 0


def test_a_second_worker_continues_where_the_first_stopped(
    client: Client, redis_client: redis.Redis, keyspace: Keyspace, worker: FakeWorker
) -> None:
    second = FakeWorker(
        redis_client, lambda _: TEXT, namespace=keyspace.namespace, worker_id="second"
    )
    with client.stream("x") as stream:
        for _ in range(4):
            worker.step()
        worker.hand_over()
        while second.step():
            pass
        assert list(stream) == PIECES
    completion = stream.completion()
    assert completion.attempts == 2
    assert completion.token_ids == IDS


def rewrite(redis_client: redis.Redis, client: Client, request_id: str, pieces: list[str]) -> None:
    """What Redis holds after it lost the log's end and another worker went on from there."""
    log = client.keys.log(request_id)
    redis_client.delete(log)
    payloads = [{"ev": "start", "i": 0}]
    for index, piece in enumerate(pieces):
        payloads.append({"i": index, "k": [token_id_of(piece)], "t": piece})
    payloads.append({"ev": "end", "st": "done", "fin": "stop"})
    for seq, payload in enumerate(payloads, start=1):
        entry = {"d": json.dumps({"e": seq, "a": 1, **payload})}
        redis_client.xadd(log, entry, id=f"{seq}-0")  # type: ignore[arg-type]
    redis_client.hset(client.keys.record(request_id), "end_seq", len(payloads))


def test_text_that_redis_lost_is_withdrawn(
    client: Client, redis_client: redis.Redis, worker: FakeWorker
) -> None:
    with client.stream("x") as stream, client.attach(stream.id) as other:
        texts, events = iter(stream), other.events()
        for _ in range(3):
            worker.step()
        assert [next(texts) for _ in range(3)] == PIECES[:3]
        assert [next(events).type for _ in range(4)] == ["start", "token", "token", "token"]
        rewrite(redis_client, client, stream.id, [PIECES[0], "slow ", "fox"])
        stream._state.catch_up()
        other._state.catch_up()
        with pytest.raises(StreamDiverged) as caught:
            next(texts)
        assert caught.value.index == 1
        assert [event.type for event in events] == ["rewind", "token", "token", "end"]
        assert other.completion().text == "the slow fox"


@pytest.mark.parametrize("fate", ["lost", "twice", "reordered"])
def test_what_becomes_of_messages_does_not_matter(
    client: Client, running_worker: FakeWorker, fate: str
) -> None:
    dice, listener = random.Random(7), client._link._partitions.home_of("x").listener
    deliver, held = listener._subscribers.dispatch, list[dict[str, Any]]()

    def unreliable(message: dict[str, Any]) -> None:
        if message["type"] != "message" or dice.random() > 0.3:
            deliver(message)
            while held:
                deliver(held.pop())
        elif fate == "twice":
            deliver(message)
            deliver(message)
        elif fate == "reordered":
            held.append(message)

    listener._subscribers.dispatch = unreliable  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as pool:
        completions = list(pool.map(lambda _: client.generate("x"), range(8)))
    assert [completion.token_ids for completion in completions] == [IDS] * 8


def test_a_slow_reader_loses_nothing(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill._mailbox.MAX_MESSAGES", 3)
    with client.stream("x") as stream:
        worker.step()
        texts = iter(stream)
        first = next(texts)
        reads = stream._state.stats.reads
        while worker.step():
            pass
        wait_until(lambda: stream._mailbox is not None and stream._mailbox._buffer._missed)
        assert [first, *texts] == PIECES
        assert stream._state.stats.reads == reads + 1  # the log, instead of the dropped messages


def test_many_threads_share_one_subscription(
    client: Client, redis_client: redis.Redis, running_worker: FakeWorker
) -> None:
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: "".join(client.stream("x")), range(64)))
    assert answers == [TEXT] * 64
    anchor = client.keys.channel("")
    assert redis_client.pubsub_numsub(anchor) == [(anchor, 1)]


def test_map_keeps_the_order_and_the_window(
    client: Client, redis_client: redis.Redis, keyspace: Keyspace
) -> None:
    taken: list[int] = []
    reported: list[tuple[int, int | None]] = []

    def prompts() -> Any:
        for number in range(12):
            taken.append(number)
            yield f"number {number}"

    with FakeWorker(redis_client, str, namespace=keyspace.namespace):
        answers = client.map(
            prompts(), concurrency=3, progress=lambda *counts: reported.append(counts)
        )
        assert next(answers).text == "number 0"
        assert len(taken) == 3
        assert [answer.text for answer in answers] == [f"number {n}" for n in range(1, 12)]
    assert reported == [(n, None) for n in range(1, 13)]


def test_map_with_failures(client: Client, redis_client: redis.Redis, keyspace: Keyspace) -> None:
    def answer(prompt: Any) -> str:
        return str(1 // int(prompt))

    with FakeWorker(redis_client, answer, namespace=keyspace.namespace):
        with pytest.raises(RequestFailed):
            list(client.map(["1", "0", "1"]))
        texts = [
            completion.finish_reason
            for completion in client.map(["1", "0", "1"], on_failure=lambda error: error.completion)  # type: ignore[arg-type, return-value]
        ]
    assert texts == ["stop", None, "stop"]


def test_leaving_map_cancels_what_is_under_way(
    client: Client, redis_client: redis.Redis, worker: FakeWorker
) -> None:
    answers = client.map(["a", "b", "c"], concurrency=3)
    with worker:
        next(answers)
    answers.close()  # type: ignore[attr-defined]
    states = {
        redis_client.hget(key, "state") for key in redis_client.scan_iter(client.keys.record("*"))
    }
    assert states <= {"done", "cancelled"}


def test_the_seed_is_always_given_and_the_same_for_the_same_id(
    client: Client, redis_client: redis.Redis
) -> None:
    def seed_of(request_id: str) -> int | None:
        body = redis_client.hget(client.keys.record(request_id), "body")
        return GenerateRequest.model_validate_json(str(body)).seed

    first, second = client.submit("x").id, client.submit("x").id
    assert isinstance(seed_of(first), int)
    assert seed_of(first) != seed_of(second)
    assert first < second or first[:10] == second[:10]
    client.submit("x", request_id="mine", seed=5)
    assert seed_of("mine") == 5
