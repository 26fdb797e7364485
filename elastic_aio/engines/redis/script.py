"""The operations of a store as one Lua script, which Redis runs without interruption.

All keys of a store are in one slot of a Redis Cluster, by their hash tag::

    {TAG}v   hash: the values by key
    {TAG}i   sorted set: the same keys in order, for prefixes
    {TAG}m   hash: the incarnation, the epoch and the revision of the store, and its time
    {TAG}o   hash: the lease of each leased key
    {TAG}k   sorted set: `LEASE KEY` in order, for the keys of a lease
    {TAG}d   sorted set: the deadlines of the leases
    {TAG}t   hash: the times to live of the leases
    {TAG}q   hash: the items of all queues, with the bounds of each

A change is published on the channel `{TAG}c` and its key, an item on `{TAG}q` and the key of its
queue.  Every run of the script first ends the leases whose deadline has passed, so no client sees a
key of an expired lease.

A client numbers its connections, and the script carries out nothing of a connection that the client
has given up and reads no reply from: a request that the network or a proxy held back never
replaces a later change.

The time of leases stands still while the server serves no client: after a pause of more than half
its time to live a lease is prolonged, since its holder could not renew it.

An epoch is the time for which one server process has the keys, with one history: an id that INFO
shows, and that each promotion replaces.  So a master that has followed another master in between
begins an epoch too, although its process and its connections are the same.  A client sends the
epoch and the revision that it knows.  If the epoch ended before that revision, a fail-over or a
restart has lost changes that had been acknowledged.  Then all leases end, and the store begins
another incarnation, which refuses every client of the former incarnation.
"""

from __future__ import annotations

from typing import Final

KEYS: Final = (b"v", b"i", b"m", b"o", b"k", b"d", b"t", b"q")

DONE: Final = b"1"
LOST: Final = b"0"
LEASE_ENDED: Final = b"2"
"""The first word of a reply; then come the incarnation, the epoch, the revision, the shortest time
to live, and the time until the next lease expires.  They are one text, which is parsed at once."""

PAGE: Final = 256
"""Keys that a scan returns at once; and a page ends after about 1 MiB of values."""

