-- The hot path: one call per engine step stores and publishes the new event of every running
-- request. No prelude, no JSON: this runs for every token.
--
-- KEYS[1]  <prefix>own
-- ARGV     PUBLISH or SPUBLISH, then (id, fence, seq, payload) per event; send at most 128 events,
--          the server does nothing else meanwhile. One event per request and call.
-- Reply    one code per event: 1 stored; 0 stored before (a repeated call); -1 the lease is lost;
--          -2-n the log holds n events, fewer than seq-1: send event n+1 on, from memory
--
-- The dense number makes the call idempotent and shows a log that lost its end in a failover.

local call, argv, owners = redis.call, ARGV, KEYS[1]
local prefix = string.sub(owners, 1, -4)
local log_prefix, channel_prefix, publish = prefix .. 't:', prefix .. 'c:', argv[1]
local count, ids, codes = (#argv - 1) / 4, {}, {}
if count == 0 then return codes end
call('EXISTS', prefix .. 'moving')  -- refused while the slot moves, see common.lua
for i = 1, count do ids[i] = argv[4 * i - 2] end
local fences = call('HMGET', owners, unpack(ids))
for i = 1, count do
  local at = 4 * i - 2
  if fences[i] ~= argv[at + 1] then
    codes[i] = -1
  else
    local id, seq, payload = argv[at], argv[at + 2], argv[at + 3]
    local log, number = log_prefix .. id, tonumber(seq)
    local stored = call('XLEN', log)
    if stored >= number then
      codes[i] = 0
    elseif stored < number - 1 then
      codes[i] = -2 - stored
    else
      call('XADD', log, seq .. '-0', 'd', payload)
      -- The log is born with the lifetime of its record; the end shortens both.
      if number == 1 then call('PEXPIRE', log, call('PTTL', prefix .. 'r:' .. id)) end
      call(publish, channel_prefix .. id, payload)
      codes[i] = 1
    end
  end
end
return codes
