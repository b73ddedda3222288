-- KEYS the sorted set. Reply: server ms, members in use. Writes nothing.
return { now, call('ZCOUNT', KEYS[1], '(' .. text(now), '+inf') }
