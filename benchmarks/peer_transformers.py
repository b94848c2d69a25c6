"""transformers' own continuous batching in this process. Runs in its own environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from .contestant import Options, main, progress
from .measure import Job, throughput_job
from .workload import Request, mixed

os.environ.setdefault("HF_HUB_OFFLINE", "1")

#: Nothing is reported before the first request is done, which takes minutes on slow machines.
RESULT_TIMEOUT_S = 1800.0


@contextmanager
def start(options: Options) -> Iterator[Mapping[str, Job]]:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).eval()
    generation = GenerationConfig(
        max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=2
    )
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=4096, max_batch_tokens=512)

    def generate(requests: Sequence[Request]) -> Sequence[int]:
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching
        ) as manager:
            ids = [
                manager.add_request(request.prompt_token_ids, max_new_tokens=request.max_tokens)
                for request in requests
            ]
            lengths = dict.fromkeys(ids, 0)
            unfinished = set(ids)
            while unfinished:
                result = manager.get_result(timeout=RESULT_TIMEOUT_S)
                if result is None:
                    raise RuntimeError(f"{len(unfinished)} requests had no result in time")
                if result.is_finished():
                    lengths[result.request_id] = len(result.generated_tokens)
                    unfinished.discard(result.request_id)
                    if len(unfinished) % 16 == 0:
                        progress(f"transformers: {len(unfinished)} requests left")
            return [lengths[request_id] for request_id in ids]

    generate(mixed(4))
    yield {"mixed64": throughput_job(generate)}  # takes minutes; the other jobs would add more


if __name__ == "__main__":
    main("transformers' continuous batching", start)
