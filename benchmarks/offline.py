"""Tokenmill's engine in this process, without Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tokenmill_engine.llm import LLM, SamplingParams

from .contestant import Options, main
from .measure import Job, offline_jobs
from .workload import Request, mixed


@contextmanager
def start(options: Options) -> Iterator[Mapping[str, Job]]:
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
    )

    def generate(requests: Sequence[Request]) -> Sequence[int]:
        prompts = [request.prompt_token_ids for request in requests]
        outputs = llm.generate(prompts, [_params(request) for request in requests])
        return [len(output.token_ids) for output in outputs]

    def steps(requests: Sequence[Request]) -> Iterator[int]:
        engine = llm.engine
        for number, request in enumerate(requests):
            engine.add_request(f"step-{number}", request.prompt_token_ids, _params(request))
        while engine.has_unfinished_requests:
            if count := sum(bool(output.new_token_ids) for output in engine.step()):
                yield count

    generate(mixed(4))
    yield offline_jobs(generate, steps)


def _params(request: Request) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)


if __name__ == "__main__":
    main("Tokenmill's engine in this process", start)
