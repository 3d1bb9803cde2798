// The tree of cached prefixes, and bars of counts.

import { count, counted } from "./words.js";

// The color of a prefix, the same in each snapshot.
export function colorFor(prefix) {
  const owner = prefix.kind ? `${prefix.kind} ${prefix.tenant}` : prefix.salt;
  const name = `${owner}|${prefix.adapter}|${prefix.first_block}|${prefix.text}`;
  let hash = 2166136261;
  for (const character of name) hash = Math.imul(hash ^ character.codePointAt(0), 16777619);
  const mixed = Math.imul(hash ^ (hash >>> 15), 2246822519);
  return `hsl(${((mixed ^ (mixed >>> 13)) >>> 0) % 360} var(--saturation) var(--lightness))`;
}

function line(prefix) {
  const row = document.createElement("div");
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.background = colorFor(prefix);
  const text = document.createElement("span");
  text.className = "text";
  text.textContent = prefix.text === null ? "(text not shown)" : prefix.text.replace(/\s+/g, " ");
  text.title = prefix.text || "";
  const size = document.createElement("span");
  size.className = "count";
  const held = prefix.held ? `, ${prefix.held} held` : "";
  const hits = prefix.hits ? `, ${counted(prefix.hits, "hit")}` : "";
  const checkpoints = prefix.checkpoints ? `, ${counted(prefix.checkpoints, "checkpoint")}` : "";
  size.textContent = counted(prefix.blocks, "block") + checkpoints + held + hits;
  row.append(swatch, text, size);
  return row;
}

export function fillTree(list, prefixes) {
  const items = new Map();
  const roots = [];
  for (const prefix of prefixes) {
    const item = document.createElement("li");
    item.append(line(prefix));
    items.set(prefix.id, item);
    const parent = prefix.parent === null ? undefined : items.get(prefix.parent);
    if (parent === undefined) {
      roots.push(item);
      continue;
    }
    if (parent.lastElementChild.tagName !== "UL") parent.append(document.createElement("ul"));
    parent.lastElementChild.append(item);
  }
  if (!roots.length) roots.push(emptyLine("li", "Nothing is cached yet: send a message in the chat, or a request to v1/chat/completions."));
  list.replaceChildren(...roots);
}

// A line to show while there are no data.
export function emptyLine(tag, textContent) {
  return Object.assign(document.createElement(tag), { textContent, className: "quiet" });
}

export function fillBars(list, whenEmpty, counts) {
  const most = Math.max(1, ...counts.map(([, value]) => value));
  if (!counts.length) return list.replaceChildren(emptyLine("dt", whenEmpty));
  list.replaceChildren(...counts.flatMap(([name, number]) => {
    const term = document.createElement("dt");
    term.textContent = name;
    const value = document.createElement("dd");
    const bar = document.createElement("span");
    bar.className = "bar";
    bar.style.width = `${Math.round((70 * number) / most)}%`;
    value.append(bar, count(number));
    return [term, value];
  }));
}
