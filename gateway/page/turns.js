// Turns: questions that are being answered, several conversations at once.

import { chat } from "./api.js";
import { sampling, systemPrompt } from "./settings.js";

const SHORTEST_S = 0.02; // an answer that comes at once says nothing about the pace of the model

/** Dispatches "change" with the id of a conversation whose answer has grown, ended or failed. */
export class Turns extends EventTarget {
  constructor(store) {
    super();
    this.store = store;
    this.running = new Map(); // id of a conversation -> AbortController
  }

  isRunning(id) {
    return this.running.has(id);
  }

  stop(id) {
    this.running.get(id)?.abort();
  }

  /** Answer the last question of a conversation. Failures are noted in the answer. */
  async answer(conversation, model) {
    if (this.isRunning(conversation.id)) return;
    const control = new AbortController();
    const body = { model, messages: messagesOf(conversation), ...sampling() };
    const answer = { role: "assistant", content: "" };
    conversation.messages.push(answer);
    this.running.set(conversation.id, control);
    this.store.save(conversation);
    this.#tell(conversation);
    try {
      await this.#receive(conversation, answer, chat(body, control.signal));
    } catch (error) {
      if (error.name === "AbortError") answer.stopped = true;
      else answer.error = error.message;
    } finally {
      delete answer.waiting;
      this.running.delete(conversation.id);
      if (this.store.all.has(conversation.id)) this.store.save(conversation); // It may be deleted meanwhile.
      this.#tell(conversation);
    }
  }

  async #receive(conversation, answer, chunks) {
    const began = performance.now();
    let first = 0;
    for await (const chunk of chunks) {
      answer.waiting = Boolean(chunk.waiting);
      const delta = chunk.choices?.[0]?.delta ?? {};
      const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
      if (delta.content || reasoning) {
        first ||= performance.now();
        answer.content += delta.content ?? "";
        if (reasoning) answer.reasoning = (answer.reasoning ?? "") + reasoning;
      }
      if (chunk.choices?.[0]?.finish_reason === "length") answer.cut = true;
      if (chunk.usage) answer.usage = usageOf(chunk.usage);
      this.#tell(conversation);
    }
    if (first && answer.usage) {
      const seconds = (performance.now() - first) / 1000;
      answer.firstS = (first - began) / 1000;
      answer.rate = seconds > SHORTEST_S ? (answer.usage.output - 1) / seconds : 0;
    }
  }

  #tell(conversation) {
    this.dispatchEvent(new CustomEvent("change", { detail: conversation.id }));
  }
}

function usageOf(usage) {
  const reused = usage.prompt_tokens_details?.cached_tokens ?? null; // null: the server keeps it to itself
  return { prompt: usage.prompt_tokens, output: usage.completion_tokens, reused };
}

/** The messages of a request. A question that got no word of an answer is left out with it: what was wrong would stay wrong. */
export function messagesOf(conversation) {
  const system = systemPrompt();
  const { messages } = conversation;
  const isAnswered = (index) => index === messages.length - 1 || messages[index + 1].content;
  const kept = messages.filter((message, index) => (message.role === "user" ? isAnswered(index) : message.content));
  const turns = kept.map((message) => ({
    role: message.role,
    content: message.role === "user" ? questionOf(message) : message.content,
  }));
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}

/** A question: its pictures, and its text with the attached texts, each in a fence that it cannot close. */
function questionOf({ content, files = [] }) {
  const pictures = files.filter(({ url }) => url).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  const text = textOf(content, files.filter(({ url }) => !url));
  if (!pictures.length) return text;
  return text ? [...pictures, { type: "text", text }] : pictures;
}

function textOf(content, files) {
  const blocks = files.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text}\n${fence}`;
  });
  return [content, ...blocks].filter(Boolean).join("\n\n");
}
