// The list of conversations: which is shown, which answer right now, and how much of each one's prompt was in the cache.

import { computedAgain } from "./chat.js";
import { byId, count, el } from "./dom.js";

/** Draw it. `actions`: open(id) and remove(id). */
export function showList(conversations, shown, turns, actions) {
  const items = conversations.map((conversation) => {
    const { id, title } = conversation;
    const runs = turns.isRunning(id);
    const open = el(
      "button",
      { type: "button", class: "open", "aria-current": id === shown ? "true" : null, onclick: () => actions.open(id) },
      el("span", { class: "title" }, title || "Conversation"),
      el("span", { class: "kv" }, runs ? "answers…" : cacheLine(conversation)),
    );
    const label = `Delete the conversation ${title}`;
    const remove = el("button", { type: "button", class: "remove", "aria-label": label, onclick: () => actions.remove(id) }, "×");
    return el("li", { class: runs ? "runs" : null }, open, remove);
  });
  byId("conversations").replaceChildren(...items);
}

/** What the latest turn has found of its prompt; nothing where the server does not say. */
function cacheLine({ messages }) {
  const answers = messages.filter((message) => message.usage);
  const [before, latest] = answers.slice(-2).length === 2 ? answers.slice(-2) : [null, answers[0]];
  if (!latest || latest.usage.reused === null) return "";
  const again = computedAgain(latest.usage, before?.usage);
  const cached = `${count(latest.usage.reused)} of ${count(latest.usage.prompt)} cached`;
  return again ? `${cached}, ${count(again)} computed again` : cached;
}
