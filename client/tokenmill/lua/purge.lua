-- Forget dead letters, and with each its dead request: record, body, log and history.
--
-- ARGV  options{publish}, then (entry of the letter, id) per letter
-- Reply how many letters were removed

local removed = 0
for first = 2, #ARGV, 2 do
  local entry, id = ARGV[first], ARGV[first + 1]
  removed = removed + redis.call('XDEL', DEAD_LETTERS, entry)
  local state, letter = read_record(id, 'state', 'letter')
  -- A letter may be older than the request that has its id now.
  if state == 'dead' and letter == entry then
    redis.call('DEL', record_key(id), log_key(id), history_key(id))
  end
end
return removed
