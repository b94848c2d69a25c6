"""The stream's state machine against a model of a lossy network and a log that may be rewritten."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill._accumulator import Accumulator
from tokenmill._events import parse_event
from tokenmill._mailbox import MAX_MESSAGES, LiveBuffer
from tokenmill._session import (
    MAX_SUSPICIONS,
    POLL_FIRST_S,
    POLL_JITTER,
    POLL_MOST_S,
    Read,
    RecordHead,
    StreamState,
    Wait,
)
from tokenmill.errors import ProtocolError, UnknownRequest
from tokenmill.protocol import EndEvent, Event, RewindEvent, TokenEvent


def start(e: int, attempt: int = 1, index: int = 0) -> str:
    return json.dumps({"e": e, "ev": "start", "a": attempt, "i": index, "w": "w1"})


def tokens(e: int, index: int, ids: list[int], attempt: int = 1, text: str | None = None) -> str:
    text = "".join(f"<{i}>" for i in ids) if text is None else text
    return json.dumps({"e": e, "i": index, "k": ids, "t": text, "a": attempt})


def end(e: int, attempt: int = 1, status: str = "done", text: str = "") -> str:
    return json.dumps({"e": e, "ev": "end", "st": status, "fin": "stop", "a": attempt, "t": text})


def make_log(chunks: list[list[int]], attempts: list[int] | None = None) -> list[str]:
    """A log of these chunks, finished; `attempts` names the chunks that begin a new attempt."""
    log, index, attempt = [start(1)], 0, 1
    for number, ids in enumerate(chunks):
        if number in (attempts or []):
            attempt += 1
            log.append(start(len(log) + 1, attempt, index))
        log.append(tokens(len(log) + 1, index, ids, attempt))
        index += len(ids)
    return [*log, end(len(log) + 1, attempt)]


@dataclass
class Server:
    """The log and the record as they stand in Redis."""

    log: list[str] = field(default_factory=list)
    created_ms: int = 1
    gone: bool = False

    def head(self) -> RecordHead | None:
        ended = bool(self.log) and '"ev": "end"' in self.log[-1]
        return None if self.gone else RecordHead(self.created_ms, len(self.log) if ended else None)


class Driver:
    """The loop of a client, with a clock that only waiting moves."""

    def __init__(self, server: Server, after: int = 0, page: int = 500) -> None:
        self.server = server
        self.now = 0.0
        self.page = page
        self.inbox: list[str] = []
        self.out: list[Event] = []
        self.state = StreamState("r", after, clock=lambda: self.now)
        self.state.enqueued(1)

    def step(self) -> None:
        match self.state.next_action():
            case Read(after=after):
                self.inbox.clear()
                page = self.server.log[after : after + self.page]
                self.out += self.state.on_read(self.server.head(), page, Read(after, self.page))
            case Wait(seconds=seconds):
                if self.inbox:
                    taken, self.inbox = self.inbox, []
                    self.out += self.state.on_messages(taken)
                else:
                    self.now += seconds + 1e-6

    def run(self, most_steps: int = 200) -> None:
        for _ in range(most_steps):
            if self.state.finished:
                return
            self.step()
        raise AssertionError("the stream did not end")


def events_of(log: list[str]) -> list[Event]:
    return [event for event in map(parse_event, log) if event is not None]


def text_of(events: list[Event]) -> str:
    """The text a caller holds who applies every rewind, counted from the log's token events."""
    folded = Accumulator("r")
    for event in events:
        folded.fold(event)
    return folded.text


chunk_lists = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=12)


