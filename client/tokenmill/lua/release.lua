-- The holder gives a request back: `drain` hands it over at once, `error` asks for another try.
--
-- ARGV  options{retention_ms, max_retries, publish}, id, fence, drain|error, delay_ms, message
-- Reply {OK, state}      back in the queue (class r, before all new work) or delayed
--       {FAILED, failed} no retry left; ended here
--       {LOST, ''}       not the holder (any more): also the answer to a repeated call

local id, fence, reason, delay_ms, message = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
if redis.call('HGET', OWNERS, id) ~= fence then return { 'LOST', '' } end
if reason == 'error' then
  local retries = tonumber(redis.call('HGET', record_key(id), 'retries')) + 1
  if retries > options.max_retries then
    settle(id, 'failed', 'retries_exhausted', message)
    return { 'FAILED', 'failed' }
  end
  redis.call('HSET', record_key(id), 'retries', retries)
end
requeue(id, now_ms() + delay_ms)
return { 'OK', redis.call('HGET', record_key(id), 'state') }
