"""Steps one ahead through graphs: a token goes from one step to the next on the device."""

from __future__ import annotations

import pytest
import torch

from support_graphs import MAX_SEQS, CallAgain, graph_runner
from support_models import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    random_prompts,
    reference,
    tiny_config,
    tiny_model,
    tiny_runner,
)
from support_sampling import NO_RULES, make_sampler
from tokenmill_engine.config import SchedulerConfig
from tokenmill_engine.device_sampling import choose_on_device
from tokenmill_engine.kv_cache_manager import KVCacheManager
from tokenmill_engine.launched_step import LaunchedStep
from tokenmill_engine.model_runner import ModelRunner
from tokenmill_engine.outputs import SchedulerOutput
from tokenmill_engine.request import Request
from tokenmill_engine.sampler import Sampler
from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_engine.scheduler import Scheduler
from tokenmill_engine.step_recovery import StepRecovery
from tokenmill_engine.steps_in_flight import StepsInFlight

MAX_TOKENS = 5
SMALL = tiny_config(num_hidden_layers=1)


def device_sampler() -> Sampler:
    return Sampler(rules=NO_RULES, encode_bad_words=lambda _: (), choose=choose_on_device)


def run(runner: ModelRunner, requests: list[Request], sampler: Sampler) -> int:
    """To their ends; how many rows took their token from the device."""
    kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=12, max_model_len=64)
    scheduler = Scheduler(config, kv)
    num_unread = 0

    def launch(plan: SchedulerOutput) -> LaunchedStep:
        nonlocal num_unread
        num_unread += sum(item.source is not None for item in plan.scheduled)
        return runner.launch(plan, sampler)

    recovery = StepRecovery(
        scheduler,
        kv,
        compute=lambda plan: pytest.fail("a step failed"),
        is_out_of_memory=lambda _: False,
    )
    steps = StepsInFlight(scheduler, recovery, launch)
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished_requests or len(steps):
        for result in steps.run():
            scheduler.update_from_output(result.plan, result.output)
        scheduler.check_invariants()
    return num_unread


def test_greedy_tokens_equal_generate_with_graphs_and_without() -> None:
    model = tiny_model(**SMALL)
    prompts = random_prompts(model, (11, 4, 1))
    wanted = [reference(model, prompt, MAX_TOKENS).token_ids for prompt in prompts]
    driver = CallAgain()
    runner = graph_runner(model, driver)
    requests = [
        Request(str(number), prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        for number, prompt in enumerate(prompts)
    ]
    num_unread = run(runner, requests, device_sampler())
    assert [request.output_token_ids for request in requests] == wanted
    assert num_unread == len(requests) * (MAX_TOKENS - 1)
    assert driver.num_replays > 0


def test_seeded_tokens_are_those_of_each_request_alone() -> None:
    """Alone on a CPU, one step after the other, chosen by torch."""
    model = tiny_model(**SMALL)
    prompts = random_prompts(model, (7, 2))

    def requests() -> list[Request]:
        params = SamplingParams(temperature=1.0, top_k=30, max_tokens=3)
        return [Request(str(n), prompt, params, seed=n) for n, prompt in enumerate(prompts)]

    together, alone = requests(), requests()
    num_unread = run(graph_runner(model, CallAgain()), together, device_sampler())
    assert num_unread == 4
    plain = tiny_runner(model, enforce_eager=True)
    for request in alone:
        run(plain, [request], make_sampler())
    assert [r.output_token_ids for r in together] == [r.output_token_ids for r in alone]
    assert len({token for request in alone for token in request.output_token_ids}) > 3


def test_the_buffer_of_samples_stays_where_a_graph_has_seen_it() -> None:
    last = graph_runner(tiny_model(**SMALL), CallAgain()).last_samples
    before = last._token_ids.data_ptr()
    last.keep(torch.arange(MAX_SEQS))
    assert last._token_ids.data_ptr() == before
    sources = torch.tensor([MAX_SEQS - 1, -1])
    assert last.fill_in(torch.tensor([8, 9]), sources).tolist() == [MAX_SEQS - 1, 9]
