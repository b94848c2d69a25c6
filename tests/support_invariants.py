"""The invariants of the queue (I1 … I11), checked on a snapshot of the whole keyspace.

They are written from the protocol, not from the scripts. Each raises AssertionError with the
number of the invariant and ids, states and counts.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from support_snapshot import LOST_COUNT, Snapshot, entry_order
from tokenmill.calls import QueuePolicy
from tokenmill.keys import Keyspace
from tokenmill.protocol import TERMINAL_STATES, EndEvent, StartEvent, TokenEvent

WAITING = {"held", "queued", "delayed"}
EVENT_MODELS = {"start": StartEvent, "token": TokenEvent, "end": EndEvent}


def check_invariants(
    snapshot: Snapshot, keys: Keyspace, policy: QueuePolicy, before: Snapshot | None = None
) -> None:
    """`before` is the snapshot before the last step, if a tenant's weight may have been lowered."""
    assert not snapshot.unknown, f"keys that the key table does not know: {snapshot.unknown}"
    for request_id in snapshot.logs.keys() | snapshot.histories.keys():
        assert request_id in snapshot.records, f"I8 a log without a record: {request_id}"
    for request_id, record in snapshot.records.items():
        _check_log(snapshot, request_id, record)
        _check_place(snapshot, request_id, record)
        _check_deadline(snapshot, request_id, record)
        _check_body(request_id, record, policy)
        check_history(request_id, record, snapshot.histories.get(request_id, []))
    _check_owners(snapshot)
    _check_ready_streams(snapshot)
    _check_counters(snapshot)
    _check_windows(snapshot, policy, before)
    _check_lifetimes(snapshot, keys, policy)


def _check_log(snapshot: Snapshot, request_id: str, record: dict[str, str]) -> None:
    events = snapshot.events(request_id)
    entry_ids = list(snapshot.logs.get(request_id, {}))
    numbers = list(range(1, len(events) + 1))
    assert entry_ids == [f"{n}-0" for n in numbers], f"I2 {request_id}: ids {entry_ids}"
    assert [event["e"] for event in events] == numbers, f"I2 {request_id}: numbers not dense"
    attempts = [event["a"] for event in events]
    assert attempts == sorted(attempts), f"I3 {request_id}: attempts {attempts}"
    ends = [event["e"] for event in events if event.get("ev") == "end"]
    terminal = record["state"] in TERMINAL_STATES
    assert ends == ([len(events)] if terminal else []), f"I1 {request_id}: ends {ends}"
    num_tokens = 0
    for event in events:
        parsed = EVENT_MODELS[event.get("ev", "token")].model_validate(event)
        if isinstance(parsed, StartEvent | TokenEvent):
            assert parsed.index == num_tokens, f"I2 {request_id}: token {parsed.index}"
        if isinstance(parsed, TokenEvent):
            num_tokens += len(parsed.token_ids)
        if isinstance(parsed, EndEvent):
            assert parsed.status == record["state"], f"I1 {request_id}: {parsed.status}"
            assert record["end_seq"] == str(parsed.seq), f"I1 {request_id}: end_seq"
            assert (parsed.code or "") == record.get("code", ""), f"I1 {request_id}: code"


def _check_place(snapshot: Snapshot, request_id: str, record: dict[str, str]) -> None:
    """I5: where a request stands, by its state."""
    state, entry = record["state"], record["entry"]
    stream = snapshot.ready[record["ready"]]
    share = f"{record['class']}:{record['tenant']}"
    assert (request_id in snapshot.delayed) == (state == "delayed"), f"I5 {request_id} {state}"
    if state == "held":
        assert request_id in snapshot.backlogs.get(share, []), f"I5 {request_id}: lost from backlog"
    ended = {"end_seq", "ended", "code", "message", "usage", "letter"} & record.keys()
    assert state in TERMINAL_STATES or not ended, f"I1 {request_id} {state}: {ended}"
    # Class r is for what was tried before; no new request goes before the others.
    untried = record["ready"] == "r" and record["class"] != "r" and record["attempts"] == "0"
    assert not untried, f"I5 {request_id} {state}: new work in class r"
    # The window counts what stands in the ready stream and has not been taken.
    assert record["windowed"] == "0" or state == "queued", f"I6 {request_id} {state}: windowed"
    if state in ("queued", "leased"):
        assert entry in stream.entries, f"I5 {request_id} {state}: no ready entry"
        assert stream.entries[entry]["id"] == request_id, f"I5 {request_id}: wrong entry"
    else:
        assert entry == "", f"I5 {request_id} {state}: points to an entry"
    if state == "leased":
        assert entry in stream.pending, f"I5 {request_id}: leased, but not pending"


