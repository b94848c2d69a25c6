"""What a worker counts, scraped over HTTP while it works, is what its clients saw."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support_models import tiny_config, tiny_model
from support_tokenizers import byte_level_bpe
from support_worker_process import Pool, clean_environment, eventually, pool_of_workers
from tokenmill import Client, Completion, RequestFailed
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.operator_calls import OperatorCalls
from tokenmill.scripts import run

VOCABULARY = 300
Samples = dict[tuple[str, str], float]


@dataclass
class Scraper:
    """Asks for /metrics over and over, and keeps every answer."""

    address: str
    answers: list[Samples] = field(default_factory=list)

    def scrape(self) -> Samples:
        """(name, values of the labels that are not common) → value."""
        with urlopen(f"http://{self.address}/metrics") as response:
            text = response.read().decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                special = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
                found[sample.name, ",".join(special)] = sample.value
        self.answers.append(found)
        return found

    @contextmanager
    def scraping(self) -> Iterator[None]:
        over = threading.Event()

        def scrape_on() -> None:
            while not over.wait(0.02):
                self.scrape()

        thread = threading.Thread(target=scrape_on)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def check_that_counters_grow(self) -> None:
        for before, after in zip(self.answers, self.answers[1:], strict=False):
            for name, value in before.items():
                if name[0].endswith(("_total", "_count", "_bucket")):
                    assert after[name] >= value, name


@pytest.fixture
def pool(server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path) -> Iterator[Pool]:
    """One worker with a KV cache that is too small for what it will have at a time."""
    model = tmp_path / "model"
    tiny_model(**tiny_config(vocab_size=VOCABULARY, max_position_embeddings=4096)).save_pretrained(
        model
    )
    byte_level_bpe()._hf.save_pretrained(model)
    options = {
        "redis-url": server.url, "namespace": keyspace.namespace, "model": str(model),
        "block-size": 16, "num-gpu-blocks-override": 32, "max-num-seqs": 8, "num-threads": 1,
    }  # fmt: skip
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with (
        pool_of_workers(server, keyspace, tmp_path) as pool,
        (tmp_path / "worker.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tokenmill_worker", *flags],
            stderr=log,
            env=clean_environment() | {"OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        try:
            eventually(pool.ready_workers, timeout_s=100)
            yield pool
        finally:
            process.kill()


@pytest.fixture
def scraper(pool: Pool) -> Scraper:
    return Scraper(pool.cards()[0]["metrics"])


def test_every_counter_is_what_the_clients_saw(
    pool: Pool, server: EmbeddedServer, scraper: Scraper
) -> None:
    assert all(v == 0 for (name, _), v in scraper.scrape().items() if name.endswith("_total"))
    with Client(server.url, namespace=pool.keys.namespace) as client:
        with scraper.scraping():
            done = complete(client, pool)
            cancelled = [cancel_while_it_runs(client, f"cancelled-{n}") for n in range(2)]
        for number in range(3):
            with pytest.raises(RequestFailed):
                client.generate("x", model="another", request_id=f"refused-{number}")
        attempts = sum(
            client.status(request_id).attempts for request_id in [*(c.id for c in done), *cancelled]
        )
    eventually(lambda: scraper.scrape()["vllm:request_success_total", "abort"] == len(cancelled))
    eventually(lambda: scraper.scrape()["vllm:num_requests_running", ""] == 0)
    check(pool, scraper, done, cancelled, attempts)
    scraper.check_that_counters_grow()


def complete(client: Client, pool: Pool) -> list[Completion]:
    """24 requests at a time, of which some end at a stop token, some share their prompt.

    The queue is paused until all of them wait: however slowly they come, the cache is too small.
    """

    def generate(number: int) -> Completion:
        return client.generate(
            [number % 12 + 10] * 40, max_tokens=60 + 8 * (number % 12), seed=number,
            stop_token_ids=[5, 6, 7, 8] if number % 2 else [], ignore_eos=not number % 2,
            request_id=f"done-{number}",
        )  # fmt: skip

    operator = OperatorCalls(pool.keys, pool.calls.policy)
    records = [pool.keys.record(f"done-{number}") for number in range(24)]
    run(pool.client, operator.set_pause("pause"))
    with ThreadPoolExecutor(24) as threads:
        answers = threads.map(generate, range(24))
        eventually(lambda: pool.client.exists(*records) == len(records))
        run(pool.client, operator.set_pause("resume"))
        return list(answers)


def cancel_while_it_runs(client: Client, request_id: str) -> str:
    with client.stream([20] * 10, max_tokens=400, ignore_eos=True, request_id=request_id) as stream:
        for event in stream.events():
            if event.type == "token" and event.index > 5:
                break
    return request_id


def check(
    pool: Pool,
    scraper: Scraper,
    done: list[Completion],
    cancelled: list[str],
    attempts: int,
) -> None:
    found = scraper.scrape()

    def total(name: str, label: str = "") -> float:
        return found[name, label]

    reasons = [completion.finish_reason for completion in done]
    assert {"stop", "length"} <= set(reasons)
    for reason in ("stop", "length"):
        assert total("vllm:request_success_total", reason) == reasons.count(reason)
    assert total("vllm:request_success_total", "error") == 3
    usages = [completion.usage for completion in done]
    stored = sum(len(pool.tokens(request_id)) for request_id in cancelled)
    answers = sum(usage.completion_tokens for usage in usages)
    assert answers == sum(len(completion.token_ids) for completion in done)
    wasted = total("tokenmill_wasted_tokens_total")
    assert total("vllm:generation_tokens_total") == answers + stored + wasted
    assert total("vllm:request_generation_tokens_sum") == answers
    prompts = sum(usage.prompt_tokens for usage in usages)
    assert prompts == 24 * 40
    cached = sum(usage.cached_tokens for usage in usages)
    assert total("vllm:prompt_tokens_total") == prompts + len(cancelled) * 10
    assert total("vllm:prompt_tokens_cached_total") == cached
    assert total("vllm:request_prompt_tokens_sum") == prompts
    assert total("vllm:request_prefill_kv_computed_tokens_sum") == prompts - cached
    facts = [history_facts(pool, completion.id) for completion in done]
    preemptions = sum(fact["preemptions"] for fact in facts)
    assert preemptions > 0, "the cache was large enough: this test has shown nothing"
    assert total("vllm:num_preemptions_total") == preemptions
    assert total("vllm:request_num_preemptions_sum") == preemptions
    assert total("tokenmill_recomputed_tokens_total") > 0
    assert total("tokenmill_leases_total") == attempts + 3
    requests = len(done) + len(cancelled)
    assert total("vllm:time_to_first_token_seconds_count") == requests
    assert total("vllm:request_queue_time_seconds_count") == requests + 3
    assert total("vllm:e2e_request_latency_seconds_count") == len(done)
    assert total("vllm:request_params_n_count") == len(done)
    gaps = total("vllm:inter_token_latency_seconds_count")
    assert 0 <= gaps - (answers + stored - requests) <= wasted  # measured before it was dropped


def history_facts(pool: Pool, request_id: str) -> dict[str, int]:
    lines = pool.client.lrange(pool.keys.history(request_id), 0, -1)
    facts: dict[str, int] = json.loads(lines[-1])["facts"]
    return facts
