-- Shared prelude, part 3 of 3: the birth of a request, its deadlines, its end, and its way back into
-- the queue.

-- An attempt writes one start event before its tokens, so a token stands among the first few events.
local function has_token(id, attempts)
  local events = redis.call('XRANGE', log_key(id), '-', '+', 'COUNT', int(tonumber(attempts) + 1))
  for _, event in ipairs(events) do
    if not string.find(event[2][2], '"ev"%s*:%s*"start"') then return true end
  end
  return false
end

-- The nearest deadline that still applies, and what to say when it has passed. The queue deadline is
-- over with the first lease, that of the first token with a token in the log. DEADLINES holds
-- the nearest at birth; what no longer applies is found out when it is due. The arguments after the
-- id are record fields.
local function next_deadline(id, total, queue, first_token, attempts)
  local due, message = tonumber(total), 'the deadline passed'
  if queue and attempts == '0' and tonumber(queue) < due then
    due, message = tonumber(queue), 'the queue deadline passed before a worker took the request'
  end
  if first_token and tonumber(first_token) < due and not has_token(id, attempts) then
    due, message = tonumber(first_token), 'the first-token deadline passed before the first token'
  end
  return due, message
end

-- Birth of a record. It has its lifetime from the first moment; returns the creation time.
--
-- request  tenant, class, body, sha, event (how it came, for the history), and state and entry if it
--          has a ready entry; created_after: the time of birth of its earlier life
-- terms    deadline_ms; perhaps delay_ms, queue_deadline_ms, first_token_deadline_ms, work_tokens,
--          traceparent, tracestate (W3C: the trace that this request belongs to)
--
-- The id may have been used before: a record can run out of its lifetime, or get lost, while a
-- worker holds it. Nothing of that may touch the new one, and what it counted for is counted again.
local function create(id, request, terms)
  local record, class = record_key(id), request.class
  local created = math.max(now_ms(), (request.created_after or 0) + 1)
  local start = created + (terms.delay_ms or 0)
  local deadline = start + terms.deadline_ms
  local nearest, due = deadline, nil
  local fields = { 'v', '1', 'state', request.state or 'held', 'tenant', request.tenant,
    'class', class, 'sha', request.sha, 'body', request.body, 'created', int(created),
    'deadline', int(deadline), 'attempts', '0', 'handovers', '0', 'strikes', '0', 'retries', '0',
    'undelivered', '0', 'windowed', '0', 'ready', class, 'entry', request.entry or '',
    'work', int(terms.work_tokens or 0) }
  local function add(name, value)
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  end
  for _, name in ipairs({ 'queue_deadline', 'first_token_deadline' }) do
    local allowed_ms = terms[name .. '_ms']
    if allowed_ms then
      add(name, int(start + allowed_ms))
      nearest = math.min(nearest, start + allowed_ms)
    end
  end
  if start > created then
    due = start
    add('not_before', int(start))
  end
  for _, name in ipairs({ 'traceparent', 'tracestate' }) do
    if terms[name] then add(name, terms[name]) end
  end
  redis.call('HSET', record, unpack(fields))
  redis.call('PEXPIREAT', record, int(deadline + options.retention_ms))
  redis.call('DEL', log_key(id), history_key(id))
  redis.call('HDEL', OWNERS, id)
  redis.call('ZREM', DELAYED, id)
  if redis.call('ZADD', DEADLINES, int(nearest), id) == 0 then
    redis.call('HSET', MAINTENANCE, 'recount', '1')
  end
  note(id, request.event, { class = class, due = due })
  redis.call('PEXPIREAT', history_key(id), int(deadline + options.retention_ms))
  count_queued(request.tenant, terms.work_tokens)
  return created
end

-- What every end has in common, whoever decides it.
--
-- ending  state, seq and payload of the end event; perhaps code, message, usage, facts
local function close(id, ending)
  local record, state = record_key(id), ending.state
  local was, tenant, class, ready, entry, work =
    read_record(id, 'state', 'tenant', 'class', 'ready', 'entry', 'work')
  local fields = { 'state', state, 'end_seq', int(ending.seq), 'ended', int(now_ms()), 'entry', '' }
  for _, name in ipairs({ 'code', 'message', 'usage' }) do
    if ending[name] then
      fields[#fields + 1] = name
      fields[#fields + 1] = ending[name]
    end
  end
  -- First the lease: at maxmemory Redis refuses growing commands only until a script's first
  -- write, so this order lets a request end, and free its memory, when Redis is full.
  redis.call('HDEL', OWNERS, id)
  emit(id, ending.seq, ending.payload)
  redis.call('HSET', record, unpack(fields))
  undelay(id, work)
  redis.call('ZREM', DEADLINES, id)
  if was == 'leased' then
    drop_read_entry(ready, entry)
    uncount_running(tenant, work)
  else
    drop_entry(ready, entry)
    uncount_queued(tenant, work)
  end
  leave_window(id, class, tenant)
  redis.call('HINCRBY', MAINTENANCE, 'ends', 1)
  note(id, 'ended', { st = state, code = ending.code, facts = ending.facts })
  -- Only a dead letter may need the body again.
  local keep_ms = options.retention_ms
  if state == 'dead' and options.dead_letter_body_ms > 0 then
    keep_ms = math.max(keep_ms, options.dead_letter_body_ms)
  else
    redis.call('HDEL', record, 'body')
  end
  for _, key in ipairs({ record, log_key(id), history_key(id) }) do
    redis.call('PEXPIRE', key, int(keep_ms))
  end
end

-- A terminal transition decided by Redis itself (cancel, deadline, given up), so that a dead or
-- hung worker can never leave a request without its end event. Returns the state it is in now
-- (false: no such request) and whether this call made it.
local function settle(id, state, code, message, facts)
  local was, attempts = read_record(id, 'state', 'attempts')
  if not was or TERMINAL[was] then return was, false end
  local seq = redis.call('XLEN', log_key(id)) + 1
  local payload = cjson.encode({
    e = seq, ev = 'end', a = tonumber(attempts), st = state, code = code, msg = message })
  close(id, { state = state, seq = seq, payload = payload, code = code, message = message,
    facts = facts })
  return state, true
end

-- leased -> queued or, with a due time in the future, delayed. The old fence dies here.
local function requeue(id, due_ms)
  local tenant, ready, entry, work = read_record(id, 'tenant', 'ready', 'entry', 'work')
  redis.call('HDEL', OWNERS, id)
  drop_read_entry(ready, entry)
  uncount_running(tenant, work)
  count_queued(tenant, work)
  if due_ms > now_ms() then
    delay(id, due_ms, work)
  else
    push(id, 'r')
  end
end
