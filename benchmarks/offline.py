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
        enable_prefix_caching=False,  # every run sends the same prompts
    )

    def generate(requests: Sequence[Request]) -> Sequence[int]:
        outputs = llm.generate(
            [request.prompt_token_ids for request in requests],
            [
                SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
                for request in requests
            ],
        )
        return [len(output.token_ids) for output in outputs]

    generate(mixed(4))
    yield offline_jobs(generate)


if __name__ == "__main__":
    main("Tokenmill's engine in this process", start)
