"""Whoever enqueues does not pay for what only a worker or a terminal needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tokenmill

HEAVY = {
    "torch", "transformers", "numpy", "rich", "click", "fakeredis", "hypothesis",
    "prometheus_client", "tokenmill_engine", "tokenmill_worker",
}  # fmt: skip
#: What our two dependencies bring is not ours to count.
MOST_MODULES_OF_OUR_OWN = 46


def modules_after(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after `statement`."""
    source = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    folder = str(Path(tokenmill.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n{source}"],
        capture_output=True,
        check=True,
        text=True,
    )
    return set(json.loads(done.stdout))


def test_the_import_is_light() -> None:
    loaded = modules_after("import tokenmill")
    assert not HEAVY & loaded
    ours = {name for name in loaded if name.startswith("tokenmill")}
    assert len(ours) <= MOST_MODULES_OF_OUR_OWN
    assert "tokenmill.testing" not in ours
    assert "tokenmill.embedded" not in ours
    assert not any(name.startswith("tokenmill.cli") for name in ours)
