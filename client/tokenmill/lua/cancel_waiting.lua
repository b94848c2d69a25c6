-- Requests end that no worker has taken. Like `cancel`, but whoever has been leased meanwhile, or
-- is not one of those meant, is left alone.
--
-- ARGV  options{retention_ms, window, publish, class ('' for any), tenant ('' for any),
--       created_before (ms; 0 for any)}, message, then ids
-- Reply how many this call ended

local WAITING = { held = true, queued = true, delayed = true }

local function is_meant(id)
  local state, class, tenant, created = read_record(id, 'state', 'class', 'tenant', 'created')
  return state and WAITING[state]
    and (options.class == '' or class == options.class)
    and (options.tenant == '' or tenant == options.tenant)
    and (options.created_before == 0 or tonumber(created) < options.created_before)
end

local ended = 0
for at = 3, #ARGV do
  if is_meant(ARGV[at]) then
    settle(ARGV[at], 'cancelled', 'cancelled', ARGV[2])
    ended = ended + 1
  end
end
return ended
