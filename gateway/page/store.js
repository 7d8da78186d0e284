// Conversations, kept in this browser (localStorage), each under a key of its own.

const PREFIX = "everbatch.conversation.";
const TITLE = 60; // characters

/**
 * A conversation: { id, title, updated (ms), messages }. A message: { role, content }, of the user also `files`
 * ([{ name, text }], or { name, url } of a picture), of the assistant also `reasoning`, `usage`, `firstS`, `rate`, `stopped` and `error`.
 */
export class Conversations extends EventTarget {
  constructor() {
    super();
    this.all = new Map();
    this.isFull = false; // the browser has no room for the latest change
    for (const name of Object.keys(localStorage)) {
      const found = name.startsWith(PREFIX) ? read(name) : null;
      if (found) this.all.set(found.id, found);
    }
  }

  /** All, the latest first. */
  list() {
    return [...this.all.values()].sort((a, b) => b.updated - a.updated);
  }

  /** A new one, which is kept from its first message on. */
  create() {
    return { id: newId(), title: "New conversation", updated: Date.now(), messages: [] };
  }

  save(conversation) {
    const first = conversation.messages[0];
    if (first) conversation.title = first.content.trim().split("\n")[0].slice(0, TITLE) || first.files[0]?.name;
    conversation.updated = Date.now();
    this.all.set(conversation.id, conversation);
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      this.isFull = false;
    } catch {
      this.isFull = true; // The page says so; the conversation goes on in this tab.
    }
    this.dispatchEvent(new Event("change"));
  }

  remove(id) {
    this.all.delete(id);
    localStorage.removeItem(PREFIX + id);
    this.dispatchEvent(new Event("change"));
  }
}

/** crypto.randomUUID is there on https and localhost only. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** null for what this page has not written. */
function read(name) {
  try {
    const found = JSON.parse(localStorage.getItem(name));
    return found.id === name.slice(PREFIX.length) && Array.isArray(found.messages) ? found : null;
  } catch {
    return null;
  }
}
