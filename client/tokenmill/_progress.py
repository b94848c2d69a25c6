"""How `map` shows its progress: by a callback, a bar, or a plain counter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sized
from contextlib import contextmanager
from importlib.util import find_spec

#: Called with the number of answers so far and, if known, how many there will be.
Progress = Callable[[int, int | None], object]


@contextmanager
def reporting(
    progress: bool | Progress, prompts: object
) -> Generator[Callable[[], None], None, None]:
    """A function to call after each answer; shows a bar, or calls `progress`."""
    total = len(prompts) if isinstance(prompts, Sized) else None
    if progress is False:
        yield lambda: None
    elif callable(progress):
        yield _counting(progress, total)
    elif find_spec("rich") is not None:
        with _rich_bar(total) as show:
            yield _counting(show, total)
    else:
        try:
            yield _counting(_plain, total)
        finally:
            sys.stderr.write("\n")


def _counting(progress: Progress, total: int | None) -> Callable[[], None]:
    done = 0

    def answered() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    return answered


def _plain(done: int, total: int | None) -> None:
    sys.stderr.write(f"\r{done}/{'?' if total is None else total}")
    sys.stderr.flush()


@contextmanager
def _rich_bar(total: int | None) -> Generator[Progress, None, None]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda done, _: bar.update(task, completed=done)
