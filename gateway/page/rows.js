// The lists of the live panel: rows of the batch, those that wait, and sessions between two turns.

import { ownerOf } from "./colours.js";
import { byId, count, duration, el } from "./dom.js";

const MOST_SHOWN = 24; // of each list

/** Draw the rows that run, and behind them those that wait. */
export function showRows(view, colours) {
  const items = [...view.rows, ...view.queue].slice(0, MOST_SHOWN).map((row) => rowItem(row, colours));
  const more = view.rows.length + view.num_queued - items.length;
  if (!items.length) items.push(el("li", { class: "none" }, "Nothing runs"));
  else if (more > 0) items.push(el("li", { class: "none" }, `and ${count(more)} more`));
  byId("rows").replaceChildren(...items);
}

function rowItem(row, colours) {
  const inContext = row.stage === "context";
  const [done, whole] = inContext
    ? [row.num_computed_tokens, row.num_prompt_tokens]
    : [row.num_output_tokens, row.max_output_tokens];
  const what = inContext ? "prompt" : "output";
  const head = el(
    "div",
    { class: "line" },
    swatch(colours.of(ownerOf(row))),
    el("span", { class: "name" }, ownerOf(row)),
    el("span", { class: `stage ${row.stage}` }, row.stage),
    el("span", { class: "space" }),
    el("span", { class: "number" }, `${count(done)} / ${count(whole)} ${what}`),
  );
  const bar = el("progress", { max: Math.max(1, whole), value: done, class: row.stage, "aria-label": `${what} tokens` });
  return el("li", {}, head, bar, el("div", { class: "details" }, details(row).join(" · ")));
}

function details(row) {
  const parts = [`prompt ${count(row.num_prompt_tokens)}`];
  if (row.num_cached_tokens) parts.push(`reused ${count(row.num_cached_tokens)}`);
  if (row.num_recomputed_tokens) parts.push(`computed again ${count(row.num_recomputed_tokens)}`);
  if (row.num_evictions) parts.push(`evicted ${count(row.num_evictions)} times`);
  if (row.num_blocks) parts.push(`blocks ${count(row.num_blocks)}`);
  return [...parts, duration(row.age_s ?? 0)];
}

/** Draw the sessions. `pace`: prompt tokens a second that the engine computes; 0 where that is not known yet. */
export function showSessions(view, colours, pace) {
  byId("resting").hidden = !view.sessions.length;
  const items = view.sessions.slice(0, MOST_SHOWN).map((session) => {
    const { num_tokens: all, num_cached_tokens: cached } = session;
    const head = el(
      "div",
      { class: "line" },
      swatch(colours.of(session.session)),
      el("span", { class: "name" }, session.session),
      el("span", { class: "space" }),
      el("span", { class: "number" }, `${count(cached)} of ${count(all)} cached`),
    );
    const meter = el("progress", { max: Math.max(1, all), value: cached, class: "kept", "aria-label": "tokens with KV" });
    return el("li", {}, head, meter, el("div", { class: "details" }, cost(all - 1 - cached, pace)));
  });
  const more = view.num_sessions - view.sessions.length;
  if (more > 0) items.push(el("li", { class: "none" }, `and ${count(more)} more that run or rest`));
  byId("sessions").replaceChildren(...items);
}

/** What an eviction costs the next turn of a session. The latest token has no KV before that turn, evicted or not. */
function cost(evicted, pace) {
  if (evicted <= 0) return "nothing to compute again";
  const time = pace ? `, about ${duration(evicted / pace)}` : "";
  return `${count(evicted)} evicted tokens to compute again${time}`;
}

function swatch(colour) {
  const found = el("span", { class: "swatch" });
  found.style.backgroundColor = colour;
  return found;
}
