-- The holder gives a request back: `drain` and `no_room` hand it over to another worker at once and
-- are no attempts, `error` asks for another try.
--
-- ARGV  options{retention_ms, max_retries, window, publish}, id, fence, drain|no_room|error,
--       delay_ms, message, facts (JSON or empty)
-- Reply {OK, state}      back in the queue (class r, before all new work) or delayed
--       {FAILED, failed} no retry left; ended here
--       {LOST, ''}       not the holder (any more): also the answer to a repeated call

local id, fence, reason, delay_ms, message = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
if reason ~= 'drain' and reason ~= 'no_room' and reason ~= 'error' then
  return redis.error_reply('ERR reason must be drain, no_room or error')
end
if redis.call('HGET', OWNERS, id) ~= fence then return { 'LOST', '' } end
local facts, due = parse_facts(ARGV[7]), now_ms() + delay_ms
if reason == 'error' then
  local retries = tonumber(redis.call('HGET', record_key(id), 'retries')) + 1
  if retries > options.max_retries then
    settle(id, 'failed', 'retries_exhausted', message, facts)
    return { 'FAILED', 'failed' }
  end
  redis.call('HSET', record_key(id), 'retries', retries)
  note(id, 'retried', { retries = retries, due = due, facts = facts })
else
  redis.call('HINCRBY', record_key(id), 'handovers', 1)
  note(id, 'handed_over', { why = reason, facts = facts })
end
requeue(id, due)
return { 'OK', redis.call('HGET', record_key(id), 'state') }
