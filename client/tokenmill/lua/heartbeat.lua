-- A worker renews its leases: XCLAIM JUSTID on its own entries resets their idle time.
--
-- KEYS[1]  <prefix>own
-- ARGV     worker, then (id, fence, ready class, entry) per request; at most 512
-- Reply    per request the number of events in its log, or -1: the lease is lost
--
-- XCLAIM takes an entry from anybody, so a late heartbeat would steal it back from the next
-- worker: the fence is checked first. No command here is refused at maxmemory (none of them
-- grows), so leases outlive a full Redis. The log length shows the holder a log that lost its end.

local call, prefix = redis.call, string.sub(KEYS[1], 1, -4)
call('EXISTS', prefix .. 'moving')  -- refused while the slot moves, see common.lua
local CHUNK = 1000  -- Lua's stack bounds unpack
local claims, replies = {}, {}
for first = 2, #ARGV, 4 do
  local id, stream = ARGV[first], prefix .. 'q:' .. ARGV[first + 2]
  if call('HGET', KEYS[1], id) ~= ARGV[first + 1] then
    replies[#replies + 1] = -1
  else
    claims[stream] = claims[stream] or {}
    table.insert(claims[stream], ARGV[first + 3])
    replies[#replies + 1] = call('XLEN', prefix .. 't:' .. id)
  end
end
for stream, entries in pairs(claims) do
  for first = 1, #entries, CHUNK do
    local command = { 'XCLAIM', stream, 'tokenmill', ARGV[1], '0' }
    for i = first, math.min(first + CHUNK - 1, #entries) do command[#command + 1] = entries[i] end
    command[#command + 1] = 'JUSTID'
    call(unpack(command))
  end
end
return replies
