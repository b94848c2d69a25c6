"""What must hold after any disturbance: I1 to I11, what clients saw, and that nothing is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import redis

from chaos.audience import Transcript
from support_invariants import check_invariants
from support_snapshot import Snapshot, take_snapshot
from support_worker import text_of
from support_worker_process import LEASE_MS, eventually
from tokenmill._events import parse_event
from tokenmill.calls import QueuePolicy
from tokenmill.keys import Keyspace
from tokenmill.protocol import EndEvent, Event, TokenEvent

#: What clients and workers of a scenario agree upon, unless it says otherwise.
POLICY = QueuePolicy(lease_ms=LEASE_MS)


@dataclass
class Verdict:
    """`wrong` has a line for every contradiction, each with an id and numbers."""

    statuses: Counter[str] = field(default_factory=Counter)
    requeued: int = 0
    lost: int = 0
    logs: dict[str, list[Event]] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def demand(self, fulfilled: bool, otherwise: str) -> None:
        if not fulfilled:
            self.wrong.append(otherwise)

    def raise_if_wrong(self) -> None:
        assert not self.wrong, "\n".join(self.wrong[:20])


@dataclass(frozen=True)
class View:
    """One partition of a pool: a client of the server that has it, and its keys."""

    client: redis.Redis
    keys: Keyspace


def check_after(
    verdict: Verdict,
    view: View,
    transcripts: Sequence[Transcript],
    *,
    oracle: bool = True,
    data_lost_at_s: float | None = None,
    rewinds: bool = False,
    clock_went_back: bool = False,
    policy: QueuePolicy = POLICY,
) -> None:
    """Everything that can be said about a partition at rest, and the streams that lived there.

    `oracle`: whether the engine is deterministic, so that each transcript is known beforehand.
    `data_lost_at_s`: Redis lost data until then, so logs may be other than what clients saw of
    streams that ended before. `rewinds`: whether the SDK may withdraw what it handed out.
    """
    snapshot = check_rest(verdict, view, policy, clock_went_back=clock_went_back)
    verdict.snapshots.append(snapshot)
    for transcript in transcripts:
        request_id = transcript.request.id
        check_stream(verdict, transcript, rewinds=rewinds)
        if oracle:
            check_oracle(verdict, transcript)
        known_end = transcript.ended_s is not None and (transcript.ended_s < (data_lost_at_s or 0))
        if not known_end:
            log = [parse_event(entry["d"]) for entry in snapshot.logs.get(request_id, {}).values()]
            verdict.logs[request_id] = [event for event in log if event is not None]
            _check_against_log(verdict, transcript, exact=data_lost_at_s is None)


def check_rest(
    verdict: Verdict, view: View, policy: QueuePolicy, *, clock_went_back: bool = False
) -> Snapshot:
    """The whole keyspace of a partition in which nobody works any more."""
    snapshot = _at_rest(view)
    if clock_went_back:  # and the times in histories with it; their order is that of the lines
        for lines in snapshot.histories.values():
            for earlier, later in pairwise(lines):
                later["t"] = max(earlier["t"], later["t"])
    try:
        check_invariants(snapshot, view.keys, policy)
    except AssertionError as broken:
        verdict.wrong.append(str(broken))
    _check_nothing_left(verdict, snapshot, view)
    return snapshot


def _at_rest(view: View) -> Snapshot:
    """Without the cards of dead workers, which live on for three leases and are no state."""
    for card in list(view.client.scan_iter(view.keys.worker_cards)):
        view.client.delete(card)
    return take_snapshot(view.client, view.keys)


def check_stream(verdict: Verdict, transcript: Transcript, *, rewinds: bool) -> None:
    """I7, and I1 as a client sees it: each index once and in order, one end, nothing behind it."""
    name = transcript.request.id
    if transcript.error is not None:
        verdict.wrong.append(f"{name}: {type(transcript.error).__name__}: {transcript.error}")
    ends = transcript.ends
    verdict.lost += transcript.num_missing + (not ends)
    verdict.demand(len(ends) == 1, f"I1 {name}: the reader got {len(ends)} ends")
    if not ends:
        return
    verdict.statuses[ends[0].status] += 1
    verdict.demand(transcript.events[-1] is ends[0], f"I1 {name}: something came after the end")
    missing, repeated = transcript.num_missing, transcript.num_repeated
    verdict.demand(missing == 0, f"I7 {name}: {missing} tokens lost")
    verdict.demand(repeated == 0, f"I7 {name}: {repeated} tokens repeated")
    if not rewinds:
        verdict.demand(transcript.num_rewinds == 0, f"I7 {name}: {transcript.num_rewinds} rewinds")
    if ends[0].status == "done":
        done, wanted = len(transcript.token_ids), transcript.request.max_tokens
        verdict.demand(done == wanted, f"{name}: {done} tokens of {wanted}")


def check_oracle(verdict: Verdict, transcript: Transcript) -> None:
    name, token_ids = transcript.request.id, transcript.token_ids
    expected = transcript.request.expected(len(token_ids))
    verdict.demand(token_ids == expected, f"{name}: the tokens are not those of one quiet run")
    if transcript.ends and transcript.ends[0].status == "done" and not transcript.num_rewinds:
        verdict.demand(transcript.text == text_of(expected), f"{name}: the text is not theirs")


def _check_against_log(verdict: Verdict, transcript: Transcript, *, exact: bool) -> None:
    name, log = transcript.request.id, verdict.logs[transcript.request.id]
    verdict.demand(bool(log), f"I10 {name}: accepted, and not there")
    verdict.requeued += max([event.attempt for event in log] + [1]) - 1  # type: ignore[union-attr]
    token_ids = [i for event in log if isinstance(event, TokenEvent) for i in event.token_ids]
    same = token_ids == transcript.token_ids
    verdict.demand(same, f"I7 {name}: log {len(token_ids)}, reader {len(transcript.token_ids)}")
    if exact:
        verdict.demand(transcript.events == log, f"I7 {name}: the reader's events are not the log")
    else:
        ends = [event.status for event in log if isinstance(event, EndEvent)]
        verdict.demand(ends == [end.status for end in transcript.ends], f"I1 {name}: other ends")


def _check_nothing_left(verdict: Verdict, snapshot: Snapshot, view: View) -> None:
    """I9: after the last request nothing stands anywhere but in records and logs."""
    left = {
        "own": snapshot.owners,
        "deadlines": snapshot.deadlines,
        "delayed": snapshot.delayed,
        "windows": snapshot.windows,
        "backlogs": snapshot.backlogs,
        "counters": {name: count for name, count in snapshot.counters.items() if count},
        **{f"stream {name}": stream.entries for name, stream in snapshot.ready.items()},
        **{f"pending {name}": stream.pending for name, stream in snapshot.ready.items()},
    }
    found = {name: value for name, value in left.items() if value}
    verdict.demand(not found, f"I9 left over: {found}"[:1000])
    pattern = f"{view.keys.prefix}*"
    try:
        eventually(lambda: not view.client.pubsub_channels(pattern), 5)
    except AssertionError:
        verdict.wrong.append(f"I9 subscriptions left: {view.client.pubsub_channels(pattern)[:5]}")
