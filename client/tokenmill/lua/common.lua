-- Shared prelude, put in front of every script except the two hot ones (append, heartbeat).
--
-- KEYS[1]  <prefix>own. It routes the call in a cluster; every other key follows from its prefix
--          and lies in the same slot, because the prefix holds the hash tag.
-- ARGV[1]  the script's options, a JSON object. Named, so that an option can be added without
--          moving the arguments of older callers.
--
-- Rules all scripts follow. A script is atomic but is not rolled back: check first, write last.
-- Time is Redis' own. Every call may be repeated after a lost reply. Only commands of Redis 6.2.

local GROUP = 'tokenmill'
local TERMINAL = { done = true, failed = true, cancelled = true, expired = true, dead = true }
-- Beyond this many entries in a ready stream, memory matters more than an exact consumer lag.
local LONG_STREAM = 20000

local prefix = string.sub(KEYS[1], 1, -4)
local options = cjson.decode(ARGV[1])

local OWNERS = KEYS[1]
local DEADLINES = prefix .. 'z:dl'
local DELAYED = prefix .. 'z:delay'
local COUNTERS = prefix .. 'cnt'
local WINDOWS = prefix .. 'win'
local MAINTENANCE = prefix .. 'mt'
local DEAD_LETTERS = prefix .. 'dlq'
local MEMORY_FLAG = prefix .. 'full'

local function record_key(id) return prefix .. 'r:' .. id end
local function log_key(id) return prefix .. 't:' .. id end
local function ready_key(ready) return prefix .. 'q:' .. ready end
local function backlog_key(share) return prefix .. 'b:' .. share end
-- What the holder of a lease is told and every write of a worker is checked against. The count alone
-- begins anew when an id is created again; with the time of creation no two leases are alike.
local function fence_of(attempt, created) return attempt .. '.' .. created end
-- A share is what one tenant may have in one class: the unit of the window.
local function share_of(class, tenant) return class .. ':' .. tenant end

-- Lua prints large numbers as 1.7e+12; Redis wants digits.
local function int(number) return string.format('%.0f', number) end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Log and publication in one step: a subscriber who missed the message finds it in the log.
local function emit(id, seq, payload)
  redis.call('XADD', log_key(id), int(seq) .. '-0', 'd', payload)
  redis.call(options.publish, prefix .. 'c:' .. id, payload)
end

-- The caller has read the entry, so it is deleted together with its acknowledgement.
local function drop_read_entry(ready, entry)
  redis.call('XACK', ready_key(ready), GROUP, entry)
  redis.call('XDEL', ready_key(ready), entry)
end

-- Detach the entry of a queued record. One that nobody has read yet stays as a tombstone, which its reader
-- drops: XDEL of an undelivered entry makes the stream's `lag`, the autoscaler's signal, wrong.
local function drop_entry(ready, entry)
  if entry == '' then return end  -- held or delayed: there is none
  local stream = ready_key(ready)
  if redis.call('XACK', stream, GROUP, entry) == 1
      or redis.call('XLEN', stream) > LONG_STREAM then
    redis.call('XDEL', stream, entry)
  end
end

local function push(id, ready)
  local entry = redis.call('XADD', ready_key(ready), '*', 'id', id)
  redis.call('HSET', record_key(id), 'state', 'queued', 'ready', ready, 'entry', entry)
end

local function enter_window(id, share)
  redis.call('HINCRBY', WINDOWS, share, 1)
  redis.call('HSET', record_key(id), 'windowed', '1')
end

-- A place in the share's window is free: let its next waiting request into the ready stream.
local function feed(class, tenant)
  local share = share_of(class, tenant)
  while true do
    local id = redis.call('LPOP', backlog_key(share))
    if not id then return end
    -- Whoever was cancelled or has expired while waiting is still in the list: skip it.
    if redis.call('HGET', record_key(id), 'state') == 'held' then
      enter_window(id, share)
      push(id, class)
      return
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

local function count_queued(tenant)
  redis.call('HINCRBY', COUNTERS, 'queued', 1)
  redis.call('HINCRBY', COUNTERS, 't:' .. tenant, 1)
