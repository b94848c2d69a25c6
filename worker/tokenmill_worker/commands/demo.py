"""`tokenmill demo`: a server, workers and concurrent streams on one machine, and nothing left."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console

from tokenmill import AsyncClient
from tokenmill._redis import connect
from tokenmill.cli.failures import INTERRUPTED, fail
from tokenmill.cli.snapshot import read_worker_cards
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill_worker.demo.engine_steps import EngineSteps
from tokenmill_worker.demo.processes import WorkerOptions, WorkerProcesses
from tokenmill_worker.demo.prompts import demo_questions
from tokenmill_worker.demo.report import report_table, total_line
from tokenmill_worker.demo.streams import OnText, StreamRecord, stream_all
from tokenmill_worker.demo.view import make_view
from tokenmill_worker.errors import StartupError
from tokenmill_worker.model_store import DEFAULT_MODEL, prepare_model

#: A large model on a slow disk takes its time.
READY_TIMEOUT_S = 600.0
POLL_S = 0.1
WATCH_EVERY_S = 1.0
#: What the workers import; looked for before anything is started.
NEEDED = ("torch", "transformers", "pydantic_settings", "prometheus_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What was asked for."""

    model: str
    requests: int
    workers: int
    max_tokens: int
    keep: bool
    console: Console

    def run(self) -> None:
        model = prepare_model(self.model, self._say)
        with ExitStack() as stack:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-demo-"))
            )
            with self._step("starting an embedded Redis-compatible server"):
                server = stack.enter_context(EmbeddedServer())
            options = WorkerOptions(
                redis_url=server.url,
                model=model,
                count=self.workers,
                folder=folder,
            )
            processes = stack.enter_context(WorkerProcesses(options))
            with self._step(f"loading {model.name} in {_count(self.workers, 'worker')}"):
                addresses = self._await_ready(server.url, processes)
            self._stream(server.url, addresses, processes)
            if self.keep:
                self._stay(server.url, processes)

    def _stream(self, url: str, addresses: Sequence[str], processes: WorkerProcesses) -> None:
        questions = demo_questions(self.requests)
        records = [StreamRecord(number, text) for number, text in enumerate(questions, start=1)]
        before = EngineSteps.read(addresses)
        self._say(f"streaming {_count(self.requests, 'request')} at once")
        with make_view(self.console, records) as view:
            asyncio.run(self._stream_records(url, records, view.on_text, processes.check))
        steps = EngineSteps.read(addresses).since(before)
        self.console.print(report_table(records))
        self._say(total_line(records, steps))

    async def _stream_records(
        self,
        url: str,
        records: Sequence[StreamRecord],
        on_text: OnText,
        check_workers: Callable[[], None],
    ) -> None:
        try:
            async with AsyncClient(url) as client, asyncio.TaskGroup() as group:
                watching = group.create_task(_watch(check_workers))
                await stream_all(client, records, max_tokens=self.max_tokens, on_text=on_text)
                watching.cancel()
        except ExceptionGroup as failures:
            raise _first(failures) from None

    def _await_ready(self, url: str, processes: WorkerProcesses) -> list[str]:
        """Wait for every worker's card to say ready; returns the addresses of their metrics."""
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        with closing(connect(url)) as client:
            while time.monotonic() < give_up_at:
                processes.check()
                cards = read_worker_cards(client, Keyspace())
                if sum(card.get("state") == "ready" for card in cards) == self.workers:
                    return [card["metrics"] for card in cards]
                time.sleep(POLL_S)
        raise StartupError(f"the model did not load within {READY_TIMEOUT_S:.0f} s")

    def _stay(self, url: str, processes: WorkerProcesses) -> None:
        self._say("the server and the workers stay; in another terminal:")
        self._say(f"  tokenmill --redis-url {url} chat 'Hello'")
        self._say("Ctrl-C ends them")
        while True:
            processes.check()
            time.sleep(1.0)

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        """Shows that something takes its time, and in the end how long it took."""
        started_s = time.monotonic()
        if self.console.is_terminal:
            with self.console.status(what):
                yield
        else:
            self._say(f"{what} …")
            yield
        self._say(f"{what}: {time.monotonic() - started_s:.1f} s")


@click.command(
    "demo",
    short_help="Try it: a server, a worker, concurrent streams.",
    epilog="""\b
Examples:
  tokenmill demo
  tokenmill demo --requests 12 --workers 2
  tokenmill demo --keep            # leave it running, to try the other commands""",
)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Model folder or hub id.")
@click.option("--requests", default=6, show_default=True, type=click.IntRange(1, 64))
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 16))
@click.option("--max-tokens", default=96, show_default=True, type=click.IntRange(1, 8192))
@click.option("--keep", is_flag=True, help="Leave the server and the workers running until Ctrl-C.")
@click.pass_context
def demo(context: click.Context, /, **options: Any) -> None:
    """Show concurrent streams on this machine: embedded server, workers, a small model.

    Needs nothing but this package. The first run makes the model (about a minute).
    """
    if (
        context.find_root().get_parameter_source("redis_url")
        is click.core.ParameterSource.COMMANDLINE
    ):
        raise click.UsageError("the demo starts a server of its own; leave --redis-url out.")
    for package in NEEDED:
        if find_spec(package) is None:
            fail(f"`tokenmill demo` needs {package}: pip install 'tokenmill[worker,embedded]'")
    with _sigterm_as_interrupt():
        try:
            Demo(console=Console(), **options).run()
        except StartupError as error:
            fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            raise click.exceptions.Exit(0 if options["keep"] else INTERRUPTED) from None


async def _watch(check_workers: Callable[[], None]) -> None:
    """Nobody else would serve what a lost worker leaves: its end ends the demo."""
    while True:
        check_workers()
        await asyncio.sleep(WATCH_EVERY_S)


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """`kill` of the demo stops the workers in order, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)  # asyncio has a handler of its own for this one

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # Where a shell script started the demo in the background, SIGINT is ignored until now.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
