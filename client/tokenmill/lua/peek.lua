-- How long the first requests that nobody has read have waited, for a worker that has room for some,
-- and whether it may take any.
--
-- ARGV  options{limit}
-- Reply per ready class, in the order r, 0, 1, 2, the ages in ms of its first `limit` undelivered
--       entries, oldest first; tombstones are counted, they are dropped when they are read.
--       Then 1 if the queue is paused, else 0
--
-- Reads only. The age is that of the entry: since the request entered its class, not its tenant's
-- list before that.

local limit = int(options.limit)
local time = now_ms()

local function ages_of(ready)
  local ages = {}
  local groups = redis.pcall('XINFO', 'GROUPS', ready_key(ready))
  if groups.err then return ages end  -- no such stream yet
  for _, group in ipairs(groups) do
    local fields = {}
    for i = 1, #group, 2 do fields[group[i]] = group[i + 1] end
    if fields.name == GROUP then
      local after = '(' .. fields['last-delivered-id']
      local waiting = redis.call('XRANGE', ready_key(ready), after, '+', 'COUNT', limit)
      for _, entry in ipairs(waiting) do
        -- A producer may choose the id of its entry, also one from the future.
        ages[#ages + 1] = math.max(0, time - tonumber(string.match(entry[1], '^%d+')))
      end
    end
  end
  return ages
end

return { ages_of('r'), ages_of('0'), ages_of('1'), ages_of('2'), is_paused() and 1 or 0 }
