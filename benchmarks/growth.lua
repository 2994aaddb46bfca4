-- For wrk: a crawler's mixture of requests to a sidecar. Arguments: the number of responses to wait
-- for, the number of the first URL, and the origins.
--
-- Of 20 requests 11 are checks, 1 is a batch of 20 URLs, 3 are leases with their 3 reports, 1 is a
-- lease that expires every other time, and 1 is refused.

local origins, leases, statuses = {}, {}, {}
local total, number, answered, turn = 0, 0, 0, 0

function setup(thread)
  only = thread
end

function init(args)
  total, number = tonumber(args[1]), tonumber(args[2])
  for place = 3, #args do
    origins[#origins + 1] = args[place]
  end
end

local function url()
  number = number + 1
  local path = number % 7 == 0 and "/private/" or "/page/"
  return origins[number % #origins + 1] .. path .. number
end

local function post(path, body)
  return wrk.format("POST", path, { ["Content-Type"] = "application/json" }, body)
end

local function lease(ttl)
  local host = origins[number % #origins + 1]
  number = number + 1
  return post("/v1/leases", string.format('{"url":"%s/page/%d","ttl":%d}', host, number, ttl))
end

local function batch()
  local urls = {}
  for place = 1, 20 do
    urls[place] = '"' .. url() .. '"'
  end
  return post("/v1/check", '{"urls":[' .. table.concat(urls, ",") .. "]}")
end

local function refused()
  local kinds = {
    function() return wrk.format("GET", "/v1/nothing/" .. number) end,
    function() return wrk.format("GET", "/v1/check?url=nonsense" .. number) end,
    function() return post("/v1/leases", "{") end,
    function() return post("/v1/leases", '{"url":"' .. origins[1] .. '/private/x"}') end,
    function() return post("/v1/leases/unknown" .. number .. "/report", "{}") end,
  }
  return kinds[number % #kinds + 1]()
end

function request()
  turn = turn % 20 + 1
  if turn % 5 == 0 and #leases > 0 then
    return post("/v1/leases/" .. table.remove(leases) .. "/report", '{"status":200,"elapsed":0.1}')
  elseif turn == 1 or turn == 6 or turn == 11 then
    return lease(60)
  elseif turn == 2 then
    return lease(1)
  elseif turn == 3 then
    return batch()
  elseif turn == 4 then
    return refused()
  end
  return wrk.format("GET", "/v1/check?url=" .. url())
end

function response(status, _, body)
  statuses[status] = (statuses[status] or 0) + 1
  if status == 201 then
    local id = body:match('^{"id":"([^"]+)"')
    if id and #leases < 1000 then
      leases[#leases + 1] = id
    end
  end
  answered = answered + 1
  if answered == total then
    told = ""
    for key, count in pairs(statuses) do
      told = told .. string.format(" %d:%d", key, count)
    end
    -- wrk itself would sleep on to the end of its time: whoever reads this interrupts it.
    io.write("enough\n")
    io.stdout:flush()
  end
end

function done(summary)
  local errors = summary.errors
  io.write("errors ", errors.connect + errors.read + errors.write + errors.timeout, "\n")
  io.write("statuses", only:get("told") or "", "\n")
end
