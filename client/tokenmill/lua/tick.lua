-- Maintenance: due requests, deadlines, lost workers, lag, leftovers. Any worker, at any time.
--
-- ARGV  options{lease_ms, max_strikes, max_attempts, max_deliveries, backoff_ms, jitter (0..1, drawn
--       by the caller), limit, deadline_ms, retention_ms, window, max_running_per_tenant,
--       max_body_bytes, tidy_ms, dead_letters, dead_letter_ms, dead_letter_body_ms, publish}
-- Reply JSON: how many were promoted, expired, vanished, redelivered, requeued, dead, recovered;
--       consumers removed; in_grace 1 when lost workers were not looked for
--
-- Outage grace: after nobody ticked for half a lease (Redis or everybody was away), or when the
-- clock jumped, nobody is declared lost for one lease: the living come back and renew first.

-- The average rate forgets with this time constant; it is measured at most once a second.
local RATE_MEMORY_MS, RATE_EVERY_MS = 30000, 1000

-- A request whose time has come: what was tried before goes before all new work, new work takes its
-- turn among its tenant's.
local function promote()
  local due = redis.call('ZRANGEBYSCORE', DELAYED, '-inf', int(time), 'LIMIT', 0, limit)
  for _, id in ipairs(due) do
    local state, attempts, class, tenant, work =
      read_record(id, 'state', 'attempts', 'class', 'tenant', 'work')
    undelay(id, work)
    if state == 'delayed' then
      if attempts == '0' then enter(id, class, tenant) else push(id, 'r') end
      count('promoted')
    end
  end
  -- A worker of an older release may have promoted some, and knows nothing of their tokens.
  if redis.call('EXISTS', DELAYED) == 0 then redis.call('HDEL', COUNTERS, 'delayed_tokens') end
end

-- A record that ran out of its lifetime before anybody ticked takes the knowledge of what it counted
-- for with it, so the counters are made again once all such ids are gone.
local function vanish(id)
  redis.call('ZREM', DEADLINES, id)
  redis.call('ZREM', DELAYED, id)
  redis.call('HDEL', OWNERS, id)
  redis.call('HSET', MAINTENANCE, 'recount', '1')
  count('vanished')
end

local function expire()
  local over = redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', int(time), 'LIMIT', 0, limit)
  for _, id in ipairs(over) do
    local state, total, queue, first_token, attempts = read_record(id, 'state', 'deadline',
      'queue_deadline', 'first_token_deadline', 'attempts')
    if not state or TERMINAL[state] then
      vanish(id)
    else
      local due, message = next_deadline(id, total, queue, first_token, attempts)
      if due > time then
        redis.call('ZADD', DEADLINES, int(due), id)  -- this one no longer applies; the next does
      else
        settle(id, 'expired', 'deadline_exceeded', message)
        count('expired')
      end
    end
  end
  return #over < options.limit and redis.call('HDEL', MAINTENANCE, 'recount') == 1
end

-- Every living request has a deadline, so the counters can be made again from those. The backlog
-- of a share is fed while its window has room.
local function recount()
  local counts, of_tenants, windows, shares = {}, {}, {}, {}
  for _, name in ipairs({ 'queued', 'leased', 'queued_tokens', 'leased_tokens' }) do
    counts[name] = 0
  end
  local delayed_tokens = 0
  for _, share in ipairs(redis.call('HKEYS', WINDOWS)) do shares[share] = true end
  for _, id in ipairs(redis.call('ZRANGE', DEADLINES, 0, -1)) do
    local state, tenant, class, windowed, work =
      read_record(id, 'state', 'tenant', 'class', 'windowed', 'work')
    if state then
      local total, field = 'queued', 't:' .. tenant
      if state == 'leased' then total, field = 'leased', 'l:' .. tenant end
      counts[total] = counts[total] + 1
      counts[total .. '_tokens'] = counts[total .. '_tokens'] + tonumber(work or '0')
      if state == 'delayed' then delayed_tokens = delayed_tokens + tonumber(work or '0') end
      of_tenants[field] = (of_tenants[field] or 0) + 1
      local share = share_of(class, tenant)
      if windowed == '1' then windows[share] = (windows[share] or 0) + 1 end
      shares[share] = true
    end
  end
  redis.call('DEL', COUNTERS, WINDOWS)
  for field, number in pairs(counts) do redis.call('HSET', COUNTERS, field, int(number)) end
  add_delayed_tokens(delayed_tokens)
  for field, number in pairs(of_tenants) do redis.call('HSET', COUNTERS, field, number) end
  for share, entries in pairs(windows) do redis.call('HSET', WINDOWS, share, entries) end
  for share in pairs(shares) do feed(string.match(share, '^(.):(.*)$')) end
end

-- How many requests end per second while there is work: tells whoever is refused when to come back.
local function measure_rate()
  local since, rate, ends = unpack(
    redis.call('HMGET', MAINTENANCE, 'rate_since', 'rate', 'ends'), 1, 3)
  local past_ms = time - tonumber(since or time)
  if since and past_ms >= 0 and past_ms < RATE_EVERY_MS then return end
  local counted = redis.call('HMGET', COUNTERS, 'queued', 'leased')
  local busy = ends and ends ~= '0'
    or tonumber(counted[1] or '0') + tonumber(counted[2] or '0') > 0
  if past_ms > 0 and busy then
    local now = tonumber(ends or '0') * 1000 / past_ms
    if rate then now = now + math.exp(-past_ms / RATE_MEMORY_MS) * (tonumber(rate) - now) end
    redis.call('HSET', MAINTENANCE, 'rate', string.format('%.4f', now))
  end
  redis.call('HSET', MAINTENANCE, 'rate_since', int(time), 'ends', '0')
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

local last, reap_after, tidied, cap = unpack(redis.call('HMGET', MAINTENANCE, 'last', 'reap_after',
  'tidied', 'max_running_per_tenant'), 1, 4)
reap_after = tonumber(reap_after or '0')
if not last or math.abs(time - tonumber(last)) > options.lease_ms / 2 then
  reap_after = time + options.lease_ms
end
-- The first write may grow, so at maxmemory the whole tick is refused, before it did anything.
redis.call('HSET', MAINTENANCE, 'last', int(time), 'reap_after', int(reap_after))
if tonumber(cap or '0') ~= options.max_running_per_tenant then
  redis.call('HSET', MAINTENANCE, 'max_running_per_tenant', int(options.max_running_per_tenant),
    'recount', '1')  -- with another cap others may enter
end
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
measure_rate()
for _, ready in ipairs(READY_CLASSES) do repair_lag(ready) end
return cjson.encode(report)
