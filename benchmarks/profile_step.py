"""Where the time of a decode step and of a prefill step goes, by function of Python.

The interpreter's own profiler sees each call into torch and into the native kernels, with the time
inside it: the CPU computes them before they return. Shares are of the engine's thread; the
profiler itself adds a little to functions that are called often.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill_engine.llm import LLM, SamplingParams

from .contestant import add_model_arguments, leave_on_sigterm, options_from, progress
from .measure import DECODE_OUTPUT_TOKENS, DECODE_PROMPT_TOKENS, PREFILL_PROMPT_TOKENS
from .workload import Request, renamed, uniform

BATCH = 64
ROWS = 20
WARM_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Spent:
    """One function over all profiled steps; `seconds` are its own, without those it calls."""

    function: str
    calls: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile of a decode and of a prefill step")
    add_model_arguments(parser)
    parser.add_argument("--rows", type=int, default=ROWS)
    arguments = parser.parse_args()
    leave_on_sigterm()
    options = options_from(arguments)
    progress("loading the engine")
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        enable_prefix_caching=False,
    )
    _run(llm, uniform(WARM_REQUESTS, PREFILL_PROMPT_TOKENS, 4))
    prefill = cProfile.Profile()
    _run(llm, uniform(BATCH, PREFILL_PROMPT_TOKENS, 1), prefill=prefill)
    print(table(f"prefill, {BATCH} prompts of {PREFILL_PROMPT_TOKENS}", prefill, arguments.rows))
    decode = cProfile.Profile()
    requests = uniform(BATCH, DECODE_PROMPT_TOKENS, DECODE_OUTPUT_TOKENS)
    _run(llm, renamed(requests, 1), decode=decode)
    print(table(f"decode, {BATCH} requests at about 210 tokens", decode, arguments.rows))


def _run(
    llm: LLM,
    requests: Sequence[Request],
    *,
    prefill: cProfile.Profile | None = None,
    decode: cProfile.Profile | None = None,
) -> None:
    """All steps of the requests; those before the last first token are prefill."""
    engine = llm.engine
    for number, request in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        engine.add_request(f"profile-{number}", request.prompt_token_ids, params)
    begun: set[str] = set()
    while engine.has_unfinished_requests:
        profile = prefill if len(begun) < len(requests) else decode
        if profile:
            profile.enable()
        outputs = engine.step()
        if profile:
            profile.disable()
        begun.update(output.request_id for output in outputs if output.new_token_ids)


def spent(profile: cProfile.Profile) -> list[Spent]:
    """The functions by their own time, the longest first."""
    # typeshed does not know the attribute, which holds what the printed statistics show.
    entries = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    functions = [
        Spent(_name(where), calls, seconds) for where, (_, calls, seconds, _, _) in entries
    ]
    return sorted(functions, key=lambda each: each.seconds, reverse=True)


def _name(where: tuple[str, int, str]) -> str:
    path, _, function = where
    if path == "~":  # built in: a call into torch or C
        return function.strip("<>")
    module = path.rsplit("/", 1)[-1].removesuffix(".py")
    return f"{module}.{function}"


def table(title: str, profile: cProfile.Profile, rows: int) -> str:
    functions = spent(profile)
    whole_s = sum(each.seconds for each in functions)
    lines = [f"{title}: {whole_s:.2f} s", f"{'share':>7} {'ms':>9} {'calls':>8}  function"]
    for each in functions[:rows]:
        lines.append(
            f"{each.seconds / whole_s:>7.1%} {each.seconds * 1e3:>9.1f} {each.calls:>8}  "
            f"{each.function}"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
