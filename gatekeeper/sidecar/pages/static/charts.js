// The three charts of the overview, from the series of the last hour. They share a legend and a
// cursor: the legend shows the values at the cursor, or else the latest ones.
import { tellStale } from "./app.js";

const root = document.body.dataset.root;
const section = document.getElementById("charts");
// Titles, names in the legend, and the values of the series with their labels.
const SHOWN = [
  ["Decisions per second", "Decisions", { allow: "allow", deny: "deny", defer: "defer" }],
  ["Wait for a lease, seconds", "Wait", { wait_p50: "median", wait_p95: "95th percentile" }],
  ["robots.txt fetches per 10 s", "Fetches", { robots_ok: "successful", robots_failed: "failed" }],
];
const value = ([name, label]) =>
  `<span class="whole"><i class="line"></i> ${label} <b data-value="${name}">-</b></span> `;
const legend = SHOWN.map(([, short, series]) => `<p>${short}: ${Object.entries(series).map(value).join("")}</p>`);
const figures = SHOWN.map(([title]) => `<figure><figcaption>${title}</figcaption>
  <div class="chart" role="img" tabindex="0" aria-label="${title}: see the table below"></div></figure>`);
section.innerHTML = `<h2>The last hour</h2>
  <div class="legend"><p><time id="moment">No values yet</time></p>${legend.join("")}</div>
  <div class="charts">${figures.join("")}</div>`;
const moment = document.getElementById("moment");
const HUES = ["--one", "--two", "--three"];
const DASHES = [[], [8, 4], [2, 3]];
const CHARTS = [...section.querySelectorAll(".chart")].map((place, n) => ({
  place,
  values: [...section.querySelectorAll(`.legend p:nth-of-type(${n + 2}) [data-value]`)],
  plot: null,
}));
let series = null;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });

function draw(chart) {
  const data = [series.times, ...chart.values.map((one) => series.values[one.dataset.value])];
  if (chart.plot) {
    chart.plot.setData(data);
    return;
  }
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  chart.plot = new uPlot({
    width: chart.place.clientWidth, height: 170, tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), "UTC"),
    cursor: { y: false, drag: { setScale: false }, sync: { key: "hour" } }, legend: { show: false },
    hooks: { setCursor: [(plot) => show(plot.cursor.idx)] },
    scales: {
      x: { range: (_, low, high) => lastMinutes(low, high ?? Date.now() / 1e3) },
      y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] },
    },
    axes: [
      { ...axis, space: 70, size: 28, values: [[60, "{HH}:{mm}"], [1, "{HH}:{mm}:{ss}"]] },
      { ...axis, size: 52, values: (_, ticks) => ticks.map((one) => NUMBER.format(one)) },
    ],
    series: [{}, ...chart.values.map((_, n) => ({
      stroke: colour(HUES[n]), width: 2, dash: DASHES[n], points: { show: false },
    }))],
  }, data, chart.place);
}

/** The range of the time axis: ten minutes at least, also before the first values. */
function lastMinutes(low, high) {
  return [Math.min(low ?? high, high - 600), high];
}

/** Show the values of one moment in the legend; `at` is its index, null: the latest. */
function show(at) {
  const last = series.times.length - 1;
  const n = at ?? last;
  if (n < 0 || n > last) return;
  const time = new Date(series.times[n] * 1e3).toISOString();
  moment.dateTime = time;
  moment.textContent = `At ${time.slice(11, 19)} UTC${at === null || at === undefined ? " (latest)" : ""}`;
  for (const { values } of CHARTS) {
    for (const one of values) {
      const value = series.values[one.dataset.value][n];
      one.textContent = value === null ? "-" : NUMBER.format(value);
    }
  }
}

/** Move the cursor of all charts by the arrow keys. */
function step(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const { plot } = CHARTS.find(({ place }) => place === event.currentTarget);
  if (!by || !plot) return;
  const last = series.times.length - 1;
  const at = Math.max(0, Math.min(last, (plot.cursor.idx ?? last + 1) + by));
  plot.setCursor({ left: plot.valToPos(series.times[at], "x"), top: 1 });
  event.preventDefault();
}

async function update() {
  if (document.hidden) return;
  try {
    const answer = await fetch(`${root}series`, { credentials: "same-origin" });
    if (!answer.ok) return;
    series = await answer.json();
    CHARTS.forEach(draw);
    show(CHARTS[0].plot.cursor.idx);
  } catch {
    tellStale("The data are stale: the sidecar does not answer. Trying again.");
  }
}

function again() {
  for (const chart of CHARTS) {
    if (chart.plot) chart.plot.destroy();
    chart.plot = null;
  }
  update();
}

section.hidden = false;
for (const { place } of CHARTS) place.addEventListener("keydown", step);
update();
setInterval(update, 10000);
let size;
addEventListener("resize", () => { clearTimeout(size); size = setTimeout(again, 200); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
