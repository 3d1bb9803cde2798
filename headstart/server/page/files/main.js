// The page: one stream of snapshots of the pool fills every part of it.

import { events, get, post, request } from "./api.js";
import { Chat } from "./chat.js";
import { coldPrompts, drawChart, drawRates, fillBatch, fillTable, isWarm, median, seconds } from "./chart.js";
import { PoolMap } from "./map.js";
import { colorFor, fillBars, fillTree } from "./tree.js";
import { count, counted } from "./words.js";

const $ = (id) => document.getElementById(id);
let model = "";
let colors = new Map();
let latestPool; // for the advice
let coldRequests = []; // the latest requests that computed most of their prompts

const styles = getComputedStyle(document.documentElement);
const plain = () => styles.getPropertyValue("--quiet");
const resolve = (color) => color.replace("var(--saturation)", styles.getPropertyValue("--saturation"))
  .replace("var(--lightness)", styles.getPropertyValue("--lightness"));
const map = new PoolMap($("pool"), $("block"), $("undrawn"), (prefix) => colors.has(prefix) ? resolve(colors.get(prefix)) : plain());

const chat = new Chat({ form: $("ask"), message: $("message"), submit: $("send"), stop: $("stop"), newChat: $("new-chat"),
  example: $("example"), turns: $("turns") }, () => model, () => coldRequests);

function ownerName(owner) {
  const adapter = owner.adapter ? `, adapter ${owner.adapter.slice(0, 8)}` : "";
  if (owner.kind === "public") return `all tenants${adapter}`;
  if (owner.tenant) return `${owner.kind} ${owner.tenant}${adapter}`;
  if (!owner.salt) return `requests without a salt${adapter}`;
  return `salt ${owner.salt.length > 12 ? `${owner.salt.slice(0, 11)}…` : owner.salt}${adapter}`;
}

let shownRequests = "";
let running = 0; // running requests in the last snapshot

// The next snapshot comes after the current step. Until then, count the tab's own request.
function showRunning() {
  $("running").textContent = count(Math.max(running, Number(chat.isWaiting)));
}
$("ask").addEventListener("waiting", showRunning);

function show(snapshot) {
  const { engine, pool, prefixes, traffic } = snapshot;
  $("hit-rate").textContent = engine.queried_tokens ? `${(100 * engine.hit_rate).toFixed(1)} %` : "–";
  $("saved").textContent = count(engine.hit_tokens);
  $("drafts").hidden = !engine.drafted_tokens;
  $("accepted").textContent = count(engine.accepted_tokens);
  $("drafted").textContent = `of ${counted(engine.drafted_tokens, "drafted token")} accepted`;
  const [warm, cold] = [true, false].map((kind) => median(traffic.filter((request) => isWarm(request) === kind)
    .map((request) => request.time_to_first_token).filter((time) => time !== null)));
  [warm, cold].forEach((time, index) => { $("first").children[index].firstChild.data = `${seconds(time)} `; });
  running = engine.running;
  showRunning();
  $("waiting").textContent = engine.waiting ? `${count(engine.waiting)} waiting` : "none waiting";
  const square = snapshot.cells.blocks_per_cell > 1 ? `; a square is ${counted(snapshot.cells.blocks_per_cell, "block")}` : "";
  $("pool-counts").textContent = `${counted(pool.num_blocks, "block")} of ${counted(pool.block_size, "token")}: ${count(pool.held)} held, ${count(pool.cached)} cached, ${count(pool.empty)} empty${square}`;
  latestPool = pool;
  const { states, windows } = pool;
  $("windows").hidden = !windows;
  if (windows) $("windows").textContent = `${counted(windows.blocks, "block")} for layers with a sliding window of ${counted(windows.tokens, "token")}: ${count(windows.held)} held, ${count(windows.cached)} cached, ${count(windows.empty)} empty`;
  $("states").hidden = !states;
  if (states) $("states").textContent = `${counted(states.slots, "slot")} for states of recurrent layers: ${counted(states.checkpoints, "checkpoint")} (where prompts resume), ${count(states.running)} running, ${count(states.free)} free`;
  colors = new Map(prefixes.map((prefix) => [prefix.id, colorFor(prefix)]));
  map.show(snapshot.cells, pool.num_blocks);
  fillTree($("tree"), prefixes);
  fillBars($("missed"), "No prompt has missed yet: send two that begin alike.", Object.entries(engine.missed).filter(([name]) => name !== "none")
    .sort((a, b) => b[1] - a[1]).map(([name, value]) => [engine.reasons[name], value]));
  fillBars($("owners"), "Nothing is cached yet.", pool.owners.slice(0, 12).map((owner) => [ownerName(owner), owner.blocks]));
  fillBatch($("batch"), snapshot.batch, engine.running);
  const last = traffic.at(-1)?.id + traffic.length;
  if (last === shownRequests) return;
  shownRequests = last;
  coldRequests = coldPrompts(traffic);
  drawChart($("chart"), traffic);
  drawRates($("rates"), traffic);
  fillTable($("requests"), traffic);
  showAdvice();
}

