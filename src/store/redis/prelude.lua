-- What most scripts share.
local unpack, min = unpack, math.min

-- Commands take numbers as text; written here once, they are not written again for each command, and
-- not in as many digits as a number may have.
local function text(number)
  return string.format('%.0f', number)
end

-- The texts that a lease needs: when it runs out, and the TTL of a key with such slots.
local texts = {}
local function of(lease)
  local both = texts[lease]
  if not both then
    both = { text(now + lease), text(2 * lease + 10000) }
    texts[lease] = both
  end
  return both
end

-- `unpack` fails on lists of thousands, so commands take their arguments in parts of this many.
local PART = 2000

local now_text
local function evict(key)
  now_text = now_text or text(now)
  return call('ZREMRANGEBYSCORE', key, '-inf', now_text)
end

-- Appends score and name of each member of a claim: the first one and those that follow in number.
local function add(list, score, first, weight)
  list[#list + 1] = score
  list[#list + 1] = first
  if weight > 1 then
    local stem, number = string.sub(first, 1, 29), tonumber(string.sub(first, 30), 16)
    for i = 1, weight - 1 do
      list[#list + 1] = score
      list[#list + 1] = string.format('%s%08x', stem, number + i)
    end
  end
end

-- Sees to it that a key outlives its members: its TTL is only ever raised, with room, so that a key in
-- steady use is touched once a lease. A fresh key has none yet.
local function outlive(key, lease, fresh)
  if fresh or call('PTTL', key) < lease + 10000 then
    call('PEXPIRE', key, of(lease)[2])
  end
end

-- Writes a list of scores and members.
local function put(key, list, lease, fresh)
  local added = 0
  for i = 1, #list, PART do
    added = added + call('ZADD', key, unpack(list, i, min(i + PART - 1, #list)))
  end
  outlive(key, lease, fresh)
  return added
end

-- The scores of members that stand in `list` at every `step`th place from `at` on, `n` of them.
local function scores(key, list, at, step, n)
  local found, names = {}, {}
  for i = 0, n - 1 do
    names[#names + 1] = list[at + i * step]
    if #names == PART or i == n - 1 then
      for _, score in ipairs(call('ZMSCORE', key, unpack(names))) do
        found[#found + 1] = score
      end
      names = {}
    end
  end
  return found
end
