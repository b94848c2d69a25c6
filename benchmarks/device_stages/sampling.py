"""Stage 3: the sampling kernel on the device against `draw.py` on the CPU."""

from __future__ import annotations

import torch

from tokenmill_engine.device_sampling import choose_on_device, sample_on_device
from tokenmill_engine.packed_settings import pack_settings
from tokenmill_engine.request import Request
from tokenmill_engine.sampler import choose_by_torch
from tokenmill_engine.sampling_params import SamplingParams

from .context import Bench

SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 200, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95},
)


def check_sampling(bench: Bench) -> None:
    rows, vocab = (6, 60) if bench.tiny else (256, 151_936)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    logits[::2] = (logits[::2] * 8).round() / 8  # ties, as logits of 16 bits have them
    requests = [_request(number) for number in range(rows)]
    on_device = logits.to(bench.device)
    settings = torch.from_numpy(pack_settings(requests)).to(bench.device)
    found = choose_on_device(on_device, requests).cpu()
    wanted = choose_by_torch(logits, requests)
    different = int((found != wanted).sum())
    # The exponential differs in its last bit between processors: a uniform may fall between.
    bench.require(different <= rows // 100, f"{different} of {rows} tokens differ from the CPU's")
    again = sample_on_device(on_device[3:4], settings[:, 3:4]).cpu()
    bench.require(bool(again[0] == found[3]), "a row alone gives the same token")
    milliseconds = bench.median_ms(lambda: sample_on_device(on_device, settings))
    bench.line("sample", rows=rows, vocab=vocab, different=different, ms=milliseconds)
    greedy = torch.from_numpy(pack_settings([_request(0)] * rows)).to(bench.device)
    milliseconds = bench.median_ms(lambda: sample_on_device(on_device, greedy))
    bench.line("sample, greedy", rows=rows, ms=milliseconds)


def _request(number: int) -> Request:
    params = SamplingParams(**SETTINGS[number % len(SETTINGS)])
    output = [5] * (number % 3)
    return Request(str(number), [1], params, output_token_ids=output, seed=2**40 + number)
