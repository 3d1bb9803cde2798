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
  const timed = requests.filter((request) => request.time_to_first_token > 0);
  if (!timed.length) {
    add(svg, "text", { x: 8, y: 20 }, "No request yet.");
    return;
  }
  const times = timed.map((request) => request.time_to_first_token);
  const low = Math.floor(Math.log10(Math.min(...times))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...times))));
  const left = LEFT, bottom = height - 8;
  const y = (value) => bottom - ((Math.log10(value) - low) / (high - low)) * (bottom - 10);
  for (let power = low; power <= high; power += 1) {
    const level = y(10 ** power);
    add(svg, "line", { x1: left, x2: width, y1: level, y2: level, stroke: "var(--line)" });
    add(svg, "text", { x: left - 6, y: level + 4, "text-anchor": "end" }, seconds(10 ** power));
  }
  timed.forEach((request, index) => {
    const x = left + 8 + (index / Math.max(1, timed.length - 1)) * (width - left - 16);
    const dot = add(svg, "circle", {
      cx: x, cy: y(request.time_to_first_token), r: 4,
      fill: isWarm(request) ? "var(--warm)" : "var(--cold)",
    });
    add(dot, "title", {}, `${request.cached_tokens} of ${request.prompt_tokens} tokens cached, ${seconds(request.time_to_first_token)}`);
  });
  svg.setAttribute("aria-label", `Time to first token of ${timed.length} requests, from ${seconds(Math.min(...times))} to ${seconds(Math.max(...times))}`);
}

const LEFT = 52, WINDOW = 16; // requests per point of the hit rate

export function drawRates(svg, requests) {
  const width = svg.clientWidth || 600, height = svg.clientHeight || 72;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const y = (share) => height - 10 - share * (height - 20);
  for (const share of [0, 0.5, 1]) {
    add(svg, "line", { x1: LEFT, x2: width, y1: y(share), y2: y(share), stroke: "var(--line)" });
    add(svg, "text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`);
  }
  const sum = (group, name) => group.reduce((total, request) => total + request[name], 0);
  const points = requests.map((request, index) => {
    const group = requests.slice(Math.max(0, index + 1 - WINDOW), index + 1);
    const x = LEFT + 8 + (index / Math.max(1, requests.length - 1)) * (width - LEFT - 16);
    return [x, y(sum(group, "cached_tokens") / Math.max(1, sum(group, "prompt_tokens")))].join();
  });
  add(svg, "polyline", { points: points.join(" "), fill: "none", stroke: "var(--accent)", "stroke-width": 2 });
}

// The computed tokens and seconds to the first token of each cold request.
export function coldPrompts(requests) {
  return requests.filter((request) => !isWarm(request) && request.time_to_first_token > 0)
    .map((request) => ({ tokens: request.prompt_tokens - request.cached_tokens, seconds: request.time_to_first_token }));
}

// Returns the seconds that cached tokens saved, at the mean speed of the cold requests. The result is
// at most the time of any cold request that computed at least as many tokens. It is null for fewer
// than two cold requests.
export function savedSeconds(cached, cold) {
  if (cold.length < 2) return null;
  const sum = (name) => cold.reduce((total, request) => total + request[name], 0);
  const bounds = cold.filter((request) => request.tokens >= cached).map((request) => request.seconds);
  return Math.min(cached * sum("seconds") / sum("tokens"), ...bounds);
}

// The beginning of a request's id and the number of its prompt: "9f8e7d6c, prompt 3".
function shortName(id) {
  const [, name = id, promptIndex = "0"] = id.split("-");
  return name.slice(0, 8) + (promptIndex === "0" ? "" : `, prompt ${Number(promptIndex) + 1}`);
}

function fillRows(body, rows) {
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) row.insertCell().textContent = typeof cell === "number" ? count(cell) : cell;
    return row;
  }));
}

export function fillTable(body, requests) {
  fillRows(body, requests.slice(-50).reverse().map((request) => [shortName(request.id), request.prompt_tokens,
    request.cached_tokens, seconds(request.time_to_first_token), request.why || ""]));
}

export function fillBatch(body, batch, running) {
  fillRows(body, batch.map((request) => [shortName(request.id),
    `${count(request.read_tokens)} of ${count(request.prompt_tokens)}`, request.cached_tokens, request.generated_tokens]));
  const rest = running - batch.length;
  if (!running || rest > 0) Object.assign(body.insertRow().insertCell(), { colSpan: 4, textContent: running ? `and ${count(rest)} more` : "none" });
}
