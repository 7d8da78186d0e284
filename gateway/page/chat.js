// The messages of one conversation, and the form below them.

import { Attachments } from "./attachments.js";
import { byId, count, duration, el } from "./dom.js";
import { markdown } from "./markdown.js";
import { isPlain } from "./settings.js";

const NEAR_END = 80; // pixels: so near to its end the list follows what is added

export class Chat {
  /** `actions`: send(text, files), stop() and again(). */
  constructor(turns, actions) {
    this.turns = turns;
    this.actions = actions;
    this.conversation = null;
    this.attachments = new Attachments((text) => this.say(text));
    this.list = byId("messages");
    this.question = byId("question");
    this.isDrawing = false;
    this.#connect();
  }

  /** Show a conversation from its beginning to its end. */
  show(conversation) {
    this.conversation = conversation;
    this.list.replaceChildren(...conversation.messages.map((message, index) => this.#item(message, index)));
    if (!conversation.messages.length) this.list.append(welcome());
    this.list.scrollTop = this.list.scrollHeight;
    this.#buttons();
  }

  /** Draw what has changed, once for each frame of the screen. */
  renew() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      const { list } = this;
      const follows = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END;
      const { messages } = this.conversation;
      const isShort = list.children.length !== messages.length || list.firstElementChild?.classList.contains("welcome");
      if (isShort) this.show(this.conversation);
      else if (messages.length) list.lastElementChild.replaceWith(this.#item(messages.at(-1), messages.length - 1));
      if (follows) list.scrollTop = list.scrollHeight;
      this.#buttons();
    });
  }

  /** Tell a screen reader; what streams is not read aloud word by word. */
  say(text) {
    byId("said").textContent = text;
  }

  #item(message, index) {
    const isUser = message.role === "user";
    const isLast = index === this.conversation.messages.length - 1;
    const item = el("li", { class: message.role }, el("h2", { class: "unseen" }, isUser ? "You" : "Model"));
    if (isUser) {
      item.append(el("p", { class: "text" }, message.content), ...filesOf(message.files ?? []));
      return item;
    }
    const runs = isLast && this.turns.isRunning(this.conversation.id);
    if (message.reasoning) item.append(reasoning(message, runs));
    const content = isPlain() ? el("pre", { class: "plain" }, message.content) : markdown(message.content);
    item.append(el("div", { class: "text" }, content));
    if (runs) item.append(el("p", { class: "busy" }, message.waiting ? "The server is started again; the answer goes on then." : ""));
    if (message.error) item.append(el("p", { class: "error", role: "alert" }, message.error));
    item.append(this.#foot(message, index, runs, isLast));
    return item;
  }

  #foot(message, index, runs, isLast) {
    const parts = runs ? [] : figures(message, this.conversation.messages[index - 2]);
    const foot = el("p", { class: "foot" }, parts.join(" · "));
    if (!runs && isLast) {
      const name = message.error ? "Try again" : "Regenerate";
      foot.append(el("button", { type: "button", class: "again", onclick: () => this.actions.again() }, name));
    }
    return foot;
  }

  #buttons() {
    const runs = this.turns.isRunning(this.conversation.id);
    byId("stop").hidden = !runs;
    byId("send").disabled = runs;
  }

  #connect() {
    const form = byId("composer");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.question.addEventListener("input", () => this.#fit());
    this.question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.actions.stop();
    });
    byId("stop").addEventListener("click", () => {
      this.actions.stop();
      this.question.focus();
    });
  }

  #send() {
    const text = this.question.value.trim();
    if ((!text && !this.attachments.files.length) || this.turns.isRunning(this.conversation.id)) return;
    if (byId("model").disabled) return; // The server has not said yet what it serves; the field says why.
    this.question.value = "";
    this.#fit();
    this.actions.send(text, this.attachments.take());
  }

  /** Let the field be as high as its text. */
  #fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${Math.min(this.question.scrollHeight + 2, innerHeight * 0.4)}px`;
  }
}

function welcome() {
  const lines = ["Ask something: the answer streams in here.", "Start a second conversation while the first one answers, and watch both in the batch."];
  return el("li", { class: "welcome" }, ...lines.map((line) => el("p", {}, line)));
}

/** What is attached to a question: texts folded, pictures as they are. */
function filesOf(files) {
  return files.map(({ name, text, url }) => {
    if (url) return el("img", { class: "picture", src: url, alt: `Picture ${name}` });
    const content = el("pre", { tabindex: 0 }, text);
    return el("details", { class: "file" }, el("summary", {}, `${name} (${count(text.length)} characters)`), content);
  });
}

function reasoning(message, runs) {
  const isOver = Boolean(message.content) || !runs;
  const text = el("div", { class: "text" }, message.reasoning);
  // A fold that the reader has opened stays open while the answer grows.
  const wasOpen = document.querySelector("#messages > li:last-child details.reasoning")?.open ?? false;
  return el("details", { class: "reasoning", open: runs && wasOpen }, el("summary", {}, isOver ? "Reasoning" : "Reasoning…"), text);
}

/** The line under an answer. `before`: the answer before it. */
function figures(message, before) {
  const parts = [];
  if (message.stopped) parts.push("stopped");
  if (message.cut) parts.push("cut at the most tokens");
  const { usage } = message;
  if (!usage) return parts;
  parts.push(`${count(usage.output)} tokens`);
  if (message.rate) parts.push(`${message.rate.toFixed(1)} tokens/s`);
  if (message.firstS) parts.push(`first after ${duration(message.firstS)}`);
  if (usage.reused !== null) parts.push(`reused ${count(usage.reused)} of ${count(usage.prompt)} prompt tokens`);
  const again = computedAgain(usage, before?.usage);
  if (again) parts.push(`${count(again)} of earlier turns computed again`);
  return parts;
}

/**
 * Tokens of the earlier turns without KV: what the turn before had left in the pool, less what this one has found. It was evicted, or
 * the template and the tokenizer write an answer with other tokens than it was generated with.
 */
export function computedAgain(usage, before) {
  if (!before || usage.reused === null) return 0;
  const known = Math.min(before.prompt + before.output - 1, usage.prompt - 1); // the last token has no KV yet
  const gone = known - usage.reused;
  return gone > known / 10 ? gone : 0; // a few nearly always differ
}
