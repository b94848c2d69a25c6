-- Shared prelude, part 1 of 3: names, time, events, history. Put in front of every script except the
-- two hot ones (append, heartbeat).
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
local LONG_HISTORY = 100

local prefix = string.sub(KEYS[1], 1, -4)
local options = cjson.decode(ARGV[1])

-- No such key: while a cluster's slot moves to another node key by key, Redis refuses what is not
-- there (any more), so a script ends here instead of halfway.
redis.call('EXISTS', prefix .. 'moving')

local OWNERS = KEYS[1]
local DEADLINES = prefix .. 'z:dl'
local DELAYED = prefix .. 'z:delay'
local COUNTERS = prefix .. 'cnt'
local WINDOWS = prefix .. 'win'
local WEIGHTS = prefix .. 'weights'
local MAINTENANCE = prefix .. 'mt'
local DEAD_LETTERS = prefix .. 'dlq'
local MEMORY_FLAG = prefix .. 'full'
local PAUSE = prefix .. 'pause'

local function record_key(id) return prefix .. 'r:' .. id end
local function log_key(id) return prefix .. 't:' .. id end
local function history_key(id) return prefix .. 'h:' .. id end
local function ready_key(ready) return prefix .. 'q:' .. ready end
local function backlog_key(share) return prefix .. 'b:' .. share end
-- A share is what one tenant may have in one class: the unit of the window.
local function share_of(class, tenant) return class .. ':' .. tenant end
-- What the holder of a lease is told and every write of a worker is checked against. The count
-- alone begins anew when an id is created again; with the time of creation no two leases are alike.
local function fence_of(attempt, created) return attempt .. '.' .. created end

local function is_paused() return redis.call('EXISTS', PAUSE) == 1 end
local function is_id(id) return #id <= 64 and string.find(id, '^[%w_-]+$') ~= nil end
local function is_tenant(name) return #name <= 64 and string.find(name, '^[%w_.-]+$') ~= nil end

-- Lua prints large numbers as 1.7e+12; Redis wants digits.
local function int(number) return string.format('%.0f', number) end

-- One moment for the whole script.
local moment_ms
local function now_ms()
  if not moment_ms then
    local time = redis.call('TIME')
    moment_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  end
  return moment_ms
end

-- The values of record fields, false for one that is absent.
local function read_record(id, ...)
  return unpack(redis.call('HMGET', record_key(id), ...), 1, select('#', ...))
end

-- Log and publication in one step: a subscriber who missed the message finds it in the log.
local function emit(id, seq, payload)
  redis.call('XADD', log_key(id), int(seq) .. '-0', 'd', payload)
  redis.call(options.publish, prefix .. 'c:' .. id, payload)
end

-- What an operator asks afterwards: why did it wait, who had it, how did it end. Numbers, names and
-- codes, never text of the request. Of a long history the first line and the latest ones stay.
local function note(id, event, fields)
  local line = fields or {}
  line.t, line.ev = now_ms(), event
  local history = history_key(id)
  if redis.call('RPUSH', history, cjson.encode(line)) > LONG_HISTORY then
    local first = redis.call('LPOP', history)
    redis.call('LPOP', history)
    redis.call('LPUSH', history, first)
  end
end

-- What a worker tells of its attempt, for the history: a JSON object, or '' for nothing.
local function parse_facts(text)
  if text == '' then return nil end
  local valid, facts = pcall(cjson.decode, text)
  if not valid or type(facts) ~= 'table' then error('facts must be a JSON object') end
  return facts
end

-- The caller has read the entry, so it is deleted together with its acknowledgement.
local function drop_read_entry(ready, entry)
  redis.call('XACK', ready_key(ready), GROUP, entry)
  redis.call('XDEL', ready_key(ready), entry)
end

-- Detach the entry of a queued record. One that nobody has read yet stays as a tombstone, which its
-- reader drops: XDEL of an undelivered entry makes the stream's `lag`, the autoscaler's signal, wrong.
local function drop_entry(ready, entry)
  if entry == '' then return end  -- held or delayed: there is none
  local stream = ready_key(ready)
  if redis.call('XACK', stream, GROUP, entry) == 1
      or redis.call('XLEN', stream) > LONG_STREAM then
    redis.call('XDEL', stream, entry)
  end
end
