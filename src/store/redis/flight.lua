-- One flight: of each key, first the members that are given back, then the claims in their order,
-- each admitted whole or not at all. A claim that is held already is admitted and not counted twice.
--
-- KEYS   the sorted sets; a key may stand twice
-- ARGV   the server ms after which nothing may be taken any more; then of each key:
--        limit, lease in ms, number of members given back, number of claims,
--        the members given back, and of each claim its weight and its first member
-- Reply  server ms; then of each key an error text, or a list: members that had lapsed, and for each
--        claim the members in use after it, or minus one minus those in use if it was refused, or
--        false if it came too late
local late = now > tonumber(ARGV[1])

-- A server that has reached `maxmemory` refuses only the first write of a script, and here the first
-- one frees memory. So it is asked in advance, with a write that does nothing. Returns its refusal.
local function refusal()
  local at = 2
  for _, key in ipairs(KEYS) do
    if tonumber(ARGV[at + 3]) > 0 then
      local answer = redis.pcall('ZADD', key, 'XX', 0, '-')
      local text = type(answer) == 'table' and answer.err
      return text and string.find(text, '^-?OOM') and text
    end
    at = at + 4 + ARGV[at + 2]
  end
end

local full = refusal()

local function take(key, limit, lease, at, n)
  local used, total = redis.call('ZCARD', key), 0
  for i = 0, n - 1 do
    total = total + ARGV[at + 2 * i]
  end
  local all, held = used + total <= limit, nil
  if not all then
    held = scores(key, ARGV, at + 1, 2, n)
  end
  local list, answers, expires = {}, {}, string.format('%.0f', now + lease)
  for i = 0, n - 1 do
    local weight, first = tonumber(ARGV[at + 2 * i]), ARGV[at + 2 * i + 1]
    local mine = held and held[i + 1]
    if all or mine or used + weight <= limit then
      used = used + (mine and 0 or weight)
      add(list, expires, first, weight)
      answers[i + 1] = used
    else
      answers[i + 1] = -1 - used
    end
  end
  if #list > 0 and put(key, list, lease) < total and all then
    used = redis.call('ZCARD', key)
    for i = 1, n do
      answers[i] = used
    end
  end
  return answers
end

local function serve(key, at)
  local limit, lease = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  local back, n = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  at = at + 4
  local answer = { evict(key) }
  for i = at, at + back - 1, PART do
    redis.call('ZREM', key, unpack(ARGV, i, math.min(i + PART, at + back) - 1))
  end
  if n > 0 and full then
    error(full, 0)
  end
  if n > 0 then
    local taken = late and {} or take(key, limit, lease, at + back, n)
    for i = 1, n do
      answer[i + 1] = taken[i] or false
    end
  end
  return answer
end

local reply, at = { now }, 2
for i, key in ipairs(KEYS) do
  -- One key's trouble, such as foreign data under it, is not the others'.
  local fine, answer = pcall(serve, key, at)
  reply[i + 1] = fine and answer or (type(answer) == 'table' and answer.err) or tostring(answer)
  at = at + 4 + ARGV[at + 2] + 2 * ARGV[at + 3]
end
return reply