end

local function uncount_queued(tenant)
  redis.call('HINCRBY', COUNTERS, 'queued', -1)
  local field = 't:' .. tenant
  if redis.call('HINCRBY', COUNTERS, field, -1) <= 0 then redis.call('HDEL', COUNTERS, field) end
end

-- Birth of a record. It has its lifetime from the first moment; returns the creation time.
-- The id may have been used before: a record can run out of its lifetime, or get lost, while a worker
-- holds it. Nothing of that may touch the new request, and what it counted for is counted again.
local function create(id, tenant, class, body, sha, state, entry)
  local created = now_ms()
  local deadline = created + options.deadline_ms
  redis.call('HSET', record_key(id),
    'v', '1', 'state', state, 'tenant', tenant, 'class', class, 'sha', sha, 'body', body,
    'created', int(created), 'deadline', int(deadline), 'attempts', '0', 'strikes', '0',
    'retries', '0', 'undelivered', '0', 'windowed', '0', 'ready', class, 'entry', entry)
  redis.call('PEXPIREAT', record_key(id), int(deadline + options.retention_ms))
  redis.call('DEL', log_key(id))
  redis.call('HDEL', OWNERS, id)
  redis.call('ZREM', DELAYED, id)
  if redis.call('ZADD', DEADLINES, int(deadline), id) == 0 then
    redis.call('HSET', MAINTENANCE, 'recount', '1')
  end
  count_queued(tenant)
  return created
end

-- What every end has in common, whoever decides it. `fields` is a flat list of record fields.
local function close(id, state, seq, payload, fields)
  local record = record_key(id)
  local was, tenant, class, ready, entry = unpack(
    redis.call('HMGET', record, 'state', 'tenant', 'class', 'ready', 'entry'), 1, 5)
  -- First the lease: at maxmemory Redis refuses growing commands only until a script's first
  -- write, so this order lets a request end, and free its memory, when Redis is full.
  redis.call('HDEL', OWNERS, id)
  emit(id, seq, payload)
  redis.call('HSET', record, 'state', state, 'end_seq', int(seq), 'ended', int(now_ms()),
    'entry', '', unpack(fields))
  redis.call('HDEL', record, 'body')
  redis.call('ZREM', DELAYED, id)
  redis.call('ZREM', DEADLINES, id)
  if was == 'leased' then
    drop_read_entry(ready, entry)
    redis.call('HINCRBY', COUNTERS, 'leased', -1)
  else
    drop_entry(ready, entry)
    uncount_queued(tenant)
  end
  leave_window(id, class, tenant)
  redis.call('PEXPIRE', record, int(options.retention_ms))
  redis.call('PEXPIRE', log_key(id), int(options.retention_ms))
end

-- A terminal transition decided by Redis itself (cancel, deadline, given up), so that a dead or
-- hung worker can never leave a request without its end event. Returns the state it is in now
-- (false: no such request) and whether this call made it.
local function settle(id, state, code, message)
  local was, attempts = unpack(redis.call('HMGET', record_key(id), 'state', 'attempts'), 1, 2)
  if not was or TERMINAL[was] then return was, false end
  local seq = redis.call('XLEN', log_key(id)) + 1
  local payload = cjson.encode({
    e = seq, ev = 'end', a = tonumber(attempts), st = state, code = code, msg = message })
  close(id, state, seq, payload, { 'code', code, 'message', message })
  return state, true
end

-- leased -> queued or, with a due time in the future, delayed. The old fence dies here.
local function requeue(id, due_ms)
  local tenant, ready, entry = unpack(
    redis.call('HMGET', record_key(id), 'tenant', 'ready', 'entry'), 1, 3)
  redis.call('HDEL', OWNERS, id)
  drop_read_entry(ready, entry)
  redis.call('HINCRBY', COUNTERS, 'leased', -1)
  count_queued(tenant)
  if due_ms > now_ms() then
    redis.call('HSET', record_key(id), 'state', 'delayed', 'entry', '')
    redis.call('ZADD', DELAYED, int(due_ms), id)
  else
    push(id, 'r')
  end
end
