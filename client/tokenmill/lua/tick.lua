-- Maintenance: due retries, deadlines, lost workers, lag, leftovers. Any worker, at any time.
--
-- ARGV  options{lease_ms, max_strikes, max_attempts, max_deliveries, backoff_ms, jitter (0..1, drawn
--       by the caller), limit, retention_ms, window, tidy_ms, dead_letters,
--       dead_letter_ms, dead_letter_bodies, publish}
-- Reply JSON: how many were promoted, expired, vanished, redelivered, requeued, dead, recovered;
--       consumers removed; in_grace 1 when lost workers were not looked for
--
-- Outage grace: after nobody ticked for half a lease (Redis or everybody was away), or when the
-- clock jumped, nobody is declared lost for one lease: the living come back and renew first.
-- Blame by progress: an attempt that published a token clears the strikes, so the neighbours of a
-- request that kills its worker are not given up with it.

local READY_CLASSES = { 'r', '0', '1', '2' }
local limit = int(options.limit)
local time = now_ms()
local report = { promoted = 0, expired = 0, vanished = 0, redelivered = 0, requeued = 0, dead = 0,
  recovered = 0, consumers = 0, in_grace = 0 }

local function count(what) report[what] = report[what] + 1 end

local function bury(id, tenant, why, attempts, worker, body)
  if not options.dead_letter_bodies then body = '' end
  redis.call('XADD', DEAD_LETTERS, 'MAXLEN', '~', int(options.dead_letters), '*', 'id', id,
    'tenant', tenant, 'why', why, 'attempts', attempts, 'worker', worker, 'body', body)
  count('dead')
end

local function promote()
  local due = redis.call('ZRANGEBYSCORE', DELAYED, '-inf', int(time), 'LIMIT', 0, limit)
  for _, id in ipairs(due) do
    redis.call('ZREM', DELAYED, id)
    if redis.call('HGET', record_key(id), 'state') == 'delayed' then
      push(id, 'r')
      count('promoted')
    end
  end
end

-- Deadlines. A record that ran out of its lifetime before anybody ticked takes the knowledge of
-- what it counted for with it, so the counters are made again once all such ids are gone.
local function expire()
  local over = redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', int(time), 'LIMIT', 0, limit)
  for _, id in ipairs(over) do
    if settle(id, 'expired', 'deadline_exceeded', 'the deadline passed') then
      count('expired')
    else
      redis.call('ZREM', DELAYED, id)
      redis.call('HDEL', OWNERS, id)
      redis.call('HSET', MAINTENANCE, 'recount', '1')
      count('vanished')
    end
    redis.call('ZREM', DEADLINES, id)
  end
  return #over < options.limit and redis.call('HDEL', MAINTENANCE, 'recount') == 1
end

-- Every living request has a deadline, so the counters can be made again from those. The backlog
-- of a share is fed while its window has room.
local function recount()
  local queued, leased, tenants, windows, shares = 0, 0, {}, {}, {}
  for _, share in ipairs(redis.call('HKEYS', WINDOWS)) do shares[share] = true end
  for _, id in ipairs(redis.call('ZRANGE', DEADLINES, 0, -1)) do
    local state, tenant, class, windowed = unpack(
      redis.call('HMGET', record_key(id), 'state', 'tenant', 'class', 'windowed'), 1, 4)
    if state then
      if state == 'leased' then leased = leased + 1
      else
        queued = queued + 1
        tenants[tenant] = (tenants[tenant] or 0) + 1
      end
      local share = share_of(class, tenant)
      if windowed == '1' then windows[share] = (windows[share] or 0) + 1 end
      shares[share] = true
    end
  end
  redis.call('DEL', COUNTERS, WINDOWS)
  redis.call('HSET', COUNTERS, 'queued', queued, 'leased', leased)
  for tenant, waiting in pairs(tenants) do redis.call('HSET', COUNTERS, 't:' .. tenant, waiting) end
  for share, entries in pairs(windows) do redis.call('HSET', WINDOWS, share, entries) end
  for share in pairs(shares) do
    local class, tenant = string.match(share, '^(.):(.*)$')
    for _ = (windows[share] or 0) + 1, options.window do feed(class, tenant) end
  end
end

-- A plain XADD whose reader died before admitting it: add it again, a few times.
local function redeliver_plain(ready, entry, consumer, fields)
  drop_read_entry(ready, entry)
  local deliveries = tonumber(fields.deliveries or '0') + 1
  local tenant = fields.tenant or ''
  if deliveries >= options.max_deliveries then
    bury(fields.id, tenant, 'undeliverable', '0', consumer, fields.body)
  else
    redis.call('XADD', ready_key(ready), '*', 'id', fields.id, 'body', fields.body,
      'tenant', tenant, 'deliveries', int(deliveries))
    count('redelivered')
  end
end

-- Read, but the reader died before leasing it.
local function redeliver(id, ready, entry, consumer, record)
  if redis.call('HINCRBY', record_key(id), 'undelivered', 1) >= options.max_deliveries then
    bury(id, record.tenant, 'undeliverable', record.attempts, consumer, record.body)
    settle(id, 'dead', 'undeliverable', 'read several times, never started')
  else
    drop_read_entry(ready, entry)
    push(id, ready)
    count('redelivered')
  end
end

