-- Renews slots of one key, and puts back those that are gone, even over the limit, because their
-- work is really running; but not those that a drain dropped after they had been acquired.
--
-- KEYS   the sorted set; its drain marker, without which nothing that is gone is put back
-- ARGV   the server ms after which nothing may be written any more; lease in ms; then of each slot:
--        weight, first member, server ms of its acquire
-- Reply  server ms; members that had lapsed; then for each slot 1 if renewed, 2 if put back, 0 if
--        drained, false if it came too late or its drain marker is not at hand
local key, lease, n = KEYS[1], tonumber(ARGV[2]), (#ARGV - 2) / 3
local reply = { now, evict(key) }

if now > tonumber(ARGV[1]) then
  for i = 1, n do
    reply[i + 2] = false
  end
  return reply
end

local held, drained = scores(key, ARGV, 4, 3, n), KEYS[2] and call('GET', KEYS[2])
local list, expires = {}, of(lease)[1]
for i = 1, n do
  local weight, first, since = tonumber(ARGV[3 * i]), ARGV[3 * i + 1], tonumber(ARGV[3 * i + 2])
  if not held[i] and not KEYS[2] then
    reply[i + 2] = false
  elseif held[i] or not drained or tonumber(drained) < since then
    add(list, expires, first, weight)
    reply[i + 2] = held[i] and 1 or 2
  else
    reply[i + 2] = 0
  end
end
if #list > 0 then
  put(key, list, lease)
end
return reply
