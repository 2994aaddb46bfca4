// Explains an edited text while the reader types. Nothing is stored.
import { patch, tellStale } from "./app.js";

const text = document.getElementById("what-if");
const story = document.getElementById("story");
const form = document.getElementById("question");
let timer;
let asked = 0;

async function ask() {
  const mine = ++asked;
  const agent = form.elements.user_agent;
  try {
    const answer = await fetch(`${document.body.dataset.root}what-if`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      credentials: "same-origin",
      body: JSON.stringify({
        robots_txt: text.value, url: form.elements.url.value, user_agent: agent.value || agent.placeholder,
      }),
    });
    if (mine !== asked || !answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    patch(story, page.getElementById("story"));
    tellStale("");
  } catch {
    tellStale("The sidecar does not answer: the last answer is shown.");
  }
}

if (text) text.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(ask, 200); });
