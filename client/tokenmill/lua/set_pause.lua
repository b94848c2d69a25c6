-- An operator stops the queue, or lets it go on. While it is paused nothing new is leased; requests
-- are accepted, what runs goes on, and deadlines pass.
--
-- ARGV  options{publish}, pause|resume, for_ms (0: until resume; else it ends by itself)
-- Reply since when it had been paused, in ms; 0 when it was not

local what, for_ms = ARGV[2], tonumber(ARGV[3])
if what ~= 'pause' and what ~= 'resume' then
  return redis.error_reply('ERR say pause or resume')
end
local since = redis.call('HGET', PAUSE, 'since')
redis.call('DEL', PAUSE)  -- with the lifetime that an earlier pause had
if what == 'pause' then
  redis.call('HSET', PAUSE, 'since', since or int(now_ms()))
  if for_ms > 0 then redis.call('PEXPIRE', PAUSE, int(for_ms)) end
end
return tonumber(since or '0')