SCRIPT: Final = rb"""
local V, I, M, O, K, D, T, Q = unpack(KEYS)
local op, tag, known_id, known_epoch, known_rev, server, keep, client, number, run =
  unpack(ARGV, 1, 10)
local A = 10
local nonce = client .. run
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
known_rev, keep, number = tonumber(known_rev), tonumber(keep), tonumber(number)
-- The operations that may be carried out by a server whose memory is full; 2: it reads only.
local frugal = {touch=2, release=1, revoke=1, del=1, pop=1, purge=1, peek=2, read=2, check=2,
  scan=2, names=2, count=2, qlen=2}
local is_read = frugal[op] == 2
local meta = call('HMGET', M, 'id', 'epoch', 'rev', 'last', 'ttl', 'server', 'c:' .. client)
local id, epoch, rev, last, ttl = meta[1], meta[2], tonumber(meta[3] or 0), tonumber(meta[4] or 0),
  tonumber(meta[5] or 0)
local began_rev = rev

local function say(channel, kind, value, its_ttl)
  rev = rev + 1
  call('PUBLISH', tag .. channel, kind .. ' ' .. string.format('%.0f', rev) .. ' '
    .. (its_ttl or 0) .. ' ' .. value)
end

local function unbind(key)
  local lease = call('HGET', O, key)
  if lease then
    call('HDEL', O, key)
    call('ZREM', K, lease .. ' ' .. key)
  end
end

local function put(key, value, lease)
  call('HSET', V, key, value)
  call('ZADD', I, 0, key)
  unbind(key)
  local its_ttl
  if lease and lease ~= '' then
    call('HSET', O, key, lease)
    call('ZADD', K, 0, lease .. ' ' .. key)
    its_ttl = call('HGET', T, lease)
  end
  say('c' .. key, 0, value, its_ttl)
end

local function drop(key, kind)
  if call('HDEL', V, key) == 0 then return 0 end
  call('ZREM', I, key)
  unbind(key)
  say('c' .. key, kind, '')
  return 1
end

local function end_lease(lease, kind)
  for _, member in ipairs(call('ZRANGEBYLEX', K, '[' .. lease .. ' ', '(' .. lease .. '!')) do
    drop(string.sub(member, #lease + 2), kind)
  end
  call('HDEL', T, lease)
  return call('ZREM', D, lease)
end

local function begin()
  id, epoch = nonce, nonce
  call('HSET', M, 'id', id, 'epoch', epoch, 'server', server, 'rev', rev, 'last', now)
end

-- A write of this kind is not refused by a full server, nor are those after it.
local function allow() call('HDEL', M, '') end

local function bounds(key)
  local found = call('HMGET', Q, 'h' .. key, 't' .. key)
  return tonumber(found[1] or 0), tonumber(found[2] or 0)
end

local function item(number, key) return 'i' .. string.format('%.0f', number) .. key end

-- The client knows the run id if its user may call INFO.
if server ~= '' then
  local info = redis.pcall('INFO', 'replication')
  local _, at = string.find(type(info) == 'string' and info or '', 'master_replid:', 1, true)
  if at then server = server .. string.sub(info, at + 1, at + 40) end
end

if id then
  if frugal[op] then allow() end
  local present = tonumber(meta[7] or 1)
  if number < present then return {'0'} end
  if number > present then call('HSET', M, 'c:' .. client, number) end
  if server ~= '' and server ~= meta[6] then
    allow()
    call('HSET', M, 'e:' .. epoch, rev, 'epoch', nonce, 'server', server)
    epoch = nonce
  end
  if known_id ~= '' then
    if known_id ~= id then return {'0'} end
    local limit = rev
    if known_epoch ~= epoch then
      limit = tonumber(call('HGET', M, 'e:' .. known_epoch) or -1)
    end
    if known_rev > limit then
      allow()
      for _, lease in ipairs(call('ZRANGE', D, 0, -1)) do end_lease(lease, 2) end
      call('DEL', M)
      begin()
      return {'0'}
    end
  end
  local pause = now - last
  if ttl > 0 and (pause < 0 or pause > ttl / 2) then
    allow()
    local ttls = call('HGETALL', T)
    for at = 1, #ttls, 2 do
      local its_ttl = tonumber(ttls[at + 1])
      if pause < 0 or pause > its_ttl / 2 then call('ZADD', D, now + its_ttl, ttls[at]) end
    end
  end
  for _, lease in ipairs(call('ZRANGEBYSCORE', D, '-inf', now, 'LIMIT', 0, 1000)) do
    end_lease(lease, 2)
  end
  if pause < 0 or pause > 100 then redis.pcall('HSET', M, 'last', now) end
elseif known_id ~= '' then
  return {'0'}
elseif not is_read then
  begin()
end

local ops = {}

function ops.touch()
  if ARGV[A + 1] == '1' then
    for _, key in ipairs(KEYS) do call('PEXPIRE', key, keep) end
  end
  local ended = {}
  for at = A + 2, #ARGV do
    local its_ttl = call('HGET', T, ARGV[at])
    if its_ttl then call('ZADD', D, now + its_ttl, ARGV[at]) else ended[#ended + 1] = ARGV[at] end
  end
  return ended
end

function ops.grant()
  local lease, its_ttl = ARGV[A + 1], tonumber(ARGV[A + 2])
  call('ZADD', D, now + its_ttl, lease)
  call('HSET', T, lease, its_ttl)
  if ttl == 0 or its_ttl < ttl then
    ttl = its_ttl
    call('HSET', M, 'ttl', ttl)
  end
end

function ops.release() return end_lease(ARGV[A + 1], 1) end
function ops.revoke() return end_lease(ARGV[A + 1], 2) end

local function lease_of(at)
  local lease = ARGV[at]
  return lease, lease == '' or call('ZSCORE', D, lease)
end

function ops.set()
  local lease, is_alive = lease_of(A + 3)
  if not is_alive then return nil, 2 end
  put(ARGV[A + 1], ARGV[A + 2], lease)
end

function ops.cas()
  local key, expected, desired = ARGV[A + 1], ARGV[A + 2], ARGV[A + 3]
  local lease, is_alive = lease_of(A + 4)
  if not is_alive then return nil, 2 end
  local current = call('HGET', V, key)
  if current == expected or (not current and expected == '') then
    put(key, desired, lease)
    return desired
  end
  return current or expected
end

-- Only small numbers are exact in Lua: the client adds others, and sends the sum to `swap`.
function ops.add()
  local key = ARGV[A + 1]
  local current = call('HGET', V, key)
  local is_small = not current or (#current <= 15 and string.match(current, '^%-?%d+$'))
  if #ARGV[A + 2] > 15 or not is_small then
    return {0, current}
  end
  put(key, string.format('%.0f', tonumber(current or 0) + tonumber(ARGV[A + 2])))
  return {1, call('HGET', V, key)}
end

function ops.swap()
  local key, expected, desired = ARGV[A + 1], ARGV[A + 2], ARGV[A + 3]
  if call('HGET', V, key) ~= expected then return 0 end
  put(key, desired)
  return 1
end

function ops.append() put(ARGV[A + 1], (call('HGET', V, ARGV[A + 1]) or '') .. ARGV[A + 2]) end
function ops.del() return drop(ARGV[A + 1], 1) end

function ops.mset()
  for at = A + 1, #ARGV, 2 do put(ARGV[at], ARGV[at + 1]) end
end

function ops.peek() return call('HGET', V, ARGV[A + 1]) end
function ops.count() return call('HLEN', V) end

function ops.read()
  local found = {}
  for at = A + 2, #ARGV do
    local value = call('HGET', V, ARGV[at])
    if not value and ARGV[A + 1] == '1' then
      value = call('HGET', Q, item((bounds(ARGV[at])) + 1, ARGV[at]))
    end
    found[#found + 1] = value
  end
  return found
end

function ops.check()
  for at = A + 1, #ARGV do
    local head, tail = bounds(ARGV[at])
    if tail == head and call('HEXISTS', V, ARGV[at]) == 0 then return 1 end
  end
  return 0
end

function ops.names()
  return call('ZRANGEBYLEX', I, ARGV[A + 1], ARGV[A + 2], 'LIMIT', 0, ARGV[A + 3])
end

function ops.scan()
  local found, size = {0, string.format('%.0f', rev)}, 0
  local keys = ops.names()
  for at, key in ipairs(keys) do
    local value = call('HGET', V, key) or ''
    found[#found + 1], found[#found + 2] = key, value
    size = size + #key + #value
    if size > 1048576 and at < #keys then
      found[1] = 1
      return found
    end
  end
  found[1] = #keys == tonumber(ARGV[A + 3]) and 1 or 0
  return found
end

function ops.push()
  local key, value, is_front = ARGV[A + 1], ARGV[A + 2], ARGV[A + 3] == '1'
  local head, tail = bounds(key)
  if is_front then
    call('HSET', Q, item(head, key), value)
    call('HSET', Q, 'h' .. key, head - 1)
  else
    call('HSET', Q, item(tail + 1, key), value)
    call('HSET', Q, 't' .. key, tail + 1)
  end
  say('q' .. key, 0, value)
end

function ops.pop()
  local key = ARGV[A + 1]
  local head, tail = bounds(key)
  if head == tail then return {0, ''} end
  local field = item(head + 1, key)
  local value = call('HGET', Q, field)
  call('HDEL', Q, field)
  if tail - head == 1 then
    call('HDEL', Q, 'h' .. key, 't' .. key)
  else
    call('HSET', Q, 'h' .. key, head + 1)
  end
  rev = rev + 1
  return {tail - head, value}
end

function ops.qlen()
  local head, tail = bounds(ARGV[A + 1])
  return tail - head
end

function ops.purge()
  local first = ARGV[A + 3]
  if call('HGET', V, ARGV[A + 1]) ~= ARGV[A + 2] then return 0 end
  if call('ZRANGEBYLEX', I, '[' .. first, '(' .. first .. '\255', 'LIMIT', 0, 1)[1] then
    return 0
  end
  return call('UNLINK', unpack(KEYS))
end

local result, status = ops[op]()
if op == 'purge' and result > 0 then return {'1   0 0 0', result} end
if rev ~= began_rev then call('HSET', M, 'rev', string.format('%.0f', rev)) end
if keep > 0 and not is_read then
  local left = call('PTTL', M)
  if left == -1 then
    call('PEXPIRE', M, keep)
    left = keep
  end
  for _, key in ipairs(KEYS) do
    if call('PTTL', key) == -1 then call('PEXPIRE', key, left) end
  end
end
local due = call('ZRANGE', D, 0, 0, 'WITHSCORES')[2]
due = due and math.max(1, due - now) or 0
return {string.format('%d %s %s %.0f %.0f %.0f', status or 1, id or '', epoch or '', rev, ttl, due),
  result or false}
"""
