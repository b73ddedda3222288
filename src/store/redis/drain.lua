-- Drops all members of a key, and leaves a marker of when, so that no renewal brings them back.
--
-- KEYS   the sorted set; its drain marker, unless that was left before
-- ARGV   lease in ms
-- Reply  server ms, members dropped
evict(KEYS[1])
local dropped = call('ZCARD', KEYS[1])
-- A holder may have a longer lease than who drains: the key outlives its slots by 10 s.
local keep = math.max(2 * ARGV[1], call('PTTL', KEYS[1]) - 10000)
-- The marker first: where it cannot be set, nothing may be dropped, as renewals would put it back.
if KEYS[2] then
  call('SET', KEYS[2], text(now), 'PX', text(keep))
end
call('DEL', KEYS[1])
return { now, dropped }
