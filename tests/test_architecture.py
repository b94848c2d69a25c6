"""The rules of CONTRIBUTING.md that a linter does not know: directions, budgets, light imports."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    file
    for folder in ("client", "engine", "worker")
    for file in sorted((ROOT / folder).rglob("*.py"))
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_SOURCE_LINES = 300
MAX_TEST_LINES = 500
MAX_FUNCTION_LINES = 50
MAX_CLASS_LINES = 250
MAX_METHODS = 15

#: Today's exceptions with their size. This list may only shrink.
RATCHET: dict[str, int] = {}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def nodes(file: Path) -> Iterator[ast.AST]:
    yield from ast.walk(ast.parse(file.read_text(), name_of(file)))


def comments(file: Path) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def length(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def public_methods(node: ast.ClassDef) -> int:
    """Properties are attributes to whoever reads the class, and dunders are syntax."""
    return sum(
        isinstance(item, Function)
        and not item.name.startswith("_")
        and not any("property" in ast.dump(decorator) for decorator in item.decorator_list)
        for item in node.body
    )


def over_budget() -> dict[str, int]:
    """Everything larger than its budget, with its size."""
    found = {}
    for file, most in [(f, MAX_SOURCE_LINES) for f in SOURCES] + [
        (f, MAX_TEST_LINES) for f in TESTS
    ]:
        lines = len(file.read_text().splitlines())
        if lines > most:
            found[name_of(file)] = lines
    for file in SOURCES:
        for node in nodes(file):
            if isinstance(node, Function) and length(node) > MAX_FUNCTION_LINES:
                found[f"{name_of(file)}::{node.name}"] = length(node)
            if isinstance(node, ast.ClassDef) and length(node) > MAX_CLASS_LINES:
                found[f"{name_of(file)}::{node.name}"] = length(node)
            if isinstance(node, ast.ClassDef) and public_methods(node) > MAX_METHODS:
                found[f"{name_of(file)}::{node.name} methods"] = public_methods(node)
    return found


def test_import_contracts_hold() -> None:
    """In a process of its own: import-linter configures logging, which disables every logger."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_sizes_are_within_budget() -> None:
    found = over_budget()

    grown = {name: size for name, size in found.items() if size > RATCHET.get(name, 0)}
    shrunk = {name: size for name, size in RATCHET.items() if size > found.get(name, 0)}
    assert grown == {}, "over budget: split by responsibility"
    assert shrunk == {}, "better than the ratchet says: lower it or drop the entry"


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_sources_take_no_short_cuts(file: Path) -> None:
    forbidden = re.compile(
        r"noqa: *(C901|PLR)|noqa *$|type: *ignore(?!\[)|pragma: *no cover|\b(TODO|FIXME|XXX|HACK)\b"
    )

    found = [comment for comment in comments(file) if forbidden.search(comment)]
    for node in nodes(file):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"bare except in line {node.lineno}")
        if isinstance(node, ast.Name) and node.id in {"print", "NotImplementedError"}:
            found.append(f"{node.id} in line {node.lineno}")

    assert found == []


#: How names in Redis go on after the prefix (see the table in `Keyspace`).
KEY = re.compile(r"(^|:)([qrtcbw]:|z:(dl|delay)\b)")


def is_prefix(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "prefix"


def hand_made_keys(file: Path) -> Iterator[int]:
    """Lines with a piece of a key, or with a key prefix inside an f-string."""
    tree = ast.parse(file.read_text(), name_of(file))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings and KEY.search(node.value):
                yield node.lineno
        elif isinstance(node, ast.FormattedValue) and is_prefix(node.value):
            yield node.lineno


def test_the_key_rule_knows_a_hand_made_key() -> None:
    file = ROOT / "client" / "tokenmill" / "keys.py"

    assert len(list(hand_made_keys(file))) >= 10


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_only_keyspace_joins_keys(file: Path) -> None:
    if name_of(file) != "client/tokenmill/keys.py":
        assert list(hand_made_keys(file)) == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("tokenmill", {"torch", "transformers", "numpy", "click", "rich", "tokenmill_worker"}),
        ("tokenmill.cli.app", {"torch", "transformers", "numpy", "tokenmill_worker"}),
        ("tokenmill_engine.scheduler", {"torch", "transformers", "redis", "pydantic"}),
        ("tokenmill_engine.kv_cache_manager", {"torch", "transformers"}),
        ("tokenmill_worker.settings", {"torch", "transformers"}),
        ("tokenmill_worker.model_store", {"torch", "transformers"}),
    ],
)
def test_imports_stay_light(module: str, absent: set[str]) -> None:
    """A contract is static; what an import really loads shows in a process of its own."""
    code = f"import sys, {module}; print(*sorted({absent!r} & set(sys.modules)))"
    path = [str(ROOT / folder) for folder in ("client", "engine", "worker")]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.stderr, done.stdout.split()) == ("", [])


def test_the_architecture_page_says_what_each_module_is() -> None:
    """A module's line is the first paragraph of its docstring, so that the two cannot drift."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    missing = []
    for package in ("client/tokenmill", "engine/tokenmill_engine", "worker/tokenmill_worker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT / package).as_posix()
            if name.endswith("/__init__.py"):
                continue
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            line = f"| `{name}` | {docstring.split(chr(10) * 2)[0].replace(chr(10), ' ')} |"
            if line not in page:
                missing.append(line)
    assert missing == [], "put these lines into docs/architecture.md"


def test_every_decision_is_in_the_list() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text())
    assert listed == sorted(page.name for page in folder.glob("0*.md"))
