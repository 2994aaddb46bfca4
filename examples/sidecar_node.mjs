// A polite crawler in JavaScript (Node.js 18 or newer), with `gatekeeper serve`.
//
//     node examples/sidecar_node.mjs https://example.org/ https://example.org/about

const base = process.env.GATEKEEPER_URL ?? "http://127.0.0.1:8750";
const agent = "examplebot/1.0 (+https://example.org/bot)";
const headers = { "Content-Type": "application/json" };
if (process.env.GATEKEEPER_TOKEN) headers.Authorization = `Bearer ${process.env.GATEKEEPER_TOKEN}`;

async function post(path, body) {
  const response = await fetch(base + path, { method: "POST", headers, body: JSON.stringify(body) });
  const text = await response.text();
  return { status: response.status, body: text ? JSON.parse(text) : null };
}

async function crawl(url) {
  // Take a lease: 201, or a problem document that says why there is none.
  const lease = await post("/v1/leases", { url, wait: 30, user_agent: agent });
  if (lease.body.decision && lease.status !== 201)
    return `${lease.body.decision.verdict} (${lease.body.decision.reason})`;
  if (lease.status !== 201) return `no lease (${lease.body.detail})`;
  let report = {}; // no response: the host's clock runs nevertheless
  try {
    const began = performance.now();
    const response = await fetch(url, { headers: { "User-Agent": agent }, redirect: "manual" });
    report = { status: response.status, elapsed: (performance.now() - began) / 1000 };
    const retryAfter = response.headers.get("Retry-After");
    if (retryAfter) report.retry_after = retryAfter;
    const body = await response.arrayBuffer();
    return `${response.status}, ${body.byteLength} bytes`;
  } catch (error) {
    return `failed (${error.cause?.code ?? error.message})`;
  } finally {
    await post(`/v1/leases/${lease.body.id}/report`, report);
  }
}

const urls = process.argv.slice(2);
const outcomes = await Promise.all(urls.map(crawl));
urls.forEach((url, number) => console.log(url, outcomes[number]));