async function showAdvice() {
  try {
    const report = await get("cache/advice");
    const items = report.forks.slice(0, 3).map(({ advice, before }) => before ? `${advice}. The difference follows “${before.slice(-40)}”` : advice);
    items.push(...report.salts.map(({ advice }) => advice));
    if (report.memory?.evicted_prompts) {
      const { evicted_prompts: prompts, more_blocks: blocks, tokens_saved: tokens } = report.memory;
      items.push(`${counted(prompts, "prompt")} had an evicted prefix: ${blocks === null ? "the pool size that would have retained it is unknown" : `${counted(blocks, "more block")} would have saved ${counted(tokens, "token")}`}`);
    }
    const { states, windows, recomputed_tokens: recomputed } = latestPool ?? {};
    if (recomputed && states?.dropped) {
      items.push(`${counted(recomputed, "cached token")} without a checkpoint were computed again, and ${counted(states.dropped, "checkpoint")} were evicted. With more slots (--num-states), fewer checkpoints would be evicted`);
    }
    if (recomputed && windows?.evicted) {
      items.push(`${counted(recomputed, "token")} cached in other layers, but not in sliding-window layers, were computed again, and ${counted(windows.evicted, "window block")} were evicted. With a larger --num-window-blocks, fewer window blocks would be evicted`);
    }
    const className = items.length ? "" : "quiet";
    if (!items.length) items.push("Nothing yet. Advice appears when several prompts begin alike and then differ."); // a reset removes earlier advice
    $("advice").replaceChildren(...items.map((textContent) => Object.assign(document.createElement("li"), { textContent, className })));
  } catch { /* the server is busy; the next request calls this again */ }
}

function connected(isLive, trouble = "not connected: trying again") {
  $("connection").textContent = isLive ? "live" : trouble;
  $("connection").classList.toggle("live", isLive);
}

// Without an administrator's key, the page shows only the chat, and advice on the tenant's prompts.
function showAll(isAll) {
  for (const part of document.querySelectorAll('[data-access="admin"]')) part.hidden = !isAll;
}

async function watch() {
  for (;;) {
    let trouble, pause = 1500;
    try {
      const models = await get("v1/models");
      model = models.data[0].id;
      $("small").hidden = model !== "headstart-tiny";
      $("model").textContent = `${model} · context of ${count(models.data[0].max_model_len)} tokens`;
      const response = await request("cache/live");
      connected(true);
      showAll(true);
      for await (const snapshot of events(response)) show(snapshot);
    } catch (error) {
      console.warn(error);
      trouble = error.status && error.message; // the server's error, such as a key without rights
      if (error.status === 403) {
        pause = 5000;
        showAll(false);
        showAdvice();
      }
    }
    connected(false, trouble || undefined);
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

$("reset").addEventListener("click", async () => {
  if (!confirm("Empty the cache? The next prompts must be computed again.")) return;
  try {
    await post("cache/reset", {});
    $("block").textContent = "The cache is empty.";
    showAdvice();
  } catch (error) {
    $("block").textContent = error.message;
  }
});

new ResizeObserver(() => { shownRequests = ""; }).observe($("chart"));
watch();
