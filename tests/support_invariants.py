"""The invariants of the queue (I1 … I11), checked on a snapshot of the whole keyspace.

They are written from the protocol, not from the scripts. Each raises AssertionError with the
number of the invariant and ids, states and counts.
"""

from __future__ import annotations

from collections import Counter

from support_snapshot import LOST_COUNT, Snapshot, entry_order
from tokenmill.calls import QueuePolicy
from tokenmill.keys import Keyspace
from tokenmill.protocol import TERMINAL_STATES, EndEvent, StartEvent, TokenEvent

WAITING = {"held", "queued", "delayed"}
EVENT_MODELS = {"start": StartEvent, "token": TokenEvent, "end": EndEvent}


def check_invariants(snapshot: Snapshot, keys: Keyspace, policy: QueuePolicy) -> None:
    assert not snapshot.unknown, f"keys that the key table does not know: {snapshot.unknown}"
    for request_id in snapshot.logs:
        assert request_id in snapshot.records, f"I8 a log without a record: {request_id}"
    for request_id, record in snapshot.records.items():
        _check_log(snapshot, request_id, record)
        _check_place(snapshot, request_id, record)
        _check_body(request_id, record)
    _check_owners(snapshot)
    _check_ready_streams(snapshot)
    _check_counters(snapshot)
    _check_windows(snapshot, policy)
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
    deadline = snapshot.deadlines.get(request_id)
    if state in TERMINAL_STATES:
        assert deadline is None, f"I5 {request_id} {state}: still has a deadline"
    else:
        assert deadline == float(record["deadline"]), f"I5 {request_id} {state}: {deadline}"
    if state == "held":
        assert request_id in snapshot.backlogs.get(share, []), f"I5 {request_id}: lost from backlog"
    # The window counts what stands in the ready stream and has not been taken.
    assert record["windowed"] == "0" or state == "queued", f"I6 {request_id} {state}: windowed"
    if state in ("queued", "leased"):
        assert entry in stream.entries, f"I5 {request_id} {state}: no ready entry"
        assert stream.entries[entry]["id"] == request_id, f"I5 {request_id}: wrong entry"
    else:
        assert entry == "", f"I5 {request_id} {state}: points to an entry"
    if state == "leased":
        assert entry in stream.pending, f"I5 {request_id}: leased, but not pending"


def _check_body(request_id: str, record: dict[str, str]) -> None:
    terminal = record["state"] in TERMINAL_STATES
    assert ("body" in record) != terminal, f"I11 {request_id} {record['state']}: body"


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
            first = min(map(entry_order, stream.entries.keys() - stream.pending.keys()))
            ms, seq = entry_order(stream.last_delivered)
            assert first == (ms, seq + 1), f"lag of {name} is unknown"
            assert stream.last_delivered not in stream.entries, f"lag of {name} is unknown"


def _check_counters(snapshot: Snapshot) -> None:
    states = Counter(record["state"] for record in snapshot.records.values())
    waiting = [record for record in snapshot.records.values() if record["state"] in WAITING]
    expected = {f"t:{tenant}": n for tenant, n in Counter(r["tenant"] for r in waiting).items()}
    expected |= {"queued": len(waiting), "leased": states["leased"]}
    actual = {"queued": 0, "leased": 0} | snapshot.counters
    assert actual == expected, f"I6 counters {actual}, counted {expected}"


def _check_windows(snapshot: Snapshot, policy: QueuePolicy) -> None:
    windowed = Counter(
        f"{record['class']}:{record['tenant']}"
        for record in snapshot.records.values()
        if record["windowed"] == "1"
    )
    assert snapshot.windows == dict(windowed), f"I6 windows {snapshot.windows}, {windowed}"
    assert all(n <= policy.window for n in windowed.values()), f"I6 window too full: {windowed}"
    for share, waiting in snapshot.backlogs.items():
        if any(_state(snapshot, request_id) == "held" for request_id in waiting):
            assert windowed[share] == policy.window, f"I6 {share} starves: {windowed[share]}"


def _state(snapshot: Snapshot, request_id: str) -> str | None:
    return snapshot.records.get(request_id, {}).get("state")


def _check_lifetimes(snapshot: Snapshot, keys: Keyspace, policy: QueuePolicy) -> None:
    for request_id, record in snapshot.records.items():
        longest = policy.retention_ms
        if record["state"] not in TERMINAL_STATES:
            longest += policy.deadline_ms
        for key in (keys.record(request_id), keys.log(request_id)):
            ttl_ms = snapshot.ttl_ms.get(key, 1)  # a log may not exist yet
            assert 0 < ttl_ms <= longest, f"I8 {key}: lives for {ttl_ms} ms"
