-- A tenant's weight: so many times the window of others. More room is used at once; with less, the
-- tenant's next requests wait until its window has emptied so far.
--
-- ARGV  options{window, publish}, tenant, weight (1..100)
-- Reply the weight it had

local tenant, weight = ARGV[2], tonumber(ARGV[3])
if not weight or weight < 1 or weight > 100 or weight ~= math.floor(weight) then
  return redis.error_reply('ERR weight must be a whole number from 1 to 100')
end
local before = tonumber(redis.call('HGET', WEIGHTS, tenant) or '1')
if weight == 1 then
  redis.call('HDEL', WEIGHTS, tenant)
else
  redis.call('HSET', WEIGHTS, tenant, int(weight))
end
for _, class in ipairs({ '0', '1', '2' }) do feed(class, tenant) end
return before
