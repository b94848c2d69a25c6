-- A worker takes the requests whose ready entries it has just read with XREADGROUP.
--
-- ARGV  options{retention_ms, window, publish}, worker, fingerprint of its model,
--       then (ready class, entry, id) per entry
-- Reply one list per entry, in the order of the entries:
--       {OK, attempt, fence, events in the log, remaining_ms, waited_ms, strikes, tenant,
--        fingerprint, body, traceparent, tracestate}
--       {GONE}     unknown, ended or superseded: a tombstone, dropped here
--       {BUSY}     another worker holds it
--       {EXPIRED}  a deadline passed while it was queued; ended here
--       {PAUSED}   the queue is paused: it stands last in its class again
--
-- The attempt counts the request's leases; the fence, `<attempt>.<created_ms>`, names this one and
-- no other that ever was. It stands in the hash `own`, which every write of a worker is checked
-- against: whoever is not in there cannot write. The fingerprint in the reply is that of the first
-- worker that leased the request, for the resume policy of the present one. waited_ms counts from
-- when the request might be served; remaining_ms is what is left until its deadline.

local worker, fingerprint, paused = ARGV[2], ARGV[3], is_paused()

local function take(id, created, tenant, class, first, work)
  local record, events = record_key(id), redis.call('XLEN', log_key(id))
  local attempt = redis.call('HINCRBY', record, 'attempts', 1)
  redis.call('HSET', record, 'state', 'leased', 'worker', worker, 'leased', int(now_ms()),
    'fingerprint', first, 'events_at_lease', events)
  redis.call('HSET', OWNERS, id, fence_of(attempt, created))
  note(id, 'leased', { a = attempt, w = worker, e = events })
  uncount_queued(tenant, work)
  count_running(tenant, work)
  leave_window(id, class, tenant)
  return attempt
end

local function lease(ready, entry, id)
  local state, current, at, owner, attempts, created, deadline, queue, first_token, not_before,
    strikes, tenant, class, first, work, body, traceparent, tracestate = read_record(id,
    'state', 'entry', 'ready', 'worker', 'attempts', 'created', 'deadline', 'queue_deadline',
    'first_token_deadline', 'not_before', 'strikes', 'tenant', 'class', 'fingerprint', 'work',
    'body', 'traceparent', 'tracestate')
  if not state or current ~= entry or at ~= ready then
    drop_read_entry(ready, entry)
    return { 'GONE' }
  end
  local time, attempt = now_ms(), tonumber(attempts)
  if state == 'queued' then
    local due, message = next_deadline(id, deadline, queue, first_token, attempts)
    if due <= time then
      settle(id, 'expired', 'deadline_exceeded', message)
      return { 'EXPIRED' }
    end
    if paused then
      drop_read_entry(ready, entry)
      push(id, ready)
      return { 'PAUSED' }
    end
    first = first or fingerprint
    attempt = take(id, created, tenant, class, first, work)
  elseif owner ~= worker or redis.call('HGET', OWNERS, id) ~= fence_of(attempts, created) then
    return { 'BUSY' }
  end
  -- Reached also by the holder itself, whose first reply was lost: it gets the same fence.
  return { 'OK', attempt, fence_of(attempt, created), redis.call('XLEN', log_key(id)),
    tonumber(deadline) - time, time - tonumber(not_before or created), tonumber(strikes), tenant,
    first, body, traceparent or '', tracestate or '' }
end

local replies = {}
for first = 4, #ARGV, 3 do
  replies[#replies + 1] = lease(ARGV[first], ARGV[first + 1], ARGV[first + 2])
end
return replies
