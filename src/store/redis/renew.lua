-- Renews slots of one key, and puts back those that are gone, even over the limit, because their
-- work is really running; but not those that a drain dropped after they had been acquired.
--
-- KEYS   the sorted set; its drain marker, without which nothing that is gone is put back
-- ARGV   a MessagePack list: the server ms after which nothing may be written any more; lease in ms;
--        number of slots; the weight of all; the first member of each; the server ms of the acquire of
--        each; the weight of each, unless all are 1
-- Reply  server ms; members that had lapsed; then for each slot 1 if renewed, 2 if put back, 0 if
--        drained, false if it came too late or its drain marker is not at hand: once if that is so of all
local key, cargo = KEYS[1], cmsgpack.unpack(ARGV[1])
local lease, n, total = cargo[2], cargo[3], cargo[4]
local lapsed = evict(key)
if now > cargo[1] then
  return { now, lapsed, false }
end

local function weight(i)
  return total > n and cargo[4 + 2 * n + i] or 1
end

local list, expires = {}, of(lease)[1]
for i = 1, n do
  add(list, expires, cargo[4 + i], weight(i))
end
-- Most often all are there: then one command tells that too.
local changed = 0
for i = 1, #list, PART do
  changed = changed + call('ZADD', key, 'XX', 'CH', unpack(list, i, min(i + PART - 1, #list)))
end
if changed == total then
  outlive(key, lease)
  return { now, lapsed, 1 }
end

local reply = { now, lapsed }
local held, drained = scores(key, cargo, 5, 1, n), KEYS[2] and call('GET', KEYS[2])
list = {}
for i = 1, n do
  local first, since = cargo[4 + i], cargo[4 + n + i]
  if not held[i] and not KEYS[2] then
    reply[i + 2] = false
  elseif held[i] or not drained or tonumber(drained) < since then
    add(list, expires, first, weight(i))
    reply[i + 2] = held[i] and 1 or 2
  else
    reply[i + 2] = 0
  end
end
if #list > 0 then
  put(key, list, lease)
end
return reply
