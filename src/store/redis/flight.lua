-- One flight: of each key, first the members that are given back, then the claims in their order,
-- each admitted whole or not at all. A claim that is held already is admitted and not counted twice.
--
-- It is kept to few commands and few arguments, for that is what a server spends its time on: a key
-- that is not there has nothing to evict and no TTL, and all numbers come in one argument.
--
-- KEYS   the sorted sets; a key may stand twice
-- ARGV   numbers, as MessagePack: the server ms after which nothing may be taken any more; the place
--        of the first key with claims, or 0; then of each key its limit, lease in ms, number of
--        members given back, number of claims, and the weight of each claim. After them, of each key,
--        the members given back, and of each claim its first member
-- Reply  server ms; false, or a list of what else is to be told of keys, as the key's place and
--        either how many members had lapsed or an error text; then of each claim the members in use
--        after it, or minus one minus those in use if it was refused, or false if it came too late
--        or its key is in trouble
local argv, type = ARGV, type
local number = cmsgpack.unpack(argv[1])
local late = now > number[1]
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
if number[2] > 0 then
  local text = trouble(try('ZADD', KEYS[number[2]], 'XX', 0, '-'))
  full = text and string.find(text, '^-?OOM') and text
end

local expiries = {}
local function expiry(lease)
  local text = expiries[lease]
  if not text then
    text = string.format('%.0f', now + lease)
    expiries[lease] = text
  end
  return text
end

-- Decides `n` claims, whose weights are numbers from `p` on and whose members are arguments from `at`
-- on, where `used` members are in use.
local function take(key, used, limit, lease, n, p, at)
  if n == 1 and number[p] == 1 and used < limit then
    reply[#reply + 1] = used + call('ZADD', key, expiry(lease), argv[at])
    outlive(key, lease, used == 0)
    return
  end
  local told, total, fresh = #reply, 0, used == 0
  for i = 0, n - 1 do
    total = total + number[p + i]
  end
  local all, held = used + total <= limit, nil
  if not all and not fresh then
    held = scores(key, argv, at, 1, n)
  end
  local list, expires = {}, expiry(lease)
  for i = 0, n - 1 do
    local weight, mine = number[p + i], held and held[i + 1]
    if all or mine or used + weight <= limit then
      used = used + (mine and 0 or weight)
      add(list, expires, argv[at + i], weight)
      reply[told + i + 1] = used
    else
      reply[told + i + 1] = -1 - used
    end
  end
  if #list > 0 and put(key, list, lease, fresh) < total and all then
    used = call('ZCARD', key)
    for i = 1, n do
      reply[told + i] = used
    end
  end
end

-- Gives back the arguments from `at` on, then counts: the members in use, or nil and what is wrong.
local function settle(i, key, back, at)
  local bad
  if back == 1 then
    bad = trouble(try('ZREM', key, argv[at]))
  else
    for from = at, at + back - 1, PART do
      bad = bad or trouble(try('ZREM', key, unpack(argv, from, min(from + PART, at + back) - 1)))
    end
  end
  local used = bad and 0 or try('ZCARD', key)
  bad = bad or trouble(used)
  if bad then
    return nil, bad
  end
  if used > 0 then
    local lapsed = evict(key)
    if lapsed > 0 then
      note(i, lapsed)
    end
    return used - lapsed
  end
  return 0
end

local p, at = 3, 2
for i, key in ipairs(KEYS) do
  local limit, lease, back, n = number[p], number[p + 1], number[p + 2], number[p + 3]
  -- One key's trouble, such as foreign data under it, is not the others'.
  local used, bad = settle(i, key, back, at)
  p, at = p + 4, at + back
  if n > 0 then
    bad = bad or full
    if bad or late then
      for _ = 1, n do
        reply[#reply + 1] = false
      end
    else
      take(key, used, limit, lease, n, p, at)
    end
    p, at = p + n, at + n
  end
  if bad then
    note(i, bad)
  end
end
return reply
