-- A request enters the queue. Same id and same content: the request that is already there.
--
-- ARGV  options{deadline_ms, retention_ms, max_queued, max_queued_per_tenant, window,
--       max_body_bytes, publish}, id, tenant, class (0|1|2), sha of the body, body
-- Reply {OK, created_ms, state} accepted: `queued`, or `held` until its tenant's window has room
--       {DUP, created_ms, state}       this very request is known
--       {CONFLICT, created_ms, state}  the id is taken by another content
--       {FULL, memory|queue, queued}   refused for now
--       {TENANT_FULL, tenant, queued}  the tenant has its share
--       {TOO_LARGE, max_body_bytes}
--
-- The class streams hold at most `window` entries of one tenant and class; the rest waits in that
-- tenant's own list. FIFO over such windows is close to round robin and needs no scheduler.

local id, tenant, class, sha, body = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
if class ~= '0' and class ~= '1' and class ~= '2' then
  return redis.error_reply('ERR class must be 0, 1 or 2')
end
local known = redis.call('HMGET', record_key(id), 'state', 'sha', 'created')
if known[1] then
  return { known[2] == sha and 'DUP' or 'CONFLICT', tonumber(known[3]), known[1] }
end
if #body > options.max_body_bytes then return { 'TOO_LARGE', options.max_body_bytes } end
local counted = redis.call('HMGET', COUNTERS, 'queued', 't:' .. tenant)
local queued, of_tenant = tonumber(counted[1] or '0'), tonumber(counted[2] or '0')
if redis.call('EXISTS', MEMORY_FLAG) == 1 then return { 'FULL', 'memory', queued } end
if queued >= options.max_queued then return { 'FULL', 'queue', queued } end
if of_tenant >= options.max_queued_per_tenant then
  return { 'TENANT_FULL', 'tenant', of_tenant }
end

local created = create(id, tenant, class, body, sha, 'held', '')
local share = share_of(class, tenant)
if tonumber(redis.call('HGET', WINDOWS, share) or '0') < options.window then
  enter_window(id, share)
  push(id, class)
  return { 'OK', created, 'queued' }
end
redis.call('RPUSH', backlog_key(share), id)
return { 'OK', created, 'held' }
