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

local call, owners = redis.call, KEYS[1]
local prefix = string.sub(owners, 1, -4)
local log_prefix, channel_prefix, publish = prefix .. 't:', prefix .. 'c:', ARGV[1]
local ids, codes = {}, {}
for first = 2, #ARGV, 4 do ids[#ids + 1] = ARGV[first] end
if #ids == 0 then return codes end
local fences = call('HMGET', owners, unpack(ids))
for i, id in ipairs(ids) do
  local at = 4 * i - 2
  if fences[i] ~= ARGV[at + 1] then
    codes[i] = -1
  else
    local log, seq = log_prefix .. id, tonumber(ARGV[at + 2])
    local stored = call('XLEN', log)
    if stored >= seq then
      codes[i] = 0
    elseif stored < seq - 1 then
      codes[i] = -2 - stored
    else
      call('XADD', log, ARGV[at + 2] .. '-0', 'd', ARGV[at + 3])
      -- The log is born with the lifetime of its record; the end shortens both.
      if seq == 1 then call('PEXPIRE', log, call('PTTL', prefix .. 'r:' .. id)) end
      call(publish, channel_prefix .. id, ARGV[at + 3])
      codes[i] = 1
    end
  end
end
return codes
