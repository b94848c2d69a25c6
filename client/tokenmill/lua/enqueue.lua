-- A request enters the queue. Same id and same content: the request that is already there.
--
-- ARGV  options{deadline_ms, retention_ms, max_queued, max_queued_per_tenant, window,
--       max_body_bytes, publish, perhaps delay_ms, queue_deadline_ms, first_token_deadline_ms,
--       work_tokens, traceparent, tracestate},
--       id, tenant, class (0|1|2), sha of the body, body
-- Reply {OK, created_ms, state} accepted: `queued`, `held` until its tenant's window has room, or
--                               `delayed` for delay_ms
--       {DUP, created_ms, state}       this very request is known
--       {CONFLICT, created_ms, state}  the id is taken by another content
--       {FULL, memory|queue, queued, rate}  refused for now; rate: requests that end per second, as
--                                           text, '' when unknown
--       {TENANT_FULL, tenant, queued, rate} the tenant has its share
--       {TOO_LARGE, max_body_bytes}
--
-- Deadlines count from the moment at which the request may be served: now, or after the delay.

local id, tenant, class, sha, body = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
if class ~= '0' and class ~= '1' and class ~= '2' then
  return redis.error_reply('ERR class must be 0, 1 or 2')
end
if not is_id(id) or not is_tenant(tenant) then
  return redis.error_reply('ERR id and tenant must be 1 to 64 ASCII letters, digits, _ or -')
end
local state, known_sha, known_since = read_record(id, 'state', 'sha', 'created')
if state then return { known_sha == sha and 'DUP' or 'CONFLICT', tonumber(known_since), state } end
if #body > options.max_body_bytes then return { 'TOO_LARGE', options.max_body_bytes } end

local function refuse(status, reason, queued)
  return { status, reason, queued, redis.call('HGET', MAINTENANCE, 'rate') or '' }
end
local counted = redis.call('HMGET', COUNTERS, 'queued', 't:' .. tenant)
local queued, of_tenant = tonumber(counted[1] or '0'), tonumber(counted[2] or '0')
if redis.call('EXISTS', MEMORY_FLAG) == 1 then return refuse('FULL', 'memory', queued) end
if queued >= options.max_queued then return refuse('FULL', 'queue', queued) end
if of_tenant >= options.max_queued_per_tenant then
  return refuse('TENANT_FULL', 'tenant', of_tenant)
end

local request = { tenant = tenant, class = class, sha = sha, body = body, event = 'enqueued' }
local created = create(id, request, options)
if (options.delay_ms or 0) <= 0 then return { 'OK', created, enter(id, class, tenant) } end
delay(id, created + options.delay_ms, options.work_tokens)
return { 'OK', created, 'delayed' }
