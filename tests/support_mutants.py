"""Known bugs, put into the scripts as text: what watches the scripts must find every one.

    python -m support_mutants [WORDS]

walks over each (or those whose name has the words) and prints what found it, in which walk and
at which step. The exit status is 1 if one survives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import redis

from support_mutant_table import MUTANTS
from support_redis import ServerBackend
from support_walk_steps import NUM_SEEDS, Violation, walk_seed
from tokenmill.embedded import EmbeddedServer
from tokenmill.scripts import Script, load_script


@dataclass(frozen=True)
class Catch:
    """What found a mutant: the first line of the violation, the walk's seed and its step."""

    finding: str
    seed: int
    step: int


def scripts_with(mutant: str) -> Callable[[str], Script]:
    """The scripts, with that bug in them."""
    mutated: dict[str, Script] = {}
    for name, text, wrong in MUTANTS[mutant]:
        source = mutated.get(name, load_script(name)).source
        assert source.count(text) == 1, f"{mutant}: {source.count(text)} places in {name}.lua"
        mutated[name] = Script(name, source.replace(text, wrong))
    return lambda name: mutated.get(name) or load_script(name)


def hunt(client: redis.Redis, mutant: str, seeds: Iterable[int] = range(NUM_SEEDS)) -> Catch | None:
    """Walk until something is found wrong; None: the mutant survives."""
    script_of = scripts_with(mutant)
    for seed in seeds:
        try:
            walk_seed(client, seed, script_of=script_of)
        except Violation as violation:
            return Catch(violation.finding, violation.seed, violation.step)
    return None


def main(words: str) -> int:
    chosen = [mutant for mutant in MUTANTS if words in mutant]
    survivors = 0
    _show("mutant", "seed", "step", "caught by")
    with EmbeddedServer() as server, ServerBackend(server).client() as client:
        for mutant in chosen:
            catch = hunt(client, mutant)
            if catch is None:
                survivors += 1
                _show(mutant, "-", "-", "NOBODY")
            else:
                _show(mutant, catch.seed, catch.step, catch.finding[:90])
    sys.stdout.write(f"{len(chosen)} mutants, {survivors} survive\n")
    return 1 if survivors else 0


def _show(mutant: str, seed: object, step: object, finding: str) -> None:
    sys.stdout.write(f"{mutant:<56} {seed:>4} {step:>4}  {finding}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
