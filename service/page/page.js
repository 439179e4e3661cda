"use strict";

// Text from the bundle or the network only ever becomes a text node: nothing here parses HTML.
const at = (id) => document.getElementById(id);
const form = at("form"), query = at("query"), k = at("k"), status = at("status"), problem = at("problem");
const table = at("matches"), rows = at("rows"), timing = at("timing"), bundle = at("bundle"), json = at("json");
const key = at("key"), keyed = at("keyed");
const TYPING_PAUSE_MS = 120;
// For as long as the tab is open, and for no other.
const KEPT = "bidmatch.key";
let pending = null, timer = 0;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function bar(name, value) {
  const cell = make("td", `part ${name}`);
  const box = make("div", value < 0 ? "bar below" : "bar");
  const track = make("div", "track");
  const fill = make("div", "fill");
  track.setAttribute("aria-hidden", "true");
  fill.style.setProperty("--share", Math.min(1, Math.abs(value)));
  track.append(fill);
  box.append(track, make("span", "", value.toFixed(3)));
  cell.append(box);
  return cell;
}

function row(match, rank) {
  const line = make("tr");
  const phrase = make("th", "phrase");
  phrase.scope = "row";
  phrase.append(make("span", "text", match.phrase));
  if (match.source === "exact") phrase.append(make("span", "tag exact", "equals the query"));
  for (const [name, value] of Object.entries(match.columns ?? {})) {
    const tag = make("span", "tag", typeof value === "string" ? value : `${name} ${JSON.stringify(value)}`);
    tag.title = name;
    phrase.append(tag);
  }
  if (match.relevance !== undefined) {
    const tag = make("span", "tag", `relevance ${match.relevance.toFixed(2)}`);
    tag.title = "how likely the phrase was clicked for such a query";
    phrase.append(tag);
  }
  line.append(
    make("td", "number", rank), phrase, make("td", "number score", match.score.toFixed(3)),
    bar("encoder", match.parts.encoder), bar("classifier", match.parts.classifier),
  );
  return line;
}

function serverMilliseconds(header) {
  const times = {};
  for (const part of (header ?? "").split(",")) {
    const [name, duration] = part.trim().split(";dur=");
    if (duration) times[name] = Number(duration);
    else if (name === "cache;desc=hit") times.cached = true;
  }
  return times;
}

function clear() {
  rows.replaceChildren();
  table.hidden = json.hidden = problem.hidden = true;
  status.textContent = timing.textContent = "";
}

function fail(message) {
  clear();
  problem.textContent = message;
  problem.hidden = false;
}

function show(answer, times, seen) {
  problem.hidden = true;
  rows.replaceChildren(...answer.matches.map((match, i) => row(match, i + 1)));
  table.hidden = answer.matches.length === 0;
  const count = answer.matches.length;
  const phrases = count === 0 ? "No phrases" : count === 1 ? "1 phrase" : `${count} phrases`;
  status.textContent = `${phrases} in ${times.total?.toFixed(1) ?? "?"} ms`;
  const steps = ["tokenise", "encode", "search", "rescore"].filter((step) => step !== "rescore" || step in times)
    .map((step) => `${step} ${times[step]?.toFixed(2) ?? "?"} ms`).join(" · ");
  timing.textContent = (times.cached ? "from the cache" : steps) +
    ` · ${seen.toFixed(0)} ms seen from here`;
  bundle.textContent = answer.bundle;
}

async function match() {
  clearTimeout(timer);
  pending?.abort();
  const text = query.value;
  const search = new URLSearchParams({ q: text, k: k.value });
  history.replaceState(null, "", text ? `?${search}` : location.pathname);
  if (!text.trim()) return clear();
  const request = (pending = new AbortController());
  table.setAttribute("aria-busy", "true");
  const started = performance.now();
  try {
    const response = await fetch("match", {
      method: "POST",
      headers: key.value
        ? { "Content-Type": "application/json", Authorization: `Bearer ${key.value}` }
        : { "Content-Type": "application/json" },
      body: JSON.stringify({ query: text, k: Number(k.value) }),
      signal: request.signal,
    });
    const answer = await response.json();
    if (request !== pending) return;
    if (response.status === 401) keyed.hidden = false;
    if (!response.ok) return fail(answer.detail);
    sessionStorage.setItem(KEPT, key.value);
    json.href = `match?${search}`;
    show(answer, serverMilliseconds(response.headers.get("Server-Timing")), performance.now() - started);
    // A link sends no key.
    json.hidden = key.value !== "";
  } catch (error) {
    if (error.name !== "AbortError" && request === pending) fail("The service does not answer. Is it running?");
  } finally {
    if (request === pending) table.removeAttribute("aria-busy");
  }
}

function soon() {
  clearTimeout(timer);
  timer = setTimeout(match, TYPING_PAUSE_MS);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  match();
});
form.addEventListener("input", (event) => {
  // Half a key would be refused with each letter.
  if (event.target !== key) soon();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !(event.target instanceof HTMLInputElement)) {
    event.preventDefault();
    query.focus();
    query.select();
  } else if (event.key === "Escape") {
    query.value = "";
    query.focus();
    match();
  }
});

key.value = sessionStorage.getItem(KEPT) ?? "";
keyed.hidden = key.value === "";
const asked = new URLSearchParams(location.search);
if (asked.get("k")) k.value = asked.get("k");
if (asked.get("q")) {
  query.value = asked.get("q");
  match();
}
fetch("readyz").then((response) => response.json()).then((ready) => {
  bundle.textContent = ready.bundle ?? "not ready";
}).catch(() => {});
