// The views of the last five minutes, so that they can be looked at again.

export const KEPT_S = 300;
const MOST_CHARACTERS = 48 << 20; // of all views; those of a full batch are large, and fewer are kept then

/**
 * Frames: { at (seconds), text (a view as JSON), engine, counters, used, cached, free, rates }. Texts are parsed again when they
 * are looked at: as objects they would take several times the memory.
 */
export class History {
  constructor() {
    this.frames = [];
    this.size = 0;
  }

  push(text, view, at) {
    const { used_num_blocks: used, cached_num_blocks: cached, free_num_blocks: free } = view.latest.kv_cache;
    const evictedBlocks = view.latest.kv_cache.evicted_blocks_total;
    const counters = { ...view.counters, evictedBlocks, uptime: view.uptime_s };
    const frame = { at, text, engine: view.engine, counters, used, cached, free };
    frame.rates = rates(this.#before(frame, 1), frame);
    frame.evictedBlocks = change(this.frames.at(-1), frame, "evictedBlocks");
    this.frames.push(frame);
    this.size += text.length;
    while (this.frames[0].at < at - KEPT_S || (this.size > MOST_CHARACTERS && this.frames.length > 1)) {
      this.size -= this.frames.shift().text.length;
    }
    return frame;
  }

  /** Seconds that the frames reach back from `now`, half a minute at least. */
  span(now) {
    return Math.min(KEPT_S, Math.max(30, now - (this.frames[0]?.at ?? now)));
  }

  /** Index of the latest frame that is not younger than `at`; 0 where all are. */
  indexAt(at) {
    let low = 0;
    let high = this.frames.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.frames[middle].at <= at) low = middle + 1;
      else high = middle;
    }
    return Math.max(0, low - 1);
  }

  /** The latest frame that is `seconds` older than a new one. */
  #before(frame, seconds) {
    const found = this.frames[this.indexAt(frame.at - seconds)];
    return found?.at <= frame.at - seconds / 2 ? found : undefined;
  }
}

/** By how much a counter has grown between two frames; 0 where another engine has begun. */
function change(before, after, name) {
  return before?.engine === after.engine ? after.counters[name] - before.counters[name] : 0;
}

/** Changes a second: of output tokens, prompt tokens, tokens computed again, and evicted blocks. */
function rates(before, after) {
  const names = {
    output: "generated_tokens_total",
    prompt: "context_tokens_total",
    again: "recomputed_tokens_total",
    evicted: "evictedBlocks",
  };
  const grown = (name) => change(before, after, name);
  const seconds = before ? Math.max(after.counters.uptime - before.counters.uptime, 1e-3) : 1;
  return Object.fromEntries(Object.entries(names).map(([key, name]) => [key, grown(name) / seconds]));
}

/** The part of all prompt tokens of an engine that was found in its cache; null before the first. */
export function hitRate(counters) {
  const all = counters.cached_tokens_total + counters.context_tokens_total;
  return all ? counters.cached_tokens_total / all : null;
}
