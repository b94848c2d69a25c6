-- May this user do what enqueueing and working take? Each command is tried on keys that no request
-- can have, so nothing is left behind; the answer is for an operator.
--
-- ARGV  options{publish}
-- Reply the commands that were refused, in lower case; empty when all are allowed

local nobody = '~'  -- not an id
local record, log, list = record_key(nobody), log_key(nobody), history_key(nobody)
local queue, due, letters = ready_key(nobody), prefix .. 'z:' .. nobody, DEAD_LETTERS .. nobody
local channel = prefix .. 'c:' .. nobody
local refused = {}

-- Redis, its older releases and Valkey each have their own words for it.
local function try(name, reply)
  local said = type(reply) == 'table' and reply.err or ''
  if string.find(said, 'NOPERM', 1, true) or string.find(said, "can't ", 1, true)
      or string.find(said, 'ACL failure', 1, true) then
    refused[#refused + 1] = name
  end
end

try('hset', redis.pcall('HSET', record, 'v', '1'))
try('hget', redis.pcall('HGET', record, 'v'))
try('hmget', redis.pcall('HMGET', record, 'v'))
try('hgetall', redis.pcall('HGETALL', record))
try('hincrby', redis.pcall('HINCRBY', record, 'v', 1))
try('hdel', redis.pcall('HDEL', record, 'v'))
try('pexpire', redis.pcall('PEXPIRE', record, 1))
try('pexpireat', redis.pcall('PEXPIREAT', record, int(now_ms())))
try('rpush', redis.pcall('RPUSH', list, '1'))
try('lrange', redis.pcall('LRANGE', list, 0, 0))
try('lpop', redis.pcall('LPOP', list))
try('zadd', redis.pcall('ZADD', due, 1, nobody))
try('zrem', redis.pcall('ZREM', due, nobody))
try('xadd', redis.pcall('XADD', log, '1-0', 'd', ''))
try('xlen', redis.pcall('XLEN', log))
try('xrange', redis.pcall('XRANGE', log, '-', '+', 'COUNT', 1))
try('xack', redis.pcall('XACK', queue, GROUP, '1-0'))
try('xdel', redis.pcall('XDEL', log, '1-0'))
if options.publish == 'PUBLISH' then try('publish', redis.pcall('PUBLISH', channel, '')) end
if options.publish == 'SPUBLISH' then try('spublish', redis.pcall('SPUBLISH', channel, '')) end
-- Only workers need these.
try('xreadgroup', redis.pcall('XREADGROUP', 'GROUP', GROUP, nobody, 'STREAMS', queue, '>'))
try('xgroup|createconsumer', redis.pcall('XGROUP', 'CREATECONSUMER', queue, GROUP, nobody))
try('xpending', redis.pcall('XPENDING', queue, GROUP))
try('xclaim', redis.pcall('XCLAIM', queue, GROUP, nobody, 0, '1-0'))
try('xtrim', redis.pcall('XTRIM', letters, 'MAXLEN', 0))
try('hscan', redis.pcall('HSCAN', record, '0'))
try('hkeys', redis.pcall('HKEYS', record))
try('zrange', redis.pcall('ZRANGE', due, 0, 0))
try('zrangebyscore', redis.pcall('ZRANGEBYSCORE', due, 0, 0))
try('set', redis.pcall('SET', MEMORY_FLAG .. nobody, '1', 'PX', 1))
try('del', redis.pcall('DEL', record, log, list, due))
return refused
