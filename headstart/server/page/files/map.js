// The pool as a map on a canvas. Each snapshot of the pool is drawn as at most 8,192 cells, so a
// pool of a hundred thousand blocks costs as little as one of a thousand.

import { get } from "./api.js";
import { counted } from "./words.js";

const EMPTY = 0, HELD = 2;
const FEWEST = 512; // cells that are always drawn, even if they are empty

export class PoolMap {
  constructor(canvas, caption, undrawn, colorOf) {
    this.canvas = canvas;
    this.caption = caption;
    this.undrawn = undrawn; // the note on empty cells at the end, which are not drawn
    this.colorOf = colorOf;
    this.cells = [];
    this.perCell = 1;
    this.cursor = -1; // no cell yet
    this.numQueries = 0;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("click", (event) => this.point(event));
    canvas.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(cells, numBlocks) {
    this.numBlocks = numBlocks;
    this.perCell = cells.blocks_per_cell;
    const all = cells.runs.flatMap(([count, state, prefix]) => Array(count).fill([state, prefix]));
    // Double the number of cells if necessary, so that the map rarely changes its shape.
    let shown = FEWEST;
    while (all.slice(shown).some(([state]) => state !== EMPTY)) shown *= 2;
    this.cells = all.slice(0, shown);
    this.undrawn.hidden = shown >= all.length;
    this.undrawn.textContent = `and ${counted(numBlocks - shown * this.perCell, "empty block")} more`;
    if (this.cursor >= this.cells.length) this.cursor = -1;
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width || !this.cells.length) return;
    const count = this.cells.length;
    const size = Math.max(4, Math.min(16, Math.floor(Math.sqrt((width * 260) / count))));
    this.columns = Math.max(1, Math.floor(width / size));
    this.size = size;
    const rows = Math.ceil(count / this.columns);
    const scale = window.devicePixelRatio || 1;
    this.canvas.style.height = `${rows * size}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(rows * size * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const empty = getComputedStyle(document.documentElement).getPropertyValue("--empty");
    const gap = size > 6 ? 1 : 0.5;
    this.cells.forEach(([state, prefix], index) => {
      pen.globalAlpha = state === EMPTY || state === HELD ? 1 : 0.5;
      pen.fillStyle = state === EMPTY ? empty : this.colorOf(prefix);
      const x = (index % this.columns) * size, y = Math.floor(index / this.columns) * size;
      pen.fillRect(x, y, size - gap, size - gap);
    });
    pen.globalAlpha = 1;
    if (document.activeElement === this.canvas && this.cursor >= 0) this.mark(pen);
  }

  mark(pen) {
    const x = (this.cursor % this.columns) * this.size;
    const y = Math.floor(this.cursor / this.columns) * this.size;
    pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--text");
    pen.lineWidth = 2;
    pen.strokeRect(x, y, this.size - 1, this.size - 1);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const index = Math.floor((event.clientY - box.top) / this.size) * this.columns + column;
    if (column < this.columns && index < this.cells.length && index !== this.cursor) this.select(index);
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns,
      Home: -this.cursor, End: this.cells.length - 1 - this.cursor, }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const index = Math.max(0, this.cursor + step);
    if (index < this.cells.length) this.select(index);
    this.draw();
  }

  async select(index) {
    this.cursor = index;
    const first = index * this.perCell;
    const [state] = this.cells[index];
    const name = this.perCell > 1 ? `Blocks ${first} to ${Math.min(first + this.perCell, this.numBlocks) - 1}` : `Block ${first}`;
    const stateName = ["empty", "cached", "held"][state];
    this.caption.textContent = `${name}: ${stateName}`;
    if (state === EMPTY) return;
    const query = ++this.numQueries;
    await new Promise((resolve) => setTimeout(resolve, 60));
    if (query !== this.numQueries) return; // the pointer moved to another cell
    try {
      const answer = await get(`cache/blocks/${first}`);
      if (query !== this.numQueries || answer.text === null) return;
      const which = this.perCell > 1 ? `; block ${first} has ` : ", ";
      this.caption.textContent = `${name}: ${stateName}${which}${counted(answer.tokens, "token")}: “${answer.text}”`;
    } catch { /* texts are for administrators */ }
  }
}
