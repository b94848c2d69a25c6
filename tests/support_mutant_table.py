"""The known bugs: name → (script, text, its wrong replacement), one or several edits each."""

from __future__ import annotations

Edit = tuple[str, str, str]

MUTANTS: dict[str, tuple[Edit, ...]] = {
    "append without the fence": (("append", "if fences[i] ~= argv[at + 1] then", "if false then"),),
    "append without the dense number": (
        ("append", "elseif stored < number - 1 then", "elseif false then"),
    ),
    "append that is not idempotent": (("append", "if stored >= number then", "if false then"),),
    "append that does not publish": (
        ("append", "call(publish, channel_prefix .. id, payload)", ""),
    ),
    "a log that lives for ever": (("append", "if number == 1 then", "if false then"),),
    "heartbeat without the fence": (
        ("heartbeat", "if call('HGET', KEYS[1], id) ~= ARGV[first + 1] then", "if false then"),
    ),
    "append and heartbeat without the fence": (
        ("append", "if fences[i] ~= argv[at + 1] then", "if false then"),
        ("heartbeat", "if call('HGET', KEYS[1], id) ~= ARGV[first + 1] then", "if false then"),
    ),
    "finish without the fence": (
        ("finish", "if redis.call('HGET', OWNERS, id) ~= fence then", "if false then"),
    ),
    "finish over a gap": (("finish", "if stored ~= seq - 1 then", "if false then"),),
    "release without the fence": (
        ("release", "if redis.call('HGET', OWNERS, id) ~= fence then", "if false then"),
    ),
    "a lease taken from its holder": (("lease", "elseif owner ~= worker or", "elseif"),),
    "a lease that keeps its place in the window": (
        ("lease", "  leave_window(id, class, tenant)\n  return attempt", "  return attempt"),
    ),
    "a superseded entry is leased": (
        ("lease", "if not state or current ~= entry or at ~= ready then", "if not state then"),
    ),
    "enqueue that forgets the other content": (
        ("enqueue", "known_sha == sha and 'DUP' or 'CONFLICT'", "'DUP'"),
    ),
    "enqueue over the window": (
        (
            "enqueue",
            "if room_in_window(share, tenant) > 0 then",
            "if room_in_window(share, tenant) >= 0 then",
        ),
    ),
    "the body stays after the end": (("cancel", "redis.call('HDEL', record, 'body')", ""),),
    "the end leaves its deadline": (("cancel", "redis.call('ZREM', DEADLINES, id)", ""),),
    "an undelivered entry is deleted": (
        (
            "cancel",
            "if redis.call('XACK', stream, GROUP, entry) == 1",
            "if redis.call('XACK', stream, GROUP, entry) >= 0",
        ),
    ),
    "an ended request ends again": (
        ("cancel", "if not was or TERMINAL[was] then", "if not was then"),
    ),
    "admit that drops what it refuses in silence": (
        ("admit", "settle(id, 'failed', code, message)", ""),
    ),
    "tick without outage grace": (
        ("tick", "reap_after = time + options.lease_ms", "reap_after = 0"),
    ),
    "tick that drops plain entries": (
        (
            "tick",
            "      redeliver_plain(ready, entry, consumer, fields)",
            "      drop_read_entry(ready, entry)",
        ),
    ),
    "tick that forgets who vanished": (
        ("tick", "  redis.call('HSET', MAINTENANCE, 'recount', '1')\n  count", "  count"),
    ),
    "tick that leaves the lag unknown": (
        ("tick", "do repair_lag(ready) end", "do local _ = ready end"),
    ),
    "a fence that counts leases only": (
        ("lease", "return attempt .. '.' .. created", "return attempt .. '.0'"),
        ("finish", "return attempt .. '.' .. created", "return attempt .. '.0'"),
    ),
    "enqueue that leaves the lease of a lost record": (
        (
            "enqueue",
            "  redis.call('HDEL', OWNERS, id)\n  redis.call('ZREM', DELAYED, id)\n  if",
            "  redis.call('ZREM', DELAYED, id)\n  if",
        ),
    ),
    "enqueue that leaves the log of a lost record": (
        ("enqueue", "  redis.call('DEL', log_key(id), history_key(id))\n", ""),
    ),
    "enqueue that forgets what a lost record counted for": (
        ("enqueue", "redis.call('HSET', MAINTENANCE, 'recount', '1')", ""),
    ),
    "requeue that keeps the old fence": (
        ("tick", "redis.call('HDEL', OWNERS, id)\n  drop_read_entry", "drop_read_entry"),
    ),
    # The rules of hand-overs, delays, deadlines, weights, dead letters and histories
    "a hand-over that counts as an attempt": (("tick", " - tonumber(record.handovers)", ""),),
    "a hand-over that is not counted": (
        ("release", "  redis.call('HINCRBY', record_key(id), 'handovers', 1)\n", ""),
    ),
    "a delayed request that overtakes all new work": (
        (
            "tick",
            "if attempts == '0' then enter(id, class, tenant) else push(id, 'r') end",
            "push(id, 'r')",
        ),
    ),
    "a delayed request that is served at once": (
        ("enqueue", "if (options.delay_ms or 0) <= 0 then return", "do return"),
    ),
    "a delayed request whose work counts before and after its time": (
        ("tick", "    undelay(id, work)\n    if", "    redis.call('ZREM', DELAYED, id)\n    if"),
    ),
    "an end that leaves the work of a delayed request": (
        ("cancel", "  undelay(id, work)\n", "  redis.call('ZREM', DELAYED, id)\n"),
    ),
    "a recount that forgets what is delayed": (
        ("tick", "  add_delayed_tokens(delayed_tokens)\n", ""),
    ),
    "a queue deadline after the first lease": (
        ("tick", "if queue and attempts == '0' and", "if queue and"),
    ),
    "a first-token deadline after the first token": (
        ("tick", " and not has_token(id, attempts) then", " then"),
    ),
    "a first-token deadline that nobody looks at": (
        ("enqueue", "      nearest = math.min(nearest, start + allowed_ms)\n", ""),
    ),
    "a lease after the queue deadline": (("lease", "  if due <= time then", "  if false then"),),
    "a weight that is ignored": (
        (
            "set_weight",
            "local most, cap = options.window * weight",
            "local most, cap = options.window",
        ),
    ),
    "a cap that is ignored": (
        (
            "enqueue",
            "    most = math.min(most, cap * weight - running)\n",
            "",
        ),
    ),
    "a free place that nobody may take": (
        (
            "finish",
            "  if cap_on_running() > 0 then\n    for",
            "  if false then\n    for",
        ),
    ),
    "a lease that its tenant does not count": (("lease", "  count_running(tenant, work)\n", ""),),
    "a raised weight that waits": (
        (
            "set_weight",
            "for _, class in ipairs({ '0', '1', '2' }) do feed(class, tenant) end\nreturn before",
            "return before",
        ),
    ),
    "a window that is filled up whatever its size": (
        (
            "lease",
            "local room = room_in_window(share, tenant)\n  while",
            "local room = 1\n  while",
        ),
    ),
    "a dead letter with the body": (
        (
            "tick",
            "'why', why, 'attempts', attempts, 'worker', worker)",
            "'why', why, 'attempts', attempts, 'worker', worker, 'body', 'its body')",
        ),
    ),
    "a dead request without its body": (
        (
            "tick",
            "if state == 'dead' and options.dead_letter_body_ms > 0 then",
            "if false then",
        ),
    ),
    "a dead request whose body nobody may keep": (
        ("tick", " and options.dead_letter_body_ms > 0 then", " then"),
    ),
    "another life that leaves its dead letter": (
        ("requeue_dead", "redis.call('XDEL', DEAD_LETTERS, letter)\n", ""),
    ),
    "another life with the end of the first": (
        (
            "requeue_dead",
            "'code', 'message', 'usage', 'ended', 'end_seq',",
            "'usage', 'ended',",
        ),
    ),
    "purge that leaves the request": (
        ("purge", "    redis.call('DEL', record_key(id), log_key(id), history_key(id))\n", ""),
    ),
    "a pause that leases": (("lease", "    if paused then\n", "    if false then\n"),),
    "a pause that loses what was read": (
        ("lease", "      push(id, ready)\n      return", "      return"),
    ),
    "a move that keeps the old window": (
        ("move", "  leave_window(id, class, tenant)\n  enter", "  enter"),
    ),
    "a move that stays in the old line": (
        ("move", "    redis.call('LREM', backlog_key(share_of(class, tenant)), 1, id)\n", ""),
    ),
    "a move that deletes an unread entry": (
        (
            "move",
            "drop_entry(ready, entry)\n  end\n  redis.call('HSET', record_key(id), 'class'",
            "drop_read_entry(ready, entry)\n  end\n  redis.call('HSET', record_key(id), 'class'",
        ),
    ),
    "a move of what runs": (
        ("move", "if state == 'leased' or TERMINAL[state] then", "if false then"),
    ),
    "a purge of what runs": (
        ("cancel_waiting", "delayed = true }", "delayed = true, leased = true }"),
    ),
    "a purge of everybody's": (
        ("cancel_waiting", "(options.tenant == '' or tenant == options.tenant)", "true"),
    ),
    "an end that is not in the history": (
        (
            "finish",
            "  note(id, 'ended', { st = state, code = ending.code, facts = ending.facts })\n",
            "",
        ),
    ),
    "a history that lives for ever": (
        (
            "enqueue",
            "  redis.call('PEXPIREAT', history_key(id), int(deadline + options.retention_ms))\n",
            "",
        ),
    ),
}
