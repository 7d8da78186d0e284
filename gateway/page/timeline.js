// The last five minutes as a strip: the use of the pool as areas, output tokens a second as a line, evictions as marks below.

import { setSize } from "./block_map.js";

const HEIGHT = 84; // pixels
const LONGEST_S = 2; // for which a frame stands; what is longer was not seen, and stays empty
const MARKS = 8; // of them for evictions

export class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
  }

  /** Draw `span` seconds of frames up to `now`, with a cursor at `shown`; all in seconds. */
  draw(frames, span, now, shown, shades) {
    setSize(this.canvas, Math.max(80, this.canvas.parentElement.clientWidth), HEIGHT);
    const context = this.canvas.getContext("2d");
    const { width } = this.canvas;
    const height = this.canvas.height - MARKS * devicePixelRatio;
    const x = (at) => width * (1 - (now - at) / span);
    context.clearRect(0, 0, width, this.canvas.height);
    context.fillStyle = shades.free;
    context.fillRect(0, 0, width, height);
    const most = Math.max(1, ...frames.map((frame) => frame.rates.output));
    frames.forEach((frame, index) => {
      const left = Math.floor(x(frame.at));
      const end = Math.min(frames[index + 1]?.at ?? now, frame.at + LONGEST_S);
      const size = Math.max(1, Math.floor(x(end)) - left);
      this.#column(context, frame, left, size, height, shades);
    });
    this.#line(context, frames, x, height, most, shades.line);
    context.fillStyle = shades.line;
    context.fillRect(Math.min(width - 2, x(shown)), 0, 2 * devicePixelRatio, this.canvas.height);
  }

  #column(context, frame, left, size, height, shades) {
    const all = Math.max(1, frame.used + frame.cached + frame.free);
    const used = (height * frame.used) / all;
    const cached = (height * frame.cached) / all;
    context.fillStyle = shades.cached;
    context.fillRect(left, height - used - cached, size, cached);
    context.fillStyle = shades.used;
    context.fillRect(left, height - used, size, used);
    if (frame.evictedBlocks) {
      context.fillStyle = shades.evicted;
      context.fillRect(left, height + 2 * devicePixelRatio, Math.max(size, 2 * devicePixelRatio), MARKS * devicePixelRatio);
    }
  }

  #line(context, frames, x, height, most, colour) {
    context.strokeStyle = colour;
    context.lineWidth = 1.5 * devicePixelRatio;
    context.beginPath();
    frames.forEach((frame, index) => {
      const isGap = index === 0 || frame.at - frames[index - 1].at > LONGEST_S;
      const y = height - (height - 4) * (frame.rates.output / most);
      if (isGap) context.moveTo(x(frame.at), y);
      else context.lineTo(x(frame.at), y);
    });
    context.stroke();
  }
}
