// The live panel: it receives views, keeps five minutes of them, and shows the latest one or one from before.

import { live } from "./api.js";
import { BlockMap } from "./block_map.js";
import { Colours } from "./colours.js";
import { byId, count, duration, el } from "./dom.js";
import { History, hitRate, KEPT_S } from "./history.js";
import { showRows, showSessions } from "./rows.js";
import { Timeline } from "./timeline.js";

const HZ = 5;
const RETRY_MS = 1500;
const LEGEND = { active: "in use, by conversation", cached: "cached", free: "free", evicted: "just evicted" };
const LINE_LEGEND = { used: "in use", cached: "cached", line: "output tokens/s", evicted: "blocks evicted" };

export class LivePanel {
  constructor() {
    this.history = new History();
    this.colours = new Colours();
    this.map = new BlockMap(byId("map"), this.colours);
    this.timeline = new Timeline(byId("line"));
    this.control = null; // AbortController of the stream, while it is wanted
    this.pace = 0; // prompt tokens a second, of the latest step that had some
    this.isDrawing = false;
    this.moment = null; // the moment that is looked at, in seconds of performance.now(); null: the latest view
    this.#connect();
  }

  /** Receive views until `stop`. A stream that ends is begun again: the server ends it after a while, to compare the key. */
  start() {
    if (this.control) return;
    this.control = new AbortController();
    this.#receive(this.control.signal);
  }

  stop() {
    this.control?.abort();
    this.control = null;
  }

  async #receive(signal) {
    while (!signal.aborted) {
      try {
        for await (const { event, data } of live(HZ, signal)) {
          if (event === "view") this.#take(data);
          else if (event === "away") this.#state("away", JSON.parse(data).message);
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        if (error.status === 401 || error.status === 403) return this.#refused(error);
        this.#state("away", error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #take(text) {
    const view = JSON.parse(text);
    this.history.push(text, view, performance.now() / 1000);
    const { num_ctx_tokens: tokens, iter_latency_ms: ms } = view.latest;
    if (tokens && ms) this.pace = (1000 * tokens) / ms;
    this.#state("here", `engine ${view.engine}, up ${duration(view.uptime_s)}`);
    byId("views").hidden = false;
    byId("refused").hidden = true;
    this.#draw();
  }

  #state(kind, text) {
    if (!byId("dot").classList.contains(kind)) byId("heard").textContent = kind === "here" ? "The batch is shown" : text;
    byId("dot").className = `dot ${kind}`;
    byId("state").textContent = text;
  }

  #refused(error) {
    this.control = null;
    this.#state("away", "not allowed");
    byId("views").hidden = true;
    byId("refused").hidden = false;
    byId("refused").textContent = error.message;
  }

  /** Draw the view that is looked at, once for each frame of the screen. */
  #draw() {
    if (this.isDrawing || !this.history.frames.length) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      const { frames } = this.history;
      const now = performance.now() / 1000;
      const index = this.moment === null ? frames.length - 1 : this.history.indexAt(this.moment);
      const frame = frames[index];
      const view = JSON.parse(frame.text);
      const shades = this.#shades();
      this.colours.take(view);
      this.#figures(view, frame);
      this.map.draw(view, frame.at, frame.evictedBlocks, shades);
      byId("map").setAttribute("aria-label", mapLabel(view));
      this.#time(now, frame.at, shades);
      showRows(view, this.colours);
      showSessions(view, this.colours, this.pace);
    });
  }

  /** The strip and the slider, which reach back as far as there are views. */
  #time(now, shown, shades) {
    const span = this.history.span(now);
    const isNow = this.moment === null;
    this.timeline.draw(this.history.frames, span, now, isNow ? now : shown, shades);
    const slider = byId("moment");
    slider.min = -span;
    slider.value = isNow ? 0 : shown - now;
    slider.setAttribute("aria-valuetext", isNow ? "now" : `${Math.round(now - shown)} seconds ago`);
    byId("time-title").textContent = span < KEPT_S ? `The last ${Math.round(span)} seconds` : "The last five minutes";
    byId("now").disabled = isNow;
  }

  #figures(view, frame) {
    const { rates } = frame;
    const { latest, first_token_s: first, per_token_s: between } = view;
    const hits = hitRate(view.counters);
    const shown = [
      ["output tokens/s", count(rates.output)],
      ["prompt tokens/s", count(rates.prompt)],
      ["recomputed/s", count(rates.again)],
      ["evicted blocks/s", count(rates.evicted)],
      ["cache hits", hits === null ? "–" : `${(100 * hits).toFixed(0)} %`],
      ["slots", `${view.rows.length} of ${latest.max_num_active_requests}`],
      ["waiting", count(view.num_queued)],
      ["first token, p50", duration(first.p50)],
      ["a token, p50", `${(1000 * between.p50).toFixed(1)} ms`],
    ];
    const { max_num_snapshots: most = 0, used_num_snapshots: kept = 0 } = latest.snapshots ?? {};
    if (most) shown.push(["snapshots", `${count(kept)} of ${count(most)}`]);
    byId("figures").replaceChildren(...shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    const { used_num_blocks: used, cached_num_blocks: cached, free_num_blocks: free } = latest.kv_cache;
    const numbers = { active: used, cached, free };
    for (const [name, number] of Object.entries(numbers)) byId(`count-${name}`).textContent = count(number);
  }

  /** The colours of the style sheet, as a canvas takes them. */
  #shades() {
    const names = ["free", "cached", "evicted", "used", "line"];
    const of = (name) => getComputedStyle(document.querySelector(`.swatch.${name}`)).backgroundColor;
    return Object.fromEntries(names.map((name) => [name, of(name)]));
  }

  #connect() {
    const items = Object.entries(LEGEND).map(([name, text]) =>
      el("li", {}, el("span", { class: `swatch ${name}` }), el("b", { id: `count-${name}` }), text),
    );
    byId("legend").replaceChildren(...items);
    const lines = Object.entries(LINE_LEGEND).map(([name, text]) => el("li", {}, el("span", { class: `swatch ${name}` }), text));
    byId("line-legend").replaceChildren(...lines);
    const moment = byId("moment");
    moment.addEventListener("input", () => {
      this.moment = Number(moment.value) < 0 ? performance.now() / 1000 + Number(moment.value) : null;
      this.#draw();
    });
    byId("now").addEventListener("click", () => {
      this.moment = null;
      this.#draw();
    });
    document.addEventListener("theme", () => this.#draw());
    addEventListener("resize", () => this.#draw());
  }
}

function mapLabel(view) {
  const { used_num_blocks: used, cached_num_blocks: cached, free_num_blocks: free } = view.latest.kv_cache;
  return `Map of the KV pool: ${used} blocks in use, ${cached} cached, ${free} free`;
}
