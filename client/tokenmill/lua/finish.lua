-- The holder of the lease ends a request.
--
-- ARGV  options{retention_ms, window, publish}, id, fence, seq, state (done|failed), payload of the
--       end event, usage (JSON), code, message (both empty when done), facts (JSON or empty)
-- Reply {OK, state}, {DUP, state} this lease has ended it before, {LOST, state or ''},
--       {BEHIND, n} the log holds n events instead of seq-1: append the missing ones first

local id, fence, seq, state = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
if state ~= 'done' and state ~= 'failed' then
  return redis.error_reply('ERR state must be done or failed')
end
if redis.call('HGET', OWNERS, id) ~= fence then
  local was, attempts, created = read_record(id, 'state', 'attempts', 'created')
  if was and TERMINAL[was] and fence_of(attempts, created) == fence then return { 'DUP', was } end
  return { 'LOST', was or '' }
end
local stored = redis.call('XLEN', log_key(id))
if stored ~= seq - 1 then return { 'BEHIND', stored } end
local ending = { state = state, seq = seq, payload = ARGV[6], usage = ARGV[7],
  facts = parse_facts(ARGV[10]) }
if state == 'failed' then ending.code, ending.message = ARGV[8], ARGV[9] end
close(id, ending)
return { 'OK', state }
