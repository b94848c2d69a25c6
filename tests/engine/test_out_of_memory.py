"""A process that really runs out of memory: its address space ends in the middle of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support_models import tiny_config, tiny_model
from support_tokenizers import byte_level_bpe

#: A step of 2000 rows has several activations of 125 MiB each, one of 250 rows of 16 MiB.
WIDE = {"intermediate_size": 16_384, "num_hidden_layers": 2, "max_position_embeddings": 1024}
ROOM_BYTES = 40 * 2**20

PROGRAM = """
import json, random, resource, sys
from pathlib import Path
from tokenmill_engine.llm import LLM, SamplingParams

llm = LLM(
    sys.argv[1], block_size=16, num_gpu_blocks_override=300, max_num_seqs=8, num_threads=1,
    max_num_batched_tokens=2048, enable_prefix_caching=False, skip_self_test=True,
)
rng = random.Random(0)
prompts = [[rng.randrange(5, 420) for _ in range(500)] for _ in range(4)]
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
together = [answer.token_ids for answer in llm.generate(prompts, params)]
stats = llm.engine.stats()
print(json.dumps([alone, together, stats.oom_retries_total, stats.isolated_failures_total]))
"""


@pytest.mark.slow
def test_smaller_steps_fit_and_say_the_same(tmp_path: Path) -> None:
    tiny_model(**tiny_config(vocab_size=420, **WIDE)).save_pretrained(tmp_path)
    byte_level_bpe()._hf.save_pretrained(tmp_path)
    engine = Path(__file__).parents[2] / "engine"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(ROOM_BYTES)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(engine), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    alone, together, num_retries, num_failures = json.loads(done.stdout)
    assert together == alone
    assert num_retries > 0
    assert num_failures == 0
