-- A worker takes the requests whose ready entries it has just read with XREADGROUP.
--
-- ARGV  options{retention_ms, publish}, worker, fingerprint of its model,
--       then (ready class, entry, id) per entry
-- Reply one list per entry, in the order of the entries:
--       {OK, attempt, fence, events in the log, remaining_ms, waited_ms, strikes, tenant,
--        fingerprint, body}
--       {GONE}     unknown, ended or superseded: a tombstone, dropped here
--       {BUSY}     another worker holds it
--       {EXPIRED}  its deadline passed while it was queued; ended here
--
-- The attempt counts the request's leases; the fence, `<attempt>.<created_ms>`, names this one and no
-- other that ever was. It stands in the hash `own`, which every write of a worker is checked
-- against: whoever is not in there cannot write. The fingerprint in the reply is that of the first
-- worker that leased the request, for the resume policy of the present one.

local worker, fingerprint = ARGV[2], ARGV[3]

local function lease(ready, entry, id)
  local record = record_key(id)
  local state, current, at, owner, attempt, deadline, created, strikes, tenant, class, first, body =
    unpack(redis.call('HMGET', record, 'state', 'entry', 'ready', 'worker', 'attempts', 'deadline',
      'created', 'strikes', 'tenant', 'class', 'fingerprint', 'body'), 1, 12)
  if not state or current ~= entry or at ~= ready then
    drop_read_entry(ready, entry)
    return { 'GONE' }
  end
  local time = now_ms()
  local remaining = tonumber(deadline) - time
  if state == 'queued' then
    if remaining <= 0 then
      settle(id, 'expired', 'deadline_exceeded', 'the deadline passed while queued')
      return { 'EXPIRED' }
    end
    attempt = redis.call('HINCRBY', record, 'attempts', 1)
    first = first or fingerprint
    redis.call('HSET', record, 'state', 'leased', 'worker', worker, 'leased', int(time),
      'fingerprint', first, 'events_at_lease', redis.call('XLEN', log_key(id)))
    redis.call('HSET', OWNERS, id, fence_of(attempt, created))
    uncount_queued(tenant)
    redis.call('HINCRBY', COUNTERS, 'leased', 1)
    leave_window(id, class, tenant)
  elseif owner ~= worker or redis.call('HGET', OWNERS, id) ~= fence_of(attempt, created) then
    return { 'BUSY' }
  end
  -- Reached also by the holder itself, whose first reply was lost: it gets the same fence.
  return { 'OK', tonumber(attempt), fence_of(attempt, created), redis.call('XLEN', log_key(id)),
    remaining, time - tonumber(created), tonumber(strikes), tenant, first, body }
end

local replies = {}
for first = 4, #ARGV, 3 do
  replies[#replies + 1] = lease(ARGV[first], ARGV[first + 1], ARGV[first + 2])
end
return replies
