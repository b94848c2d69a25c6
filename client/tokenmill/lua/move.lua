-- Waiting requests get another priority class, and stand last in it.
--
-- ARGV  options{window, publish}, class (0|1|2), then ids
-- Reply one word per id: MOVED; SAME, it has that class already (also when the call is repeated);
--       TAKEN, a worker has it or it has ended; UNKNOWN

local to = ARGV[2]
if to ~= '0' and to ~= '1' and to ~= '2' then
  return redis.error_reply('ERR class must be 0, 1 or 2')
end

local function move(id)
  local state, class, tenant, ready, entry =
    read_record(id, 'state', 'class', 'tenant', 'ready', 'entry')
  if not state then return 'UNKNOWN' end
  if state == 'leased' or TERMINAL[state] then return 'TAKEN' end
  if class == to then return 'SAME' end
  note(id, 'moved', { class = to })
  -- What was tried before stands before all classes, and what is delayed stands in none.
  if state == 'delayed' or ready == 'r' then
    redis.call('HSET', record_key(id), 'class', to)
    return 'MOVED'
  end
  if state == 'held' then
    redis.call('LREM', backlog_key(share_of(class, tenant)), 1, id)
  else
    drop_entry(ready, entry)
  end
  redis.call('HSET', record_key(id), 'class', to, 'ready', to, 'entry', '')
  leave_window(id, class, tenant)
  enter(id, to, tenant)
  return 'MOVED'
end

local words = {}
for at = 3, #ARGV do words[#words + 1] = move(ARGV[at]) end
return words
