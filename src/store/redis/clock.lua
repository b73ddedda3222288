-- Stands before all else. The server's clock, in Unix ms, is the only one.
local call, try = redis.call, redis.pcall
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

