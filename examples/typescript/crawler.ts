// A polite crawler in TypeScript (Node.js 20 or newer), with `gatekeeper serve`. `npm run types`
// generates its types from the sidecar's /openapi.json.
//
//     npm install && npm run types && npm run build
//     npm run --silent crawl https://example.org/ https://example.org/about

import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

type Lease = components["schemas"]["LeaseBody"];
type Report = components["schemas"]["LeaseReport"];

const agent = "examplebot/1.0 (+https://example.org/bot)";
const token = process.env.GATEKEEPER_TOKEN;
const gate = createClient<paths>({
  baseUrl: process.env.GATEKEEPER_URL ?? "http://127.0.0.1:8750",
  headers: token ? { Authorization: `Bearer ${token}` } : {},
});
const tries = 3;

const sleep = (seconds: number) => new Promise((wake) => setTimeout(wake, seconds * 1000));

// Returns a lease for one request, or a text that says why there is none.
async function acquire(url: string): Promise<Lease | string> {
  for (let attempt = 1; ; attempt++) {
    const { data, error, response } = await gate.POST("/v1/leases", {
      body: { url, wait: 30, user_agent: agent },
    });
    if (data) return data;
    const seconds = Number(response.headers.get("Retry-After") ?? "1");
    if (![429, 503].includes(response.status) || seconds > 60 || attempt === tries)
      return error.decision
        ? `${error.decision.verdict} (${error.decision.reason})`
        : `no lease (${error.detail})`;
    await sleep(seconds);
  }
}

async function send(url: string): Promise<[Report, string]> {
  const began = performance.now();
  try {
    const page = await fetch(url, { headers: { "User-Agent": agent }, redirect: "manual" });
    const report: Report = { status: page.status, elapsed: (performance.now() - began) / 1000 };
    const retryAfter = page.headers.get("Retry-After");
    if (retryAfter) report.retry_after = retryAfter;
    const body = await page.arrayBuffer();
    return [report, `${page.status}, ${body.byteLength} bytes`];
  } catch (error) {
    return [{}, `failed (${error})`]; // no response: the host's clock runs nevertheless
  }
}

async function crawl(url: string): Promise<string> {
  const lease = await acquire(url);
  if (typeof lease === "string") return lease;
  const [report, outcome] = await send(url);
  await gate.POST("/v1/leases/{id}/report", { params: { path: { id: lease.id } }, body: report });
  return outcome;
}

// Denied URLs need no lease: find them with one question for all URLs.
const urls = process.argv.slice(2);
const { data } = await gate.POST("/v1/check", { body: { urls, user_agent: agent } });
const denied = data?.decisions.filter((decision) => decision.verdict === "deny") ?? [];
console.log(`${urls.length} URLs, ${denied.length} denied`);
const outcomes = await Promise.all(urls.map(crawl));
urls.forEach((url, number) => console.log(url, outcomes[number]));
