"""Many prompts, a bounded number under way, the answers in order."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from dataclasses import dataclass

from ._async_link import AsyncLink
from ._async_stream import AsyncTokenStream
from ._link import Link
from ._progress import Progress, reporting
from ._requests import Prompt, RequestParams, Submission
from ._stream import TokenStream
from ._stream_base import StreamPlan
from .errors import InvalidRequest, QueueFull, RequestFailed
from .protocol import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class MapPlan:
    """The arguments of `map`; checked on construction."""

    concurrency: int
    progress: bool | Progress
    on_failure: Callable[[RequestFailed], Completion] | None
    params: RequestParams

    def __post_init__(self) -> None:
        number = self.concurrency
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidRequest("concurrency", "must be a whole number of at least 1")
        if self.params.get("request_id") is not None:
            raise InvalidRequest("request_id", "map makes one for each prompt; leave it out")

    def instead_of(self, error: RequestFailed) -> Completion:
        """What takes the place of an answer that failed; raises if nothing does."""
        if self.on_failure is None:
            raise error
        return self.on_failure(error)


class Window:
    """The prompts to come, and the requests under way in their order. With `resubmit` their streams
    enqueue them again: usually they are there already, and if Redis has lost them they come back.
    """

    def __init__(self, prompts: Iterable[Prompt], size: int, *, resubmit: bool) -> None:
        self.under_way: deque[Submission] = deque()
        self._prompts = iter(prompts)
        self._size = size
        self._resubmit = resubmit
        self._refused: Submission | None = None

    def next(self, build: Callable[[Prompt], Submission]) -> Submission | None:
        """What to enqueue now; None when the window is full or the prompts are over."""
        if len(self.under_way) >= self._size:
            return None
        if self._refused is not None:
            submission, self._refused = self._refused, None
            return submission
        for prompt in self._prompts:
            return build(prompt)
        return None

    def next_answer(self) -> StreamPlan:
        """The stream of the request whose answer comes next."""
        first = self.under_way[0]
        return StreamPlan(
            request_id=first.request_id,
            submission=first if self._resubmit else None,
            timeout_s=first.timing.patience_s(),
        )

    def refused(self, submission: Submission, error: QueueFull) -> None:
        """Keep it for when an answer has made room. Raises if no answer is awaited."""
        if not self.under_way:
            raise error
        self._refused = submission


def run_map(
    link: Link, prompts: Iterable[Prompt], plan: MapPlan
) -> Generator[Completion, None, None]:
    """The body of `Client.map`."""
    window = Window(prompts, plan.concurrency, resubmit=link.options.resubmit)
    try:
        with reporting(plan.progress, prompts) as answered:
            while _fill(link, window, plan):
                try:
                    completion = TokenStream(link, window.next_answer()).completion()
                except RequestFailed as error:
                    completion = plan.instead_of(error)
                window.under_way.popleft()
                answered()
                yield completion
    finally:
        for submission in window.under_way:
            link.give_up(submission.request_id)


def _fill(link: Link, window: Window, plan: MapPlan) -> bool:
    """Enqueue what the window has room for; False if nothing is under way."""
    while submission := window.next(lambda prompt: link.build(prompt, plan.params)):
        try:
            link.enqueue(submission)
        except QueueFull as error:
            window.refused(submission, error)
            break
        window.under_way.append(submission)
    return bool(window.under_way)


async def arun_map(
    link: AsyncLink, prompts: Iterable[Prompt], plan: MapPlan
) -> AsyncGenerator[Completion, None]:
    """The body of `AsyncClient.map`."""
    window = Window(prompts, plan.concurrency, resubmit=link.options.resubmit)
    try:
        with reporting(plan.progress, prompts) as answered:
            while await _afill(link, window, plan):
                try:
                    completion = await AsyncTokenStream(link, window.next_answer()).completion()
                except RequestFailed as error:
                    completion = plan.instead_of(error)
                window.under_way.popleft()
                answered()
                yield completion
    finally:
        for submission in window.under_way:
            await link.give_up(submission.request_id)


async def _afill(link: AsyncLink, window: Window, plan: MapPlan) -> bool:
    """Enqueue what the window has room for; False if nothing is under way."""
    while submission := window.next(lambda prompt: link.build(prompt, plan.params)):
        try:
            await link.enqueue(submission)
        except QueueFull as error:
            window.refused(submission, error)
            break
        window.under_way.append(submission)
    return bool(window.under_way)
