"""Print what pyproject.toml requires, with the extras named as arguments, one per line.

The image installs these before it copies the sources, so that a change of code costs seconds.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements_of(project: dict[str, Any], extras: list[str]) -> list[str]:
    """The project's own requirements and those of `extras`, with its self-references resolved."""
    found = list(project["dependencies"])
    own = re.compile(rf"{project['name']}\[([\w,-]+)\]")
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            reference = own.fullmatch(requirement)
            found += (
                requirements_of(project, reference[1].split(",")) if reference else [requirement]
            )
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    document = tomllib.loads(Path("pyproject.toml").read_text())
    sys.stdout.write("\n".join(requirements_of(document["project"], sys.argv[1:])) + "\n")