def applying_deadlines(snapshot: Snapshot, request_id: str) -> dict[str, float]:
    """The deadlines of a living request that still count, by the name of their record field."""
    record = snapshot.records[request_id]
    has_token = any("ev" not in event for event in snapshot.events(request_id))
    over = {"queue_deadline": record["attempts"] != "0", "first_token_deadline": has_token}
    names = ("deadline", "queue_deadline", "first_token_deadline")
    return {n: float(record[n]) for n in names if n in record and not over.get(n, False)}


def _check_deadline(snapshot: Snapshot, request_id: str, record: dict[str, str]) -> None:
    """I5: maintenance looks at a living request in time for its next deadline."""
    looked_at = snapshot.deadlines.get(request_id)
    if record["state"] in TERMINAL_STATES:
        assert looked_at is None, f"I5 {request_id} {record['state']}: still has a deadline"
    else:
        nearest = min(applying_deadlines(snapshot, request_id).values())
        assert looked_at is not None, f"I5 {request_id} {record['state']}: no deadline"
        assert looked_at <= nearest, f"I5 {request_id}: {looked_at}, but {nearest} applies"


def _check_body(request_id: str, record: dict[str, str], policy: QueuePolicy) -> None:
    kept = record["state"] == "dead" and policy.dead_letter_body_ms > 0
    needed = kept or record["state"] not in TERMINAL_STATES
    assert ("body" in record) == needed, f"I11 {request_id} {record['state']}: body"


#: What the last line of a history may be, by the state of the request.
LAST_LINES = {
    "held": {"held"},
    "queued": {"queued", "admitted", "moved"},
    "delayed": {"enqueued", "retried", "requeued", "moved"},
    "leased": {"leased"},
} | {state: {"ended"} for state in TERMINAL_STATES}
#: A longer history has lost lines in the middle.
LONG_HISTORY = 100


def check_history(request_id: str, record: dict[str, str], lines: list[dict[str, Any]]) -> None:
    """The history begins with the birth, ends where the request is, and counts what it counts."""
    where = f"history of {request_id} ({record['state']}): {[line['ev'] for line in lines]}"
    assert 0 < len(lines) <= LONG_HISTORY, where
    assert lines[0]["ev"] in ("enqueued", "admitted"), where
    assert lines[-1]["ev"] in LAST_LINES[record["state"]], where
    times = [line["t"] for line in lines]
    assert times == sorted(times), f"{where}: times {times}"
    if len(lines) == LONG_HISTORY:
        return
    counts = Counter(line["ev"] for line in lines)
    assert counts["ended"] == (record["state"] in TERMINAL_STATES), where
    attempts = [line["a"] for line in lines if line["ev"] == "leased"]
    assert attempts == list(range(1, int(record["attempts"]) + 1)), f"{where}: {attempts}"
    assert counts["handed_over"] == int(record["handovers"]), where
    assert counts["retried"] == int(record["retries"]), where
    if record["state"] in TERMINAL_STATES:
        assert lines[-1]["st"] == record["state"], where
        assert lines[-1].get("code") == record.get("code"), where


def _check_owners(snapshot: Snapshot) -> None:
    leased = {
        request_id: record["attempts"]
        for request_id, record in snapshot.records.items()
        if record["state"] == "leased"
    }
    attempts = {name: fence.partition(".")[0] for name, fence in snapshot.owners.items()}
    assert attempts == leased, f"I4 own {snapshot.owners}, leased {leased}"


def _check_ready_streams(snapshot: Snapshot) -> None:
    """What was delivered is pending; the rest is undelivered, and the lag counts exactly that."""
    for name, stream in snapshot.ready.items():
        for entry in stream.pending:
            assert entry in stream.entries, f"I5 {name}: pending entry {entry} was deleted"
        delivered = {entry for entry in stream.entries if stream.delivered(entry)}
        lost = delivered - stream.pending.keys()
        assert not lost, f"I5 {name}: nobody will ever read or drop {sorted(lost)}"
        # Redis may lose count, but must not count wrong.
        if stream.lag not in (None, LOST_COUNT):
            undelivered = len(stream.entries) - len(delivered)
            assert stream.lag == undelivered, f"lag of {name}: {stream.lag}, true {undelivered}"


def check_lag_is_known(snapshot: Snapshot) -> None:
    """After maintenance, Redis can tell how much is waiting; or the first that waits has the very
    next id after a deleted one, where Redis cannot be told."""
    for name, stream in snapshot.ready.items():
        if stream.lag == LOST_COUNT:
            waiting = stream.entries.keys() - stream.pending.keys()
            assert waiting, f"lag of {name} is unknown, though nothing waits"
            first = min(map(entry_order, waiting))
            ms, seq = entry_order(stream.last_delivered)
            assert first == (ms, seq + 1), f"lag of {name} is unknown"
            assert stream.last_delivered not in stream.entries, f"lag of {name} is unknown"