-- Its worker is lost.
local function reclaim(id, record)
  -- The start event alone is no progress.
  local progressed = redis.call('XLEN', log_key(id)) > tonumber(record.events_at_lease) + 1
  local strikes = progressed and 0 or tonumber(record.strikes) + 1
  redis.call('HSET', record_key(id), 'strikes', int(strikes))
  local why
  if strikes >= options.max_strikes then why = 'worker_crash'
  elseif tonumber(record.attempts) >= options.max_attempts then why = 'too_many_attempts' end
  if why then
    bury(id, record.tenant, why, record.attempts, record.worker, record.body)
    settle(id, 'dead', why, 'given up after ' .. record.attempts .. ' attempts')
    return
  end
  local due = 0
  if strikes > 0 then
    due = time + options.backoff_ms * 2 ^ (strikes - 1) * (0.5 + options.jitter)
  end
  requeue(id, due)
  count('requeued')
end

local function fields_of(flat)
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

local function reap(ready)
  local stream = ready_key(ready)
  local pending = redis.pcall('XPENDING', stream, GROUP, 'IDLE', int(options.lease_ms), '-', '+',
    limit)
  if pending.err then return end  -- no worker has made the group yet
  for _, one in ipairs(pending) do
    local entry, consumer = one[1], one[2]
    local found = redis.call('XRANGE', stream, entry, entry)
    local fields = found[1] and fields_of(found[1][2]) or {}
    local id = fields.id
    local record = id and fields_of(redis.call('HGETALL', record_key(id))) or {}
    if id and fields.body and not record.state then
      redeliver_plain(ready, entry, consumer, fields)
    elseif record.entry ~= entry or record.ready ~= ready then
      drop_read_entry(ready, entry)  -- junk, or a tombstone
    elseif record.state == 'queued' then
      redeliver(id, ready, entry, consumer, record)
    else
      reclaim(id, record)
    end
  end
end

-- A lease whose entry is pending with nobody can neither be renewed nor found by reap.
local function recover_owners()
  local cursor = redis.call('HGET', MAINTENANCE, 'cursor') or '0'
  local page = redis.call('HSCAN', OWNERS, cursor, 'COUNT', limit)
  redis.call('HSET', MAINTENANCE, 'cursor', page[1])
  for i = 1, #page[2], 2 do
    local id = page[2][i]
    local state, ready, entry = unpack(
      redis.call('HMGET', record_key(id), 'state', 'ready', 'entry'), 1, 3)
    if state ~= 'leased' then
      redis.call('HDEL', OWNERS, id)
    else
      local pending = redis.pcall('XPENDING', ready_key(ready), GROUP, entry, entry, 1)
      if pending.err or #pending == 0 then
        requeue(id, 0)
        count('recovered')
      end
    end
  end
end

-- Names of dead workers. Only without pending entries: XGROUP DELCONSUMER destroys those.
local function remove_consumers(ready)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', ready_key(ready), GROUP)
  if consumers.err then return end
  for _, flat in ipairs(consumers) do
    local consumer = fields_of(flat)
    if consumer.pending == 0 and consumer.idle > 10 * options.lease_ms then
      redis.call('XGROUP', 'DELCONSUMER', ready_key(ready), GROUP, consumer.name)
      count('consumers')
    end
  end
end

-- The stream's `lag` is the autoscaler's signal, but Redis loses count when the entry that was
-- delivered last is deleted while older ones are pending: an everyday case, as requests end in any
-- order. All that was delivered is pending or deleted, so the true count is known; and with the
-- group moved to just before the first undelivered entry, Redis trusts it (unless the two ids are
-- neighbours, made in the same millisecond; then the next read ends it). 6.2 reports no lag.
local function repair_lag(ready)
  local stream = ready_key(ready)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err or #groups == 0 then return end
  local group = fields_of(groups[1])
  local undelivered = redis.call('XLEN', stream) - group.pending
  if group.lag == nil or group.lag == undelivered then return end
  local added = fields_of(redis.call('XINFO', 'STREAM', stream))['entries-added']
  local position = group['last-delivered-id']
  local after = redis.call('XRANGE', stream, '(' .. position, '+', 'COUNT', 1)
  if after[1] then
    local ms, seq = string.match(after[1][1], '^(%d+)-(%d+)$')
    -- No entry has an id between the two, so none is skipped.
    if seq ~= '0' then position = ms .. '-' .. int(tonumber(seq) - 1) end
    if seq == '0' then position = int(tonumber(ms) - 1) .. '-18446744073709551615' end
  end
  redis.call('XGROUP', 'SETID', stream, GROUP, position, 'ENTRIESREAD', int(added - undelivered))
end

local function tidy()
  recover_owners()
  for _, ready in ipairs(READY_CLASSES) do remove_consumers(ready) end
  redis.call('XTRIM', DEAD_LETTERS, 'MINID', int(time - options.dead_letter_ms))
end

local last, reap_after, tidied = unpack(
  redis.call('HMGET', MAINTENANCE, 'last', 'reap_after', 'tidied'), 1, 3)
reap_after = tonumber(reap_after or '0')
if not last or math.abs(time - tonumber(last)) > options.lease_ms / 2 then
  reap_after = time + options.lease_ms
end
-- The first write may grow, so at maxmemory the whole tick is refused, before it did anything.
redis.call('HSET', MAINTENANCE, 'last', int(time), 'reap_after', int(reap_after))
promote()
if expire() then recount() end
if time >= reap_after then
  for _, ready in ipairs(READY_CLASSES) do reap(ready) end
  if time - tonumber(tidied or '0') >= options.tidy_ms then
    redis.call('HSET', MAINTENANCE, 'tidied', int(time))
    tidy()
  end
else
  report.in_grace = 1
end
for _, ready in ipairs(READY_CLASSES) do repair_lag(ready) end
return cjson.encode(report)
