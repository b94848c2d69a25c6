"""vLLM's engine in this process. Runs in vLLM's own environment (see `environments`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from .contestant import Options, main
from .measure import Job, offline_jobs
from .workload import Request, mixed

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; mixed64 needs a fifth of it
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@contextmanager
def start(options: Options) -> Iterator[Mapping[str, Job]]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=True,  # its default, and ours
    )

    def params(request: Request, kind: RequestOutputKind) -> SamplingParams:
        return SamplingParams(
            temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, output_kind=kind
        )

    def generate(requests: Sequence[Request]) -> Sequence[int]:
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt_token_ids} for request in requests],
            [params(request, RequestOutputKind.FINAL_ONLY) for request in requests],
            use_tqdm=False,
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    def steps(requests: Sequence[Request]) -> Iterator[int]:
        engine = llm.llm_engine
        for number, request in enumerate(requests):
            prompt = {"prompt_token_ids": request.prompt_token_ids}
            engine.add_request(f"step-{number}", prompt, params(request, RequestOutputKind.DELTA))
        while engine.has_unfinished_requests():
            if count := sum(bool(output.outputs[0].token_ids) for output in engine.step()):
                yield count

    generate(mixed(4))
    yield offline_jobs(generate, steps)


if __name__ == "__main__":
    main("vLLM's engine in this process", start)
