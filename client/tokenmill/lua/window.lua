-- Shared prelude, part 2 of 3: how a request gets into a ready stream.
--
-- A class stream holds at most `window` entries of one tenant and class, times the tenant's weight;
-- the rest waits in that tenant's own list. FIFO over such windows is close to round robin and needs
-- no scheduler. It orders what waits, but frees no place that a tenant has: with a cap above 0
-- (times the weight, too), what a tenant has running counts as well. Exempt from both is what was
-- tried before, and plain XADDs. The cap is the workers': they note it at each tick.

-- Further record fields and values may follow.
local function push(id, ready, ...)
  local entry = redis.call('XADD', ready_key(ready), '*', 'id', id)
  redis.call('HSET', record_key(id), 'state', 'queued', 'ready', ready, 'entry', entry, ...)
  note(id, 'queued', { q = ready })
end

local function cap_on_running()
  return tonumber(redis.call('HGET', MAINTENANCE, 'max_running_per_tenant') or '0')
end

local function room_in_window(share, tenant)
  local weight = tonumber(redis.call('HGET', WEIGHTS, tenant) or '1')
  local waiting = tonumber(redis.call('HGET', WINDOWS, share) or '0')
  local most, cap = options.window * weight, cap_on_running()
  if cap > 0 then
    local running = tonumber(redis.call('HGET', COUNTERS, 'l:' .. tenant) or '0')
    most = math.min(most, cap * weight - running)
  end
  return most - waiting
end

local function push_windowed(id, class, share)
  redis.call('HINCRBY', WINDOWS, share, 1)
  push(id, class, 'windowed', '1')
end

-- New work: into the ready stream, or `held` until the tenant's window has room.
local function enter(id, class, tenant)
  local share = share_of(class, tenant)
  if room_in_window(share, tenant) > 0 then
    push_windowed(id, class, share)
    return 'queued'
  end
  redis.call('RPUSH', backlog_key(share), id)
  redis.call('HSET', record_key(id), 'state', 'held')
  note(id, 'held')
  return 'held'
end

-- Fill the window of a share from its backlog. That is one request when one has left the window,
-- more after the tenant's weight was raised, none while a lowered weight leaves it overfull.
local function feed(class, tenant)
  local share = share_of(class, tenant)
  local room = room_in_window(share, tenant)
  while room > 0 do
    local id = redis.call('LPOP', backlog_key(share))
    if not id then return end
    -- Whoever was cancelled or has expired while waiting is still in the list: skip it.
    if redis.call('HGET', record_key(id), 'state') == 'held' then
      push_windowed(id, class, share)
      room = room - 1
    end
  end
end

local function leave_window(id, class, tenant)
  if redis.call('HGET', record_key(id), 'windowed') ~= '1' then return end
  redis.call('HSET', record_key(id), 'windowed', '0')
  local share = share_of(class, tenant)
  if redis.call('HINCRBY', WINDOWS, share, -1) <= 0 then redis.call('HDEL', WINDOWS, share) end
  feed(class, tenant)
end

-- How many there are in all, of this tenant, and how many tokens they will take at most: `work` is
-- the record's field, an estimate made at the enqueue. The tokens are the autoscaler's signal.
local function add_to(total, of_tenant, number, work)
  redis.call('HINCRBY', COUNTERS, total, number)
  local tokens = tonumber(work or '0')
  if tokens > 0 then redis.call('HINCRBY', COUNTERS, total .. '_tokens', int(number * tokens)) end
  if redis.call('HINCRBY', COUNTERS, of_tenant, number) <= 0 then
    redis.call('HDEL', COUNTERS, of_tenant)
  end
end

-- What is delayed counts as queued, but its tokens are no work yet: nobody may start it before its
-- time. Where there are none, there is no field. Whether an id stands in DELAYED tells whether it
-- was counted, so that nothing is counted twice.
local function add_delayed_tokens(tokens)
  if tokens == 0 then return end
  if redis.call('HINCRBY', COUNTERS, 'delayed_tokens', int(tokens)) <= 0 then
    redis.call('HDEL', COUNTERS, 'delayed_tokens')
  end
end
local function delay(id, due_ms, work)
  redis.call('HSET', record_key(id), 'state', 'delayed', 'entry', '')
  if redis.call('ZADD', DELAYED, int(due_ms), id) == 1 then
    add_delayed_tokens(tonumber(work or '0'))
  end
end
local function undelay(id, work)
  if redis.call('ZREM', DELAYED, id) == 1 then add_delayed_tokens(-tonumber(work or '0')) end
end

-- Held, queued and delayed requests all count as queued.
local function count_queued(tenant, work) add_to('queued', 't:' .. tenant, 1, work) end
local function uncount_queued(tenant, work) add_to('queued', 't:' .. tenant, -1, work) end
local function count_running(tenant, work) add_to('leased', 'l:' .. tenant, 1, work) end

-- A place of the tenant's is free: for its most urgent work first.
local function uncount_running(tenant, work)
  add_to('leased', 'l:' .. tenant, -1, work)
  if cap_on_running() > 0 then
    for _, class in ipairs({ '0', '1', '2' }) do feed(class, tenant) end
  end
end
