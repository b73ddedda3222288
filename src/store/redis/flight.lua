-- One flight: of each key, first the members that are given back, then the claims in their order,
-- each admitted whole or not at all. A claim that is held already is admitted and not counted twice.
--
-- It is kept to few commands and few arguments, for that is what a server spends its time on: a key
-- that is not there has nothing to evict and no TTL, and all but the keys comes in one argument.
--
-- KEYS   the sorted sets; a key may stand twice
-- ARGV   a MessagePack list: the server ms after which nothing may be taken any more; the place of
--        the first key with claims, or 0; then of each key the number of members given back, the
--        number of claims, and those members. Where there are claims, then: the limit, the lease in
--        ms, the weight of all claims; the weight of each, unless all are 1; the first member of each
-- Reply  server ms; false, or a list of what else is to be told of keys, as the key's place and
--        either how many members had lapsed or an error text; then of each key with claims the
--        members in use if all were admitted, or minus one minus those in use if none was; else a
--        list of the same for each claim; or false if they came too late or the key is in trouble
local late = now > cargo[1]
local reply, notes = { now, false }, {}

local function note(key, what)
  notes[#notes + 1] = key
  notes[#notes + 1] = what
  reply[2] = notes
end

local function trouble(answer)
  return type(answer) == 'table' and answer.err
end

-- A server that has reached `maxmemory` refuses only the first write of a script, and here the first
-- one frees memory. So it is asked before, with a write that does nothing. Its refusal, if any.
local full
if cargo[2] > 0 then
  local text = trouble(try('ZADD', KEYS[cargo[2]], 'XX', 0, '-'))
  full = text and string.find(text, '^-?OOM') and text
end

-- Decides claims of which not all fit: the weights, unless all are 1, stand from `weights` on, and the
-- members from `at` on.
local function sift(key, used, limit, lease, n, weights, at)
  local held = used > 0 and scores(key, cargo, at, 1, n)
  local list, verdicts, none, expires = {}, {}, true, of(lease)[1]
  for i = 0, n - 1 do
    local weight, mine = weights and cargo[weights + i] or 1, held and held[i + 1]
    if mine or used + weight <= limit then
      used, none = used + (mine and 0 or weight), false
      add(list, expires, cargo[at + i], weight)
      verdicts[i + 1] = used
    else
      verdicts[i + 1] = -1 - used
    end
  end
  if none then
    return -1 - used
  end
  put(key, list, lease)
  return verdicts
end

-- Decides `n` claims, which stand from `p` on, where `used` members are in use.
local function take(key, used, n, p)
  local limit, lease, total = cargo[p], cargo[p + 1], cargo[p + 2]
  local weights = total > n and p + 3
  local at = weights and weights + n or p + 3
  if used + total > limit then
    return sift(key, used, limit, lease, n, weights, at)
  end
  local fresh, expires = used == 0, of(lease)[1]
  if total == 1 then
    used = used + call('ZADD', key, expires, cargo[at])
    outlive(key, lease, fresh)
    return used
  end
  local list = {}
  for i = 0, n - 1 do
    add(list, expires, cargo[at + i], weights and cargo[weights + i] or 1)
  end
  return used + put(key, list, lease, fresh)
end

-- Gives back the members that stand from `at` on; what is wrong, if anything is.
local function give_back(key, back, at)
  if back == 1 then
    return trouble(try('ZREM', key, cargo[at]))
  end
  local bad
  for from = at, at + back - 1, PART do
    bad = bad or trouble(try('ZREM', key, unpack(cargo, from, min(from + PART, at + back) - 1)))
  end
  return bad
end

local p = 3
for i, key in ipairs(KEYS) do
  local back, n, used, lapsed = cargo[p], cargo[p + 1], nil, 0
  p = p + 2 + back
  -- One key's trouble, such as foreign data under it, is not the others'.
  local bad = back > 0 and give_back(key, back, p - back)
  if not bad and n > 0 then
    used = try('ZCARD', key)
    bad = trouble(used)
  end
  if not bad and used ~= 0 then
    lapsed = evict(key)
    if lapsed > 0 then
      note(i, lapsed)
    end
  end
  if n > 0 then
    bad = bad or full
    reply[#reply + 1] = not bad and not late and take(key, used - lapsed, n, p)
    p = p + 3 + (cargo[p + 2] > n and 2 * n or n)
  end
  if bad then
    note(i, bad)
  end
end
return reply
