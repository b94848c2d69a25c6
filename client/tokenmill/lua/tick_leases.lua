-- Part of tick: requests whose reader or holder is lost, and the dead letters.
--
-- Blame by progress: an attempt that published a token clears the strikes, so the neighbours of a
-- request that kills its worker are not given up with it.

local READY_CLASSES = { 'r', '0', '1', '2' }
local limit = int(options.limit)
local time = now_ms()
local report = { promoted = 0, expired = 0, vanished = 0, redelivered = 0, requeued = 0, dead = 0,
  recovered = 0, consumers = 0, in_grace = 0 }

local function count(what) report[what] = report[what] + 1 end

local function fields_of(flat)
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

-- The letter says who and why. The body stays in the record, for as long as it may be queued again.
local function bury(id, why, message, worker)
  local tenant, attempts = read_record(id, 'tenant', 'attempts')
  local letter = redis.call('XADD', DEAD_LETTERS, 'MAXLEN', '~', int(options.dead_letters), '*',
    'id', id, 'tenant', tenant, 'why', why, 'attempts', attempts, 'worker', worker)
  redis.call('HSET', record_key(id), 'letter', letter)
  settle(id, 'dead', why, message)
  count('dead')
end

-- A plain XADD whose reader died before admitting it: add it again, a few times.
local function redeliver_plain(ready, entry, consumer, fields)
  local id, body, tenant = fields.id, fields.body, fields.tenant or ''
  -- Whoever wrote the entry wrote the count: what is no small number counts as none.
  local deliveries = tonumber(string.match(fields.deliveries or '', '^%d%d?$') or '0') + 1
  if deliveries < options.max_deliveries then
    drop_read_entry(ready, entry)
    redis.call('XADD', ready_key(ready), '*', 'id', id, 'body', body, 'tenant', tenant,
      'traceparent', fields.traceparent or '', 'tracestate', fields.tracestate or '',
      'deliveries', int(deliveries))
    count('redelivered')
  elseif is_id(id) then
    if #body > options.max_body_bytes then body = '' end
    if not is_tenant(tenant) then tenant = 'default' end
    create(id, { tenant = tenant, class = ready, sha = '', body = body, state = 'queued',
      entry = entry, event = 'admitted' }, options)
    bury(id, 'undeliverable', 'read several times, never started', consumer)
  else
    drop_read_entry(ready, entry)
  end
end

-- Read, but the reader died before leasing it.
local function redeliver(id, ready, entry, consumer)
  local deliveries = redis.call('HINCRBY', record_key(id), 'undelivered', 1)
  if deliveries >= options.max_deliveries then
    bury(id, 'undeliverable', 'read several times, never started', consumer)
  else
    drop_read_entry(ready, entry)
    note(id, 'requeued', { why = 'never_leased' })
    push(id, ready)
    count('redelivered')
  end
end

-- Its worker is lost. Hand-overs are no attempts: they blame nobody, and a queue of small workers
-- may need many.
local function reclaim(id, record)
  local events = redis.call('XLEN', log_key(id)) - tonumber(record.events_at_lease)
  local strikes = tonumber(record.strikes)
  if events > 1 then strikes = 0
  -- The start event alone is no progress. Without even that, a request that was suspected before
  -- was still held back for another suspect: a worker begins them one at a time.
  elseif events == 1 or strikes == 0 then strikes = strikes + 1 end
  redis.call('HSET', record_key(id), 'strikes', int(strikes))
  local attempts = tonumber(record.attempts) - tonumber(record.handovers)
  local why
  if strikes >= options.max_strikes then why = 'worker_crash'
  elseif attempts >= options.max_attempts then why = 'too_many_attempts' end
  if why then
    bury(id, why, 'given up after ' .. record.attempts .. ' attempts', record.worker)
    return
  end
  local due
  if strikes > 0 then
    due = time + options.backoff_ms * 2 ^ (strikes - 1) * (0.5 + options.jitter)
    due = math.floor(due)
  end
  note(id, 'requeued', { why = 'worker_lost', strikes = strikes, due = due })
  requeue(id, due or 0)
  count('requeued')
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
      redeliver(id, ready, entry, consumer)
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
    local state, ready, entry = read_record(id, 'state', 'ready', 'entry')
    if state ~= 'leased' then
      redis.call('HDEL', OWNERS, id)
    else
      local pending = redis.pcall('XPENDING', ready_key(ready), GROUP, entry, entry, 1)
      if pending.err or #pending == 0 then
        note(id, 'requeued', { why = 'entry_lost' })
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
    -- Up to Redis 7.0 a consumer that waits in vain for entries counts as idle, too: its card tells.
    if consumer.pending == 0 and consumer.idle > 10 * options.lease_ms
        and redis.call('EXISTS', prefix .. 'w:' .. consumer.name) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', ready_key(ready), GROUP, consumer.name)
      count('consumers')
    end
  end
end
