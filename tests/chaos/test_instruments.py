"""The instruments of the chaos suite: a check that finds nothing wrong must be able to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from xml.etree import ElementTree

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from chaos.audience import Request, Transcript
from chaos.checks import Verdict, check_oracle, check_stream
from chaos.proxy import Proxy
from chaos.svg import Panel, chart, nice_maximum
from chaos.table import Row, render
from support_worker import text_of
from tokenmill._redis import RedisOptions, connect
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.protocol import EndEvent, Event, RewindEvent, StartEvent, TokenEvent

REQUEST = Request("request-1", "hello", 4)
IDS = REQUEST.expected(4)


def tokens(index: int, ids: list[int], seq: int = 2) -> TokenEvent:
    return TokenEvent(seq=seq, attempt=1, index=index, token_ids=ids, text=text_of(ids))


START = StartEvent(seq=1, attempt=1, index=0)
END = EndEvent(seq=4, attempt=1, status="done", finish_reason="length", num_tokens=4)


def verdict_on(*events: Event, rewinds: bool = False) -> Verdict:
    transcript = Transcript(REQUEST)
    for event in events:
        transcript.take(event)
    verdict = Verdict()
    check_stream(verdict, transcript, rewinds=rewinds)
    check_oracle(verdict, transcript)
    return verdict


def test_a_whole_stream_is_right() -> None:
    verdict = verdict_on(START, tokens(0, IDS[:1]), tokens(1, IDS[1:]), END)

    assert (verdict.wrong, verdict.lost, verdict.statuses) == ([], 0, {"done": 1})


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ((START, tokens(0, IDS)), "got 0 ends"),
        ((START, tokens(0, IDS), END, END), "got 2 ends"),
        ((START, tokens(0, IDS), END, tokens(4, [])), "after the end"),
        ((START, tokens(0, IDS[:2]), tokens(1, IDS[1:]), END), "1 tokens repeated"),
        ((START, tokens(0, IDS[:1]), tokens(2, IDS[2:]), END), "1 tokens lost"),
        ((START, tokens(0, IDS[:3]), END), "3 tokens of 4"),
        ((START, tokens(0, [*IDS[:3], 1 + IDS[3]]), END), "not those of one quiet run"),
        ((START, tokens(0, IDS), RewindEvent(index=3), tokens(3, IDS[3:]), END), "1 rewinds"),
    ],
)
def test_what_is_wrong_is_found(events: tuple[Event, ...], complaint: str) -> None:
    assert complaint in "\n".join(verdict_on(*events).wrong)


def test_an_expected_rewind_is_right() -> None:
    verdict = verdict_on(
        START, tokens(0, [*IDS[:3], 1 + IDS[3]]), RewindEvent(index=3), tokens(3, IDS[3:]), END,
        rewinds=True,
    )  # fmt: skip

    assert verdict.wrong == []


def test_the_table_adds_up() -> None:
    rows = [
        Row("kill9", requests=40, faults=1, requeued=8, seconds=4.5, outcome="ok"),
        Row("zombie", requests=8, lost=2, seconds=1.5, outcome="FAIL"),
    ]

    lines = render(rows).splitlines()

    assert lines[1].split() == ["kill9", "40", "1", "8", "0", "0", "0", "4.5", "ok"]
    assert lines[3].split()[:8] == ["total", "48", "1", "8", "0", "2", "0", "6.0"]
    assert lines[3].endswith("1 passed, 1 failed, 0 skipped")


@pytest.mark.parametrize(("value", "most"), [(0, 1), (0.3, 0.5), (1, 1), (7, 10), (120, 200)])
def test_axes_end_at_round_numbers(value: float, most: float) -> None:
    assert nice_maximum(value) == pytest.approx(most)


def test_the_chart_is_xml_with_a_line_for_each_series() -> None:
    panels = [Panel("a < b", {"x": [(0, 1), (10, 2)], "y": [(0, 0), (10, 0)]})]

    picture = ElementTree.fromstring(chart("title", panels, seconds=10, marks=[1, 2, 3]))

    lines = picture.findall("{http://www.w3.org/2000/svg}polyline")
    (first, second) = (line.attrib["points"].split() for line in lines)
    assert len(first) == len(second) == 2
    assert second[0].split(",")[1] == second[1].split(",")[1]


# ---- the proxy ----


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def count(
    proxy: Proxy, server: EmbeddedServer, keyspace: Keyspace
) -> Iterator[tuple[Callable[[], int], Callable[[], int]]]:
    """Counts through the proxy, and what has arrived."""
    key = f"{keyspace.prefix}count"
    through: redis.Redis = connect(proxy.url, RedisOptions(socket_timeout_s=0.3))
    with through, connect(server.url) as direct:
        yield lambda: through.incr(key), lambda: int(direct.get(key) or 0)
        direct.delete(key)


Count = tuple[Callable[[], int], Callable[[], int]]


def test_the_proxy_passes_on(count: Count) -> None:
    add, arrived = count

    assert [add(), add()] == [1, 2]
    assert arrived() == 2


def test_through_a_hole_nothing_arrives(proxy: Proxy, count: Count) -> None:
    add, arrived = count
    proxy.mode = "hole"

    with pytest.raises(RedisTimeoutError):
        add()
    assert arrived() == 0


def test_without_replies_the_call_arrives(proxy: Proxy, count: Count) -> None:
    add, arrived = count
    add()
    proxy.mode = "noreply"

    with pytest.raises(RedisTimeoutError):
        add()
    assert arrived() == 2


def test_a_cut_reply_leaves_a_call_that_counts(proxy: Proxy, count: Count) -> None:
    add, arrived = count
    add()
    proxy.cut_share = 1.0

    with pytest.raises(RedisConnectionError):
        add()
    assert (arrived(), proxy.num_cuts) == (2, 1)


def test_a_refused_connection(proxy: Proxy, count: Count) -> None:
    add, arrived = count
    add()
    proxy.mode = "refuse"
    proxy.cut()

    with pytest.raises(RedisConnectionError):
        add()
    assert arrived() == 1
