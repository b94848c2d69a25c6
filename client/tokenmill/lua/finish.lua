-- The holder of the lease ends a request.
--
-- ARGV  options{retention_ms, publish}, id, fence, seq, state (done|failed), payload of the end
--       event, usage (JSON), code, message (both empty when done)
-- Reply {OK, state}, {DUP, state} this lease has ended it before, {LOST, state or ''},
--       {BEHIND, n} the log holds n events instead of seq-1: append the missing ones first

local id, fence, seq, state, payload = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]
if state ~= 'done' and state ~= 'failed' then
  return redis.error_reply('ERR state must be done or failed')
end
if redis.call('HGET', OWNERS, id) ~= fence then
  local was, attempts, created = unpack(
    redis.call('HMGET', record_key(id), 'state', 'attempts', 'created'), 1, 3)
  if was and TERMINAL[was] and fence_of(attempts, created) == fence then return { 'DUP', was } end
  return { 'LOST', was or '' }
end
local stored = redis.call('XLEN', log_key(id))
if stored ~= seq - 1 then return { 'BEHIND', stored } end
local fields = { 'usage', ARGV[7] }
if state == 'failed' then fields = { 'usage', ARGV[7], 'code', ARGV[8], 'message', ARGV[9] } end
close(id, state, seq, payload, fields)
return { 'OK', state }
