-- KEYS the sorted set. Reply: server ms, its TTL in ms. Writes nothing.
return { now, redis.call('PTTL', KEYS[1]) }
