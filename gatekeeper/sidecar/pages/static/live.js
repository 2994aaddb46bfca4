// The stream of decisions. The table has at most 200 rows and is redrawn four times a second, however
// many decisions arrive.
import { keepSession, tellStale } from "./app.js";

const MOST = 200;
const LATEST = 50;
const SIGNS = { allow: ["ok", "●"], deny: ["bad", "■"], defer: ["warn", "▲"] };
const root = document.body.dataset.root;
const body = document.getElementById("decisions");
const button = document.getElementById("pause");
const state = document.getElementById("live-state");
const dropped = document.getElementById("dropped");
let waiting = [];
let source = null;
let lastId = "";
let missed = 0;
let paused = false;

function cell(text, kind) {
  const one = document.createElement("td");
  one.textContent = text;
  if (kind) one.className = kind;
  return one;
}

function row(told) {
  const line = document.createElement("tr");
  const time = document.createElement("time");
  time.dateTime = told.time;
  time.title = told.time;
  time.textContent = told.time.slice(11, 19);
  const at = cell("");
  at.append(time);
  const [kind, sign] = SIGNS[told.verdict] || ["idle", "○"];
  const badge = document.createElement("span");
  badge.className = `badge ${kind}`;
  const mark = document.createElement("span");
  mark.setAttribute("aria-hidden", "true");
  mark.textContent = sign;
  badge.append(mark, ` ${told.verdict}`);
  const verdict = cell("");
  verdict.append(badge);
  const link = document.createElement("a");
  link.textContent = told.url;
  link.href = `explain?${new URLSearchParams({ url: told.url, user_agent: told.user_agent })}`;
  const url = cell("", "url");
  url.append(link);
  line.append(at, verdict, url, cell(told.reason), cell(told.line || "", "num"), cell(told.client));
  return line;
}

function draw() {
  if (!waiting.length) return;
  const rows = waiting.slice(-MOST).reverse().map(row);
  waiting = [];
  body.prepend(...rows);
  while (body.childElementCount > MOST) body.lastElementChild.remove();
}

function open() {
  const asked = new URLSearchParams(location.search);
  for (const [name, value] of [...asked]) if (!value) asked.delete(name);
  if (lastId) asked.set("last_event_id", lastId);
  else asked.set("latest", LATEST);
  source = new EventSource(`${root}events?${asked}`);
  source.addEventListener("hello", (event) => {
    lastId = event.lastEventId;
    state.textContent = JSON.parse(event.data).restarted
      ? "The sidecar was restarted: earlier decisions are not shown."
      : "Live.";
    tellStale("");
  });
  source.addEventListener("decision", (event) => {
    lastId = event.lastEventId;
    waiting.push(JSON.parse(event.data));
    if (waiting.length > 2 * MOST) waiting.splice(0, waiting.length - MOST);
  });
  source.addEventListener("beat", (event) => { lastId = event.lastEventId; });
  source.addEventListener("dropped", (event) => {
    missed += JSON.parse(event.data).now;
    dropped.textContent = `${missed.toLocaleString()} not shown: more arrived than can be displayed`;
  });
  source.onerror = () => {
    if (paused) return;
    tellStale("The data are stale: the stream broke off. Reconnecting.");
    if (source.readyState === EventSource.CLOSED) {
      setTimeout(() => { if (!paused) open(); }, 5000);
      tellWhy(source.url);
    }
  };
}

/** An EventSource does not say why it was refused; the response to the same request does. */
async function tellWhy(url) {
  const stop = new AbortController();
  try {
    const answer = await fetch(url, { signal: stop.signal });
    if (answer.ok || paused) return;
    const why = (await answer.json()).detail;
    tellStale(`The data are stale: ${why}. Reconnecting.`);
  } catch {
    // The sidecar can't be reached, which the page says already.
  } finally {
    stop.abort();
  }
}

button.hidden = false;
button.addEventListener("click", () => {
  paused = !paused;
  button.textContent = paused ? "Resume" : "Pause";
  if (paused) {
    source.close();
    draw();
    state.textContent = "Paused. After resuming you see the decisions in between that are still kept.";
  } else {
    open();
  }
});
addEventListener("pagehide", () => { if (source) source.close(); });
setInterval(draw, 250);
keepSession();
open();
