-- Who shares the queue.
--
-- ARGV  options{publish}
-- Reply (tenant, weight, queued) of each tenant that has a weight other than 1 or waiting requests

local function hash(key)
  local flat, values = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do values[flat[i]] = tonumber(flat[i + 1]) end
  return values
end

local weights, queued, reply = hash(WEIGHTS), {}, {}
for field, count in pairs(hash(COUNTERS)) do
  local tenant = string.match(field, '^t:(.*)$')
  if tenant then queued[tenant] = count end
end
local function row(tenant)
  reply[#reply + 1] = tenant
  reply[#reply + 1] = weights[tenant] or 1
  reply[#reply + 1] = queued[tenant] or 0
end
for tenant in pairs(weights) do row(tenant) end
for tenant in pairs(queued) do
  if not weights[tenant] then row(tenant) end
end
return reply
