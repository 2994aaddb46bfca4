// The three charts of the overview, from the series of the last hour.
import { tellStale } from "./app.js";

const root = document.body.dataset.root;
const CHARTS = {
  decisions: [["allow", "--one"], ["deny", "--two"], ["defer", "--three"]],
  waits: [["wait_p50", "--one", "median"], ["wait_p95", "--two", "95th percentile"]],
  robots: [["robots_ok", "--one", "fetched"], ["robots_failed", "--two", "failed"]],
};
const plots = new Map();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(place, names, body) {
  const data = [body.times, ...names.map(([name]) => body.values[name])];
  const known = plots.get(place);
  if (known) {
    known.setData(data);
    return;
  }
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const options = {
    width: place.clientWidth, height: 190, cursor: { y: false }, legend: { live: false },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [{ ...axis, space: 70, values: [[60, "{HH}:{mm}"], [1, "{HH}:{mm}:{ss}"]] }, { ...axis, size: 52 }],
    series: [{}, ...names.map(([name, hue, label], n) => ({
      label: label || name, stroke: colour(hue), width: 2, dash: [[], [8, 4], [2, 3]][n], points: { show: false },
    }))],
  };
  plots.set(place, new uPlot(options, data, place));
}

async function update() {
  if (document.hidden) return;
  try {
    const answer = await fetch(`${root}series`, { credentials: "same-origin" });
    if (!answer.ok) return;
    const body = await answer.json();
    for (const place of document.querySelectorAll("[data-chart]")) {
      draw(place, CHARTS[place.dataset.chart], body);
    }
  } catch {
    tellStale("The data are stale: the sidecar does not answer. Trying again.");
  }
}

function again() {
  for (const [place, plot] of plots) {
    plot.destroy();
    plots.delete(place);
  }
  update();
}

update();
setInterval(update, 10000);
let size;
addEventListener("resize", () => { clearTimeout(size); size = setTimeout(again, 200); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
