// The latest requests: hit rate, time to first token on a logarithmic scale, and tables.

import { count } from "./words.js";

const NS = "http://www.w3.org/2000/svg";

function add(svg, name, attributes, text) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  svg.append(node);
  return node;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toPrecision(2)} ms`;
  return value < 0.9995 ? `${Math.round(value * 1000)} ms` : `${value.toPrecision(3)} s`;
}

export function isWarm(request) {
  return 2 * request.cached_tokens >= request.prompt_tokens;
}

export function median(values) {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

export function drawChart(svg, requests) {
  const width = svg.clientWidth || 600, height = svg.clientHeight || 144;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const timed = requests.filter((one) => one.time_to_first_token > 0);
  if (!timed.length) {
    add(svg, "text", { x: 8, y: 20 }, "No request yet.");
    return;
  }
  const times = timed.map((one) => one.time_to_first_token);
  const low = Math.floor(Math.log10(Math.min(...times))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...times))));
  const left = LEFT, bottom = height - 8;
  const y = (value) => bottom - ((Math.log10(value) - low) / (high - low)) * (bottom - 10);
  for (let power = low; power <= high; power += 1) {
    const at = y(10 ** power);
    add(svg, "line", { x1: left, x2: width, y1: at, y2: at, stroke: "var(--line)" });
    add(svg, "text", { x: left - 6, y: at + 4, "text-anchor": "end" }, seconds(10 ** power));
  }
  timed.forEach((one, at) => {
    const x = left + 8 + (at / Math.max(1, timed.length - 1)) * (width - left - 16);
    const dot = add(svg, "circle", {
      cx: x, cy: y(one.time_to_first_token), r: 4,
      fill: isWarm(one) ? "var(--warm)" : "var(--cold)",
    });
    add(dot, "title", {}, `${one.cached_tokens} of ${one.prompt_tokens} tokens cached, ${seconds(one.time_to_first_token)}`);
  });
  svg.setAttribute("aria-label", `Time to first token of ${timed.length} requests, from ${seconds(Math.min(...times))} to ${seconds(Math.max(...times))}`);
}

const LEFT = 52, TOGETHER = 16; // requests per point of the hit rate

export function drawRates(svg, requests) {
  const width = svg.clientWidth || 600, height = svg.clientHeight || 72;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const y = (share) => height - 10 - share * (height - 20);
  for (const share of [0, 0.5, 1]) {
    add(svg, "line", { x1: LEFT, x2: width, y1: y(share), y2: y(share), stroke: "var(--line)" });
    add(svg, "text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`);
  }
  const sum = (some, name) => some.reduce((total, one) => total + one[name], 0);
  const points = requests.map((one, at) => {
    const some = requests.slice(Math.max(0, at + 1 - TOGETHER), at + 1);
    const x = LEFT + 8 + (at / Math.max(1, requests.length - 1)) * (width - LEFT - 16);
    return [x, y(sum(some, "cached_tokens") / Math.max(1, sum(some, "prompt_tokens")))].join();
  });
  add(svg, "polyline", { points: points.join(" "), fill: "none", stroke: "var(--accent)", "stroke-width": 2 });
}

// The cold requests: computed tokens, and seconds to the first token.
export function coldPrompts(requests) {
  return requests.filter((one) => !isWarm(one) && one.time_to_first_token > 0)
    .map((one) => ({ tokens: one.prompt_tokens - one.cached_tokens, seconds: one.time_to_first_token }));
}

// Seconds that cached tokens saved, at the mean speed of the cold prompts; null for less than two.
// The result is at most the time of each cold prompt that computed at least as many tokens.
export function savedSeconds(cached, cold) {
  if (cold.length < 2) return null;
  const sum = (name) => cold.reduce((total, one) => total + one[name], 0);
  const bounds = cold.filter((one) => one.tokens >= cached).map((one) => one.seconds);
  return Math.min(cached * sum("seconds") / sum("tokens"), ...bounds);
}

// "9f8e7d6c, prompt 3" for "cmpl-9f8e7d6c…-2": the name's beginning, and the number of the prompt.
function shortName(id) {
  const [, name = id, place = "0"] = id.split("-");
  return name.slice(0, 8) + (place === "0" ? "" : `, prompt ${Number(place) + 1}`);
}

function fillRows(body, rows) {
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) row.insertCell().textContent = typeof cell === "number" ? count(cell) : cell;
    return row;
  }));
}

export function fillTable(body, requests) {
  fillRows(body, requests.slice(-50).reverse().map((one) => [shortName(one.id), one.prompt_tokens,
    one.cached_tokens, seconds(one.time_to_first_token), one.why || ""]));
}

export function fillBatch(body, batch, running) {
  fillRows(body, batch.map((one) => [shortName(one.id),
    `${count(one.read_tokens)} of ${count(one.prompt_tokens)}`, one.cached_tokens, one.generated_tokens]));
  const rest = running - batch.length;
  if (!running || rest > 0) Object.assign(body.insertRow().insertCell(), { colSpan: 4, textContent: running ? `and ${count(rest)} more` : "none" });
}
