-- First words on a connection. Reply: server ms, the version (absent before Redis 7.0).
return { now, redis.REDIS_VERSION or '' }
