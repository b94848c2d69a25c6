-- Anybody ends a request. Final when it returns: the end event is written here, the lease dies
-- here, and the worker learns of it from its next append or heartbeat.
--
-- ARGV  options{retention_ms, window, publish}, id, message
-- Reply {1, cancelled}, {0, state it had already ended in}, {0, ''} no such request

local state, changed = settle(ARGV[2], 'cancelled', 'cancelled', ARGV[3])
return { changed and 1 or 0, state or '' }
