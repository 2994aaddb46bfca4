// Keeps a page up to date: the page is requested again periodically, and the differences are
// applied in place. The response is parsed as an inert document, in which no script runs, and its
// nodes are compared one by one. If the sidecar does not answer, the page says so.

const stale = document.getElementById("stale");
const seconds = Number(document.body.dataset.refresh || 0);
let lastGood = Date.now();
let failures = 0;

/** Make `there` look like `here` without losing focus, selection or opened parts. */
export function patch(there, here) {
  if (there.nodeType !== here.nodeType || there.nodeName !== here.nodeName) {
    there.replaceWith(document.importNode(here, true));
    return;
  }
  if (there.nodeType === Node.TEXT_NODE) {
    if (there.data !== here.data) there.data = here.data;
    return;
  }
  if (there.nodeType !== Node.ELEMENT_NODE || (there.dataset.keep && there.dataset.keep === here.dataset.keep)) {
    // Forms in a part that is kept get the current secret of our pages.
    if (there.dataset) syncForms(there, here);
    return;
  }
  for (const { name, value } of [...here.attributes]) {
    if (there.getAttribute(name) !== value) there.setAttribute(name, value);
  }
  for (const { name } of [...there.attributes]) {
    if (!here.hasAttribute(name) && !(name === "open" && there.nodeName === "DETAILS")) {
      there.removeAttribute(name);
    }
  }
  if (there === document.activeElement && there.matches("input, textarea, select")) return;
  patchChildren(there, here);
}

function syncForms(there, here) {
  const fresh = here.querySelector('input[name="form"]');
  if (fresh) for (const one of there.querySelectorAll('input[name="form"]')) one.value = fresh.value;
}

function patchChildren(there, here) {
  const wanted = [...here.childNodes];
  const named = new Map();
  for (const one of there.children) if (one.id) named.set(one.id, one);
  let at = there.firstChild;
  for (const one of wanted) {
    const known = one.id && named.get(one.id);
    if (known && known !== at) {
      there.insertBefore(known, at);
      at = known;
    }
    if (!at) {
      there.append(document.importNode(one, true));
    } else {
      const next = at.nextSibling;
      patch(at, one);
      at = next;
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

export function tellStale(text) {
  if (stale.textContent !== text) stale.textContent = text;
  stale.hidden = !text;
}

function since() {
  return new Date(lastGood).toLocaleTimeString();
}

async function refresh() {
  if (document.hidden) return;
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), 10000);
  try {
    const answer = await fetch(location.href, {
      headers: { Accept: "text/html" }, signal: stop.signal, credentials: "same-origin",
    });
    if (answer.redirected && answer.url.includes("/sign-in")) {
      tellStale(`Your session has ended: the data are from ${since()}. Reload the page to sign in again.`);
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    patch(document.getElementById("main"), page.getElementById("main"));
    patch(document.getElementById("state"), page.getElementById("state"));
    lastGood = Date.now();
    failures = 0;
    tellStale("");
  } catch {
    failures += 1;
    if (failures >= 1) {
      tellStale(`The data are stale: the sidecar has not answered since ${since()}. Trying again every ${seconds} s.`);
    }
  } finally {
    clearTimeout(timer);
  }
}

/** Keep the session alive while the page is visible. Pages of the first level renew its cookie when
    they are requested again; other pages request one of those to renew it. */
export function keepSession() {
  const renew = () => { if (!document.hidden) fetch(`${document.body.dataset.root}explain`).catch(() => {}); };
  setInterval(renew, 300000);
}

async function keepUp() {
  for (;;) {
    await new Promise((go) => setTimeout(go, seconds * 1000));
    await refresh();
  }
}

// In a narrow window the links to the pages are one row, which scrolls.
document.querySelector("header [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

if (seconds) {
  keepUp();
  if (document.body.dataset.root !== "./") keepSession();
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
}
