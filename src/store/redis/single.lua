-- A flight at rest takes one slot, or gives one back, or both. Such a one is done here, before anything is
-- made that only larger ones need; whatever is out of the ordinary is left to what follows, as if
-- nothing had been. KEYS, ARGV and the reply are those of any flight.
--
-- A claim is written here before anything is removed: being the script's first write, it is refused by a
-- server without memory, and need not ask before. So a member of its own that had lapsed is held again,
-- and not told of as lapsed.
local cargo, type = cmsgpack.unpack(ARGV[1]), type
if not KEYS[2] and cargo[3] < 2 then
  local key, back, claims = KEYS[1], cargo[3], cargo[4]
  local limit, lease, total = cargo[5 + back], cargo[6 + back], cargo[7 + back]
  if claims == 0 and type(try('ZREM', key, cargo[5])) == 'number' then
    local lapsed = call('ZREMRANGEBYSCORE', key, '-inf', now)
    return { now, lapsed > 0 and { 1, lapsed } }
  end
  if total == 1 and now <= cargo[1] then
    local used = try('ZCARD', key)
    local added = type(used) == 'number' and used < limit and try('ZADD', key, now + lease, cargo[8 + back])
    if type(added) == 'number' then
      local gone = back == 1 and call('ZREM', key, cargo[5]) or 0
      local lapsed = used > 0 and call('ZREMRANGEBYSCORE', key, '-inf', now) or 0
      if used == 0 or call('PTTL', key) < lease + 10000 then
        call('PEXPIRE', key, 2 * lease + 10000)
      end
      return { now, lapsed > 0 and { 1, lapsed }, used + added - gone - lapsed }
    end
  end
end

