-- A dead request gets another life: same id, body and terms, but a record, a log and a history of its
-- own, without strikes. Its dead letter goes. Limits of the queue do not apply: it had been accepted.
--
-- ARGV  options{retention_ms, window, publish}, id
-- Reply {OK, created_ms, state}       back in the queue: `queued` or `held`
--       {NO_BODY, created_ms, dead}   its body was not kept
--       {NOT_DEAD, created_ms, state} also the answer to a repeated call
--       {UNKNOWN, 0, ''}              no such request, or its retention is over

local id = ARGV[2]
local state, body, created, tenant, class, sha, letter, work =
  read_record(id, 'state', 'body', 'created', 'tenant', 'class', 'sha', 'letter', 'work')
if not state then return { 'UNKNOWN', 0, '' } end
if state ~= 'dead' then return { 'NOT_DEAD', tonumber(created), state } end
if not body or body == '' then return { 'NO_BODY', tonumber(created), state } end

local deadline, queue_deadline, first_token_deadline, not_before =
  read_record(id, 'deadline', 'queue_deadline', 'first_token_deadline', 'not_before')
local function allowed_ms(at) return at and tonumber(at) - tonumber(not_before or created) or nil end
local request = { tenant = tenant, class = class, sha = sha, body = body, event = 'enqueued',
  created_after = tonumber(created) }
created = create(id, request, { deadline_ms = allowed_ms(deadline),
  queue_deadline_ms = allowed_ms(queue_deadline),
  first_token_deadline_ms = allowed_ms(first_token_deadline), work_tokens = tonumber(work or '0') })
redis.call('HDEL', record_key(id), 'code', 'message', 'usage', 'ended', 'end_seq', 'leased',
  'worker', 'fingerprint', 'events_at_lease', 'not_before', 'letter')
redis.call('XDEL', DEAD_LETTERS, letter)
return { 'OK', created, enter(id, class, tenant) }
