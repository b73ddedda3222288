-- Leaves a drain marker where the key of the slots is drained by itself afterwards.
--
-- KEYS   the drain marker
-- ARGV   how long to keep it, in ms
-- Reply  server ms, 0
redis.call('SET', KEYS[1], text(now), 'PX', ARGV[1])
return { now, 0 }