@given(
    chunks=chunk_lists,
    attempts=st.lists(st.integers(0, 11), max_size=2),
    page=st.integers(2, 5),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_any_fate_of_the_messages_delivers_the_log_once_and_in_order(
    chunks: list[list[int]], attempts: list[int], page: int, seed: int
) -> None:
    log, dice, server = make_log(chunks, attempts), random.Random(seed), Server()
    driver = Driver(server, page=page)
    late: list[str] = []
    for payload in log:
        server.log.append(payload)
        fate = dice.choice(["live", "live", "lost", "twice", "late"])
        if fate == "late":
            late.append(payload)
        elif fate != "lost":
            driver.inbox += [payload] * (2 if fate == "twice" else 1)
        if late and dice.random() < 0.3:
            driver.inbox.append(late.pop(dice.randrange(len(late))))
        for _ in range(dice.randrange(3)):
            driver.step()
        if dice.random() < 0.1:
            driver.state.catch_up()
    driver.run()
    assert driver.out == events_of(log)
    assert driver.state.delivered.token_ids == [i for ids in chunks for i in ids]
    assert driver.state.stats.restarts == 0  # a gap costs the rest of the log, not all of it


@given(
    old=chunk_lists,
    new=chunk_lists,
    keep=st.integers(0, 12),
    page=st.integers(2, 5),
    live=st.booleans(),
    recreated=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_after_a_loss_of_data_the_caller_holds_what_the_new_log_says(
    old: list[list[int]], new: list[list[int]], keep: int, page: int, live: bool, recreated: bool
) -> None:
    server = Server(make_log(old)[:-1])
    driver = Driver(server)
    driver.state.catch_up()
    driver.step()
    shown = text_of(driver.out)
    # Redis forgets all but `keep` events; another attempt goes on from there with other tokens.
    rest = server.log[: min(keep, len(server.log))] if not recreated else []
    index = sum(len(json.loads(payload).get("k", [])) for payload in rest)
    attempt = 1 if recreated else 2
    tail = [start(len(rest) + 1, attempt, index)]
    for ids in new:
        tail.append(tokens(len(rest) + len(tail) + 1, index, ids, attempt))
        index += len(ids)
    tail.append(end(len(rest) + len(tail) + 1, attempt))
    server.log, server.created_ms, driver.page = list(rest), 2 if recreated else 1, page
    if live:  # a server that lost data was away: the subscription is new. Else the poll finds out
        driver.state.catch_up()
    for payload in tail:
        server.log.append(payload)
        if live:
            driver.inbox.append(payload)
            driver.step()
    driver.run()
    want = [
        i
        for event in events_of(server.log)
        if isinstance(event, TokenEvent)
        for i in event.token_ids
    ]
    assert driver.state.delivered.token_ids == want
    assert driver.state.delivered.text == "".join(f"<{i}>" for i in want)
    # A caller that folds what it was handed holds the same, and nothing was withdrawn needlessly.
    assert text_of(driver.out) == driver.state.delivered.text
    if driver.state.delivered.text.startswith(shown):
        assert not [event for event in driver.out if isinstance(event, RewindEvent)]


@given(chunks=chunk_lists, after=st.integers(0, 20), page=st.integers(2, 5))
def test_attach_after_an_event_delivers_the_rest_and_knows_the_whole(
    chunks: list[list[int]], after: int, page: int
) -> None:
    log = make_log(chunks)
    driver = Driver(Server(log), after=min(after, len(log)), page=page)
    driver.state.catch_up()
    driver.run()
    assert driver.out == events_of(log)[after:]
    assert driver.state.delivered.token_ids == [i for ids in chunks for i in ids]


def test_a_cursor_beyond_the_log_starts_the_caller_again() -> None:
    """The log the cursor came from is lost: everything is withdrawn, then told anew."""
    log = make_log([[1], [2]])
    driver = Driver(Server(log), after=9)
    driver.state.catch_up()
    driver.run()
    assert [event.type for event in driver.out] == ["rewind", "token", "end"]
    assert driver.out[0] == RewindEvent(index=0)
    assert text_of(driver.out) == "<1><2>"


def test_the_buffer_is_bounded_and_says_so() -> None:
    buffer = LiveBuffer()
    for number in range(MAX_MESSAGES):
        buffer.add(str(number))
    assert buffer.has_news
    payloads, missed = buffer.take()
    assert (len(payloads), missed) == (MAX_MESSAGES, False)
    assert not buffer.has_news
    for number in range(MAX_MESSAGES + 1):
        buffer.add(str(number))
    buffer.add("after the overflow")
    assert buffer.take() == ([], True)
    buffer.add("anew")
    assert buffer.take() == (["anew"], False)


def test_a_live_message_needs_no_log() -> None:
    driver = Driver(Server())
    out = driver.state.on_messages(make_log([[1, 2]]))
    assert [event.type for event in out] == ["start", "token", "end"]
    assert driver.state.stats.reads == 0
    assert driver.state.next_action() is None


def test_the_text_of_the_end_event_belongs_to_the_answer() -> None:
    driver = Driver(Server())
    driver.state.on_messages([start(1), tokens(2, 0, [7], text="Hel"), end(3, text="lo")])
    assert driver.state.delivered.completion().text == "Hello"


def test_another_cut_of_the_same_text_withdraws_nothing() -> None:
    """A second attempt holds back text differently; the tokens are the same, so is the text."""
    server = Server([start(1), tokens(2, 0, [1], text="a"), tokens(3, 1, [2], text="b")])
    driver = Driver(server)
    driver.state.catch_up()
    driver.step()
    server.log = [start(1), start(2, 2), tokens(3, 0, [1, 2, 3], attempt=2, text="abc"), end(4, 2)]
    driver.state.catch_up()
    driver.run()
    assert [event for event in driver.out if isinstance(event, TokenEvent)] == [
        TokenEvent(seq=2, attempt=1, index=0, token_ids=[1], text="a"),
        TokenEvent(seq=3, attempt=1, index=1, token_ids=[2], text="b"),
        TokenEvent(seq=3, attempt=2, index=2, token_ids=[3], text="c"),
    ]


def test_a_rewind_into_a_coalesced_event_falls_on_its_start() -> None:
    """Text can only be cut where an event ended."""
    server = Server([start(1), tokens(2, 0, [1], text="a"), tokens(3, 1, [2, 3], text="bc")])
    driver = Driver(server)
    driver.state.catch_up()
    driver.step()
    server.log = [start(1), tokens(2, 0, [1, 2, 9], text="abx"), end(3)]
    driver.state.catch_up()
    driver.run()
    rewind, again, ending = driver.out[-3:]
    assert rewind == RewindEvent(index=1)
    assert again == TokenEvent(seq=2, attempt=1, index=1, token_ids=[2, 9], text="bx")
    assert isinstance(ending, EndEvent)


def caught_up(log: list[str], after: int = 0) -> Driver:
    """A driver that has read this log, which goes on."""
    driver = Driver(Server(log), after=after)
    driver.state.catch_up()
    driver.step()
    return driver


def test_a_request_enqueued_anew_is_told_by_its_birth() -> None:
    """The last entry read is the same in the new log, and so is the attempt."""
    driver = caught_up([start(1), tokens(2, 0, [0]), tokens(3, 1, [5])])
    driver.server.log = [start(1), tokens(2, 0, [9]), tokens(3, 1, [5]), end(4)]
    driver.server.created_ms = 2
    driver.run()
    assert driver.state.delivered.token_ids == [9, 5]


def test_an_end_of_an_attempt_that_was_not_heard_of_is_looked_up() -> None:
    driver = caught_up([start(1), tokens(2, 0, [0])])
    driver.server.log = [start(1, 2), tokens(2, 0, [9], attempt=2), end(3, 2)]
    driver.inbox = [end(3, 2)]
    driver.run()
    assert driver.state.delivered.token_ids == [9]
    assert [event.type for event in driver.out] == [
        "start",
        "token",
        "start",
        "rewind",
        "token",
        "end",
    ]


@pytest.mark.parametrize("message", [tokens(3, 1, [6]), tokens(2, 0, [9]), start(1, 2), end(2)])
def test_a_known_number_that_says_something_else_makes_it_read_anew(message: str) -> None:
    driver = caught_up([start(1), tokens(2, 0, [0]), tokens(3, 1, [5])])
    driver.state.on_messages([message])
    assert driver.state.stats.restarts == 1
    assert driver.state.next_action() == Read(0)
    same = caught_up([start(1), tokens(2, 0, [0]), tokens(3, 1, [5])])
    same.state.on_messages(same.server.log)
    assert same.state.stats.restarts == 0


def test_other_text_of_the_same_tokens_is_withdrawn_where_it_differs() -> None:
    driver = caught_up([start(1), tokens(2, 0, [1], text="a"), tokens(3, 1, [2], text="b")])
    driver.server.log = [start(1), tokens(2, 0, [1, 2], text="aB"), end(3)]
    driver.run()
    assert driver.out[3:5] == [
        RewindEvent(index=1),
        TokenEvent(seq=2, attempt=1, index=1, token_ids=[2], text="B"),
    ]


def test_a_live_end_below_the_cursor_starts_the_caller_again() -> None:
    driver = Driver(Server(), after=9)
    out = driver.state.on_messages(make_log([[1]]))
    assert [event.type for event in out] == ["rewind", "token", "end"]


def test_tokens_lost_before_a_cancel_are_withdrawn() -> None:
    server = Server(make_log([[1], [2], [3]])[:-1])
    driver = Driver(server)
    driver.state.catch_up()
    driver.step()
    server.log = [*server.log[:3], end(4, status="cancelled")]
    driver.run()
    assert driver.state.delivered.token_ids == [1, 2]
    assert [event.type for event in driver.out[-2:]] == ["rewind", "end"]


def with_logprobs(e: int, index: int, ids: list[int]) -> str:
    fields = json.loads(tokens(e, index, ids))
    return json.dumps({**fields, "lp": [[[i, -0.5, 1, "x"]] for i in ids]})


@pytest.mark.parametrize(
    "rewritten",
    [
        [with_logprobs(2, 0, [1, 2]), with_logprobs(3, 2, [9])],  # differs within an event
        [with_logprobs(2, 0, [1]), with_logprobs(3, 1, [2, 3, 4])],  # goes on within an event
    ],
)
def test_log_probabilities_stay_with_their_tokens(rewritten: list[str]) -> None:
    driver = caught_up([start(1), with_logprobs(2, 0, [1]), with_logprobs(3, 1, [2, 3])])
    driver.server.log = [start(1), *rewritten, end(4)]
    driver.run()
    completion = driver.state.delivered.completion()
    assert completion.logprobs is not None
    assert [
        alternatives[0].token_id for alternatives in completion.logprobs
    ] == completion.token_ids
    assert completion.token_ids == [
        i for payload in rewritten for i in json.loads(payload)["k"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    "log",
    [
        [start(1), tokens(2, 5, [1])],  # a hole in the tokens
        [tokens(1, 0, [1])],  # no start
        [start(1), tokens(2, 0, [1]), end(9)],  # a hole in the numbers
        [start(1, 2), start(2, 1), end(3)],  # attempts run backwards
        [start(1), "{"],
        [start(1), '{"e": 2, "i": 0, "k": "x"}'],
    ],
)
def test_a_log_that_contradicts_itself_is_an_error_after_few_reads(log: list[str]) -> None:
    driver = Driver(Server(log))
    driver.state.catch_up()
    with pytest.raises(ProtocolError):
        driver.run()
    assert driver.state.stats.reads <= MAX_SUSPICIONS + 1


def test_an_end_named_by_the_record_and_missing_in_the_log_is_an_error() -> None:
    state = StreamState("r")
    for _ in range(MAX_SUSPICIONS):
        state.on_read(RecordHead(1, 7), [start(1)], Read(0))
    with pytest.raises(ProtocolError):
        state.on_read(RecordHead(1, 7), [start(1)], Read(0))


def test_a_gone_record_is_an_unknown_request() -> None:
    driver = Driver(Server(gone=True))
    with pytest.raises(UnknownRequest):
        driver.run()


@pytest.mark.parametrize("payload", ["", "[]", "{}", "null", '{"e": "x"}', "[" * 100_000, b"\xff"])
def test_a_strange_message_only_makes_it_read_the_log(payload: str | bytes) -> None:
    driver = Driver(Server(make_log([[1]])))
    assert driver.state.on_messages([payload]) == []
    assert driver.state.next_action() == Read(0)
    driver.run()
    with pytest.raises(ProtocolError):
        parse_event(payload)


def test_unknown_kinds_of_events_are_stepped_over_and_numbered() -> None:
    strange = json.dumps({"e": 2, "ev": "from-the-future", "x": 1})
    driver = Driver(Server([start(1), strange, tokens(3, 0, [1]), end(4)]))
    assert parse_event(strange) is None
    driver.state.catch_up()
    driver.run()
    assert [event.type for event in driver.out] == ["start", "token", "end"]


def test_protocol_errors_never_quote_what_they_read() -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_event('{"e": 1, "i": 0, "k": ["secret prompt"]}')
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_poll_slows_down_while_nothing_happens() -> None:
    driver = Driver(Server())
    waits: list[float] = []
    while len(waits) < 8:
        action = driver.state.next_action()
        if isinstance(action, Wait):
            waits.append(action.seconds)
        driver.step()
    assert waits[0] <= POLL_FIRST_S * (1 + POLL_JITTER)
    assert POLL_MOST_S * (1 - POLL_JITTER) <= waits[-1] <= POLL_MOST_S * (1 + POLL_JITTER)


def test_only_news_put_off_the_poll() -> None:
    """A stream of repeated messages must not hide that the log moved on."""
    driver = Driver(Server(make_log([[1]])))
    driver.state.on_messages([start(1)])
    first = driver.state.next_action()
    driver.now += 0.1
    driver.state.on_messages([start(1)])
    second = driver.state.next_action()
    assert isinstance(first, Wait)
    assert isinstance(second, Wait)
    assert second.seconds == pytest.approx(first.seconds - 0.1)
    assert driver.state.stats.duplicates == 1