def _check_counters(snapshot: Snapshot) -> None:
    waiting = [record for record in snapshot.records.values() if record["state"] in WAITING]
    leased = [record for record in snapshot.records.values() if record["state"] == "leased"]
    expected = {f"t:{tenant}": n for tenant, n in Counter(r["tenant"] for r in waiting).items()}
    expected |= {f"l:{tenant}": n for tenant, n in Counter(r["tenant"] for r in leased).items()}
    for name, records in (("queued", waiting), ("leased", leased)):
        expected[name] = len(records)
        expected[f"{name}_tokens"] = sum(int(record["work"]) for record in records)
    delayed_tokens = sum(int(r["work"]) for r in waiting if r["state"] == "delayed")
    if delayed_tokens:
        expected["delayed_tokens"] = delayed_tokens
    actual = dict.fromkeys(("queued", "leased", "queued_tokens", "leased_tokens"), 0)
    actual |= snapshot.counters
    assert actual == expected, f"I6 counters {actual}, counted {expected}"


def _check_windows(snapshot: Snapshot, policy: QueuePolicy, before: Snapshot | None) -> None:
    windowed = _windowed(snapshot)
    counts = {share: len(members) for share, members in windowed.items()}
    assert snapshot.windows == counts, f"I6 windows {snapshot.windows}, {counts}"
    stood = _windowed(before) if before else {}
    for share, members in windowed.items():
        # A lowered weight leaves a window overfull, but then nothing enters it.
        entered = members - stood.get(share, set())
        if entered:
            size = _window_of(snapshot, policy, share)
            assert len(members) <= size, f"I6 {share} too full: {members}, {entered}"
            taken = len(members) + len(_leased_throughout(before, snapshot, share))
            assert taken <= _cap_of(snapshot, policy, share), f"I6 {share} over its cap: {taken}"
    for share, waiting in snapshot.backlogs.items():
        if any(_state(snapshot, request_id) == "held" for request_id in waiting):
            size, stands = _window_of(snapshot, policy, share), counts.get(share, 0)
            running = snapshot.counters.get(f"l:{share.partition(':')[2]}", 0)
            full = stands >= size or stands + running >= _cap_of(snapshot, policy, share)
            assert full, f"I6 {share} starves: {stands} ready, {running} running"


def _windowed(snapshot: Snapshot) -> dict[str, set[str]]:
    """By share, the requests in its window."""
    shares: dict[str, set[str]] = {}
    for request_id, record in snapshot.records.items():
        if record["windowed"] == "1":
            shares.setdefault(f"{record['class']}:{record['tenant']}", set()).add(request_id)
    return shares


def _window_of(snapshot: Snapshot, policy: QueuePolicy, share: str) -> int:
    return policy.window * snapshot.weights.get(share.partition(":")[2], 1)


def _cap_of(snapshot: Snapshot, policy: QueuePolicy, share: str) -> float:
    """How many may be ready in this class and running in any."""
    weight = snapshot.weights.get(share.partition(":")[2], 1)
    return policy.max_running_per_tenant * weight or math.inf


def _leased_throughout(before: Snapshot | None, now: Snapshot, share: str) -> set[str]:
    """Those of the tenant that ran before and after: so many were running whenever one entered."""
    same = (before.owners.items() if before else set()) & now.owners.items()
    tenant = share.partition(":")[2]
    return {name for name, _ in same if now.records.get(name, {}).get("tenant") == tenant}


def _state(snapshot: Snapshot, request_id: str) -> str | None:
    return snapshot.records.get(request_id, {}).get("state")


def _check_lifetimes(snapshot: Snapshot, keys: Keyspace, policy: QueuePolicy) -> None:
    for request_id, record in snapshot.records.items():
        longest = policy.retention_ms
        if record["state"] not in TERMINAL_STATES:
            start = int(record.get("not_before", record["created"]))
            longest += policy.deadline_ms + start - int(record["created"])
        elif record["state"] == "dead":
            longest = max(longest, policy.dead_letter_body_ms)
        for key in (keys.record(request_id), keys.log(request_id), keys.history(request_id)):
            ttl_ms = snapshot.ttl_ms.get(key, 1)  # a log may not exist yet
            assert 0 < ttl_ms <= longest, f"I8 {key}: lives for {ttl_ms} ms"
