-- A producer without the SDK did XADD <prefix>q:<class> * id <id> body <json> [tenant <tenant>].
-- The worker that reads such an entry makes its record with this script, then leases it as usual.
-- The entry stays the request's ready entry; unless the reply is OK it is dropped.
--
-- ARGV  options{deadline_ms, retention_ms, max_queued, max_body_bytes, publish, work_tokens,
--       perhaps traceparent, tracestate},
--       ready class, entry, id, tenant, sha of the body, body
-- Reply {OK}         a record exists for this entry (also when the call is repeated)
--       {DUP}        the id is known with the same content
--       {CONFLICT}   the id is known with another content
--       {INVALID}    the id is not an id: there is no log to say so in; or the tenant is none: ended
--                    with an end event
--       {TOO_LARGE} {FULL}  refused with an end event, which the producer finds in the log
--
-- The XADD was acknowledged to its producer, so a refusal must be visible: hence the end event.

local ready, entry, id = ARGV[2], ARGV[3], ARGV[4]
local request = { tenant = ARGV[5], class = ready, sha = ARGV[6], body = ARGV[7],
  state = 'queued', entry = entry, event = 'admitted' }
if not is_id(id) then
  drop_read_entry(ready, entry)
  return { 'INVALID' }
end
local state, sha, current = read_record(id, 'state', 'sha', 'entry')
if state then
  if current == entry then return { 'OK' } end
  drop_read_entry(ready, entry)
  return { sha == request.sha and 'DUP' or 'CONFLICT' }
end

local function refuse(status, code, message)
  request.body = ''
  create(id, request, options)
  settle(id, 'failed', code, message)
  return { status }
end
if not is_tenant(request.tenant) then
  request.tenant = 'default'
  return refuse('INVALID', 'invalid_request',
    "tenant: must be 1 to 64 ASCII letters, digits, '_', '.' or '-'")
end
if #request.body > options.max_body_bytes then
  return refuse('TOO_LARGE', 'too_long', 'the body is over ' .. options.max_body_bytes .. ' bytes')
end
if redis.call('EXISTS', MEMORY_FLAG) == 1
    or tonumber(redis.call('HGET', COUNTERS, 'queued') or '0') >= options.max_queued then
  return refuse('FULL', 'queue_full', 'the queue is full')
end
create(id, request, options)
return { 'OK' }
