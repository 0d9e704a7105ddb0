"""The page of ``checkfreq watch --http``: asks for figures.json each second, sets all as text."""

LIVE_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>checkfreq watch</title>
<style>
:root { color-scheme: light dark; --page: #fff; --ink: #1f2328; --soft: #59626d; --line: #d8dce1;
  --good: #237a3d; --warn: #8f5200; --bad: #b3261e; --bar: #1f6fb4; }
@media (prefers-color-scheme: dark) { :root { --page: #16191d; --ink: #e6e8eb; --soft: #a2abb6;
  --line: #3a4048; --good: #6fcf87; --warn: #f0a050; --bad: #ff8a80; --bar: #6cb2ee; } }
body { margin: 0 auto; padding: 1rem; max-width: 46rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.2rem; margin: 0; } #clock { color: var(--soft); margin: 0 0 .8rem; }
dl { margin: 0; } dl div { display: grid; grid-template-columns: 11rem 1fr; padding: .4rem 0;
  border-top: 1px solid var(--line); } dt { color: var(--soft); } dd { margin: 0; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.bar { display: block; height: .5rem; width: 100%; background: var(--line); margin-top: .3rem;
  border-radius: .25rem; overflow: hidden; } .bar i { display: block; height: 100%;
  background: var(--bar); }
@media (max-width: 560px) { dl div { grid-template-columns: 1fr; } }
</style>
</head>
<body>
<h1 id="name">checkfreq watch</h1>
<p id="clock">asking ...</p>
<dl id="rows"></dl>
<script>
"use strict";
const place = document.getElementById("rows");
function row(title, text, kind, used) {
  const line = document.createElement("div");
  const name = document.createElement("dt"), value = document.createElement("dd");
  name.textContent = title;
  value.textContent = text;
  value.className = kind;
  if (used !== undefined) {
    const bar = document.createElement("span"), full = document.createElement("i");
    bar.className = "bar";
    full.style.width = Math.min(100, 100 * used) + "%";
    bar.append(full);
    value.append(bar);
  }
  line.append(name, value);
  return line;
}
async function ask() {
  try {
    const answer = await fetch("figures.json", { signal: AbortSignal.timeout(10000) });
    const found = await answer.json();
    document.getElementById("name").textContent = found.name;
    document.title = "checkfreq: " + found.name;
    document.getElementById("clock").textContent = found.clock;
    const used = found.figures.used_of_bound;
    place.replaceChildren(...found.rows.map(([title, text, kind]) =>
      row(title, text, kind, title === "overhead" ? used : undefined)));
  } catch (error) {
    document.getElementById("clock").textContent = "no answer: is checkfreq watch still running?";
  }
  setTimeout(ask, 1000);
}
ask();
</script>
</body>
</html>
"""
