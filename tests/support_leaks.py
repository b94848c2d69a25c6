"""Every way to use and to leave a client, many times over, and what stays behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from support_fuzz import rss_bytes
from support_waiting import await_until
from support_worker_process import Pool
from tokenmill import AsyncClient, Client, RequestFailed

TOKENS = 4
TEXT = "hello"
THREADS = 8
TASKS = 16
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """What there is at one moment. Connections and channels are the server's count."""

    connections: int
    channels: int
    threads: int
    rss_bytes: int

    def line(self) -> str:
        return (
            f"{self.connections} connections, {self.channels} channels, {self.threads} threads, "
            f"RSS {self.rss_bytes / 2**20:.1f} MiB"
        )


def take_sample(pool: Pool) -> Sample:
    gc.collect()
    clients = pool.client.client_list()
    return Sample(
        connections=sum(client["name"] == "tokenmill-client" for client in clients),
        channels=len(pool.client.pubsub_channels(f"{pool.keys.channel('')}*")),
        threads=threading.active_count(),
        rss_bytes=rss_bytes(os.getpid()),
    )


def use_sync(pool: Pool, client: Client, count: int) -> list[Sample]:
    """`count` requests from several threads; a sample after each round."""
    samples = []
    with ThreadPoolExecutor(THREADS) as threads:
        for first in range(0, count, count // ROUNDS):
            numbers = range(first, first + count // ROUNDS)
            for done in [threads.submit(_WAYS[n % len(_WAYS)], client) for n in numbers]:
                done.result()
            samples.append(settled(pool))
    return samples


async def use_async(pool: Pool, client: AsyncClient, count: int) -> list[Sample]:
    """The same from several tasks."""
    gate, samples = asyncio.Semaphore(TASKS), []

    async def one(number: int) -> None:
        async with gate:
            await _ASYNC_WAYS[number % len(_ASYNC_WAYS)](client)

    for first in range(0, count, count // ROUNDS):
        await asyncio.gather(*(one(n) for n in range(first, first + count // ROUNDS)))
        # An iteration that was left is closed by a task of the event loop. This one and the
        # listener's stay.
        await await_until(lambda: len(asyncio.all_tasks()) == 2)
        samples.append(await asyncio.to_thread(settled, pool))
    return samples


def settled(pool: Pool) -> Sample:
    """A sample once the reader has given up what it was asked to: at most a second later."""
    give_up_at = time.monotonic() + 10
    while (sample := take_sample(pool)).channels > 1 and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return sample


# ---- sync ----


def _generate(client: Client) -> None:
    assert len(client.generate(TEXT, max_tokens=TOKENS).token_ids) == TOKENS


def _stream(client: Client) -> None:
    with client.stream(TEXT, max_tokens=TOKENS) as stream:
        assert len("".join(stream)) == TOKENS


def _leave_a_block(client: Client) -> None:
    with client.stream(TEXT, max_tokens=500) as stream:
        next(iter(stream))


def _leave_an_iteration(client: Client) -> None:
    for _ in client.stream(TEXT, max_tokens=500):
        break


def _forget(client: Client) -> None:
    client.stream(TEXT, max_tokens=TOKENS).__enter__()


def _attach(client: Client) -> None:
    request_id = client.submit(TEXT, max_tokens=TOKENS).id
    with client.attach(request_id) as stream:
        next(stream.events())
    assert client.result(request_id).finish_reason == "length"


def _fail(client: Client) -> None:
    with suppress(RequestFailed):
        client.generate("refuse", max_tokens=TOKENS)


def _cancel(client: Client) -> None:
    with client.stream(TEXT, max_tokens=500) as stream, suppress(RequestFailed):
        stream.cancel()
        stream.completion()


def _raise_in_a_block(client: Client) -> None:
    with suppress(ZeroDivisionError), client.stream(TEXT, max_tokens=500):
        raise ZeroDivisionError


_WAYS: tuple[Callable[[Client], None], ...] = (
    _generate, _stream, _leave_a_block, _leave_an_iteration, _forget, _attach, _fail, _cancel,
    _raise_in_a_block, _generate,
)  # fmt: skip


# ---- async ----


async def _agenerate(client: AsyncClient) -> None:
    assert len((await client.generate(TEXT, max_tokens=TOKENS)).token_ids) == TOKENS


async def _astream(client: AsyncClient) -> None:
    async with client.stream(TEXT, max_tokens=TOKENS) as stream:
        assert len("".join([text async for text in stream])) == TOKENS


async def _aleave_a_block(client: AsyncClient) -> None:
    async with client.stream(TEXT, max_tokens=500) as stream:
        await anext(aiter(stream))


async def _aleave_an_iteration(client: AsyncClient) -> None:
    async for _ in client.stream(TEXT, max_tokens=500):
        break


async def _aforget(client: AsyncClient) -> None:
    await client.stream(TEXT, max_tokens=TOKENS).__aenter__()


async def _aattach(client: AsyncClient) -> None:
    request_id = (await client.submit(TEXT, max_tokens=TOKENS)).id
    async with client.attach(request_id) as stream:
        await anext(stream.events())
    assert (await client.result(request_id)).finish_reason == "length"


async def _acancel_the_task(client: AsyncClient) -> None:
    task = asyncio.create_task(client.generate(TEXT, max_tokens=500))
    await asyncio.sleep(0.001)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _afail(client: AsyncClient) -> None:
    with suppress(RequestFailed):
        await client.generate("refuse", max_tokens=TOKENS)


async def _atime_out(client: AsyncClient) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.002), client.stream(TEXT, max_tokens=500) as stream:
            await stream.completion()


_ASYNC_WAYS: tuple[Callable[[AsyncClient], Awaitable[None]], ...] = (
    _agenerate, _astream, _aleave_a_block, _aleave_an_iteration, _aforget, _aattach,
    _acancel_the_task, _afail, _atime_out, _agenerate,
)  # fmt: skip
