// The map of the KV pool: a cell for each block, or for several in a large pool.

import { ownerOf } from "./colours.js";

const FREE = -2;
const CACHED = -1;
const HIGHEST = 220; // pixels
const FLASH_S = 0.8; // for which a cell whose KV was evicted is shown so
const RESTING = 0.5; // opacity of a session between two turns

/** Owners of all cells: "" free, "-" cached for anybody, "~NAME" of a session that rests, "NAME" of a row that runs. */
export function ownersOf(view) {
  const found = [];
  for (let at = 0; at < view.blocks.length; at += 2) {
    const name = ownerName(view, view.blocks[at]);
    for (let number = view.blocks[at + 1]; number > 0; number -= 1) found.push(name);
  }
  return found;
}

function ownerName(view, state) {
  if (state === FREE) return "";
  if (state === CACHED) return "-";
  const { rows } = view;
  return state < rows.length ? ownerOf(rows[state]) : `~${ownerOf(view.sessions[state - rows.length])}`;
}

export class BlockMap {
  constructor(canvas, colours) {
    this.canvas = canvas;
    this.colours = colours;
    this.owners = [];
    this.engine = "";
    this.evicted = new Map(); // index of a cell -> when its KV was evicted, in seconds
  }

  /** Draw a view. `evictedBlocks`: how many blocks have lost KV since the view drawn before; `at`: its time in seconds. */
  draw(view, at, evictedBlocks, shades) {
    const owners = ownersOf(view);
    this.#mark(view, owners, at, evictedBlocks);
    this.owners = owners;
    this.engine = view.engine;
    const cell = this.#fit(owners.length);
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    const columns = Math.max(1, Math.floor(this.canvas.width / cell));
    const gap = cell >= 6 * devicePixelRatio ? devicePixelRatio : 0;
    owners.forEach((owner, index) => {
      const left = (index % columns) * cell;
      const top = Math.floor(index / columns) * cell;
      context.globalAlpha = owner.startsWith("~") ? RESTING : 1;
      context.fillStyle = this.#shade(owner, shades);
      context.fillRect(left, top, cell - gap, cell - gap);
      if (this.evicted.has(index)) frame(context, left, top, cell - gap, shades.evicted);
    });
    context.globalAlpha = 1;
  }

  #shade(owner, shades) {
    if (owner === "") return shades.free;
    if (owner === "-") return shades.cached;
    return this.colours.of(owner.replace(/^~/, ""));
  }

  /** Note the cells that were cached before and are not any more, as many as the engine says it has evicted. */
  #mark(view, owners, at, evictedBlocks) {
    if (view.engine !== this.engine || owners.length !== this.owners.length) this.evicted.clear();
    else {
      let left = Math.ceil(evictedBlocks / view.blocks_per_cell);
      for (let index = 0; index < owners.length && left > 0; index += 1) {
        const before = this.owners[index];
        const wasCached = before === "-" || before.startsWith("~");
        if (!wasCached || owners[index] === before || owners[index] === before.slice(1)) continue;
        this.evicted.set(index, at);
        left -= 1;
      }
    }
    for (const [index, when] of this.evicted) if (Math.abs(at - when) > FLASH_S) this.evicted.delete(index);
  }

  /** Size the canvas for so many cells, and return the side of one in its pixels. */
  #fit(cells) {
    const width = Math.max(80, this.canvas.parentElement.clientWidth);
    let side = Math.min(14, Math.max(2, Math.floor(Math.sqrt((width * HIGHEST) / Math.max(1, cells)))));
    while (side > 2 && Math.ceil(cells / Math.floor(width / side)) * side > HIGHEST) side -= 1;
    const height = Math.ceil(cells / Math.floor(width / side)) * side;
    setSize(this.canvas, width, height);
    return side * devicePixelRatio;
  }
}

/** Draw a frame within a cell; a small cell is filled. */
function frame(context, left, top, side, colour) {
  const width = Math.max(1, Math.round(side / 5));
  context.globalAlpha = 1;
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(left + width / 2, top + width / 2, side - width, side - width);
}

/** Size a canvas in CSS pixels; drawing is in those of the screen. */
export function setSize(canvas, width, height) {
  const pixels = [Math.round(width * devicePixelRatio), Math.round(height * devicePixelRatio)];
  if (canvas.width !== pixels[0]) canvas.width = pixels[0];
  if (canvas.height !== pixels[1]) canvas.height = pixels[1];
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
}
