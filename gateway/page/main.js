// The page: what a click leads to.

import { models, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, el } from "./dom.js";
import { LivePanel } from "./live.js";
import { connectClosing, connectSettings } from "./settings.js";
import { showList } from "./sidebar.js";
import { Conversations } from "./store.js";
import { Turns } from "./turns.js";

const RETRY_MS = 2000;
const store = new Conversations();
const turns = new Turns(store);
const live = new LivePanel();
const wide = matchMedia("(min-width: 1000px)");
const chat = new Chat(turns, {
  send(text, files) {
    chat.conversation.messages.push({ role: "user", content: text, files });
    answer();
  },
  stop: () => turns.stop(chat.conversation.id),
  again() {
    if (turns.isRunning(chat.conversation.id)) return;
    chat.conversation.messages.pop();
    answer();
    if (wide.matches) byId("question").focus(); // the button that had the focus is gone
  },
});

async function answer() {
  const { conversation } = chat;
  await turns.answer(conversation, byId("model").value);
  if (chat.conversation !== conversation) return;
  const { error, stopped } = conversation.messages.at(-1);
  if (!error) chat.say(stopped ? "Stopped" : "The answer is complete"); // an error is an alert by itself
}

function open(conversation) {
  chat.show(conversation);
  list();
  choosePanel("chat");
  if (wide.matches) byId("question").focus();
}

function list() {
  showList(store.list(), chat.conversation.id, turns, {
    open: (id) => open(store.all.get(id)),
    remove(id) {
      if (!confirm(`Delete the conversation “${store.all.get(id).title}”?`)) return;
      turns.stop(id);
      store.remove(id);
      if (chat.conversation.id === id) open(store.list()[0] ?? store.create());
    },
  });
  byId("kept").hidden = !store.isFull;
  byId("kept").textContent = "This browser has no room left: the latest messages are lost when the tab is closed. Delete a conversation.";
}

/** On a narrow screen one panel is shown; on a wide one the batch stands beside the chat, unless it is switched off. */
function choosePanel(name) {
  document.body.dataset.panel = name;
  for (const button of document.querySelectorAll(".tabs button")) {
    if (button.dataset.panel === name) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
  watch();
}

/** The server is asked for views only while they are seen. */
function watch() {
  const isOn = byId("toggle-live").getAttribute("aria-pressed") === "true";
  document.body.classList.toggle("without-live", !isOn);
  const isSeen = !document.hidden && (wide.matches ? isOn : document.body.dataset.panel === "live");
  if (isSeen) live.start();
  else live.stop();
}

async function loadModels() {
  const select = byId("model");
  try {
    const found = await models();
    select.replaceChildren(...found.map(({ name, takesPictures }) => el("option", { "data-pictures": takesPictures }, name)));
    select.disabled = false;
    allowPictures();
    byId("question").placeholder = "Ask the model";
  } catch (error) {
    byId("question").placeholder = error.message;
    if (error.status !== 401) setTimeout(loadModels, RETRY_MS); // The dialog for the key asks again.
  }
}

/** The chat takes pictures where the model that is chosen does. */
function allowPictures() {
  chat.attachments.allowPictures("pictures" in (byId("model").selectedOptions[0]?.dataset ?? {}));
}

function connectKey() {
  const dialog = byId("key");
  const ask = () => dialog.open || dialog.showModal();
  document.addEventListener("key-wanted", ask);
  byId("other-key").addEventListener("click", () => {
    byId("settings").close();
    ask();
  });
  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const field = event.target.elements.key;
    setKey(field.value.trim());
    field.value = "";
    dialog.close();
    loadModels();
    live.stop();
    watch();
  });
}

function connect() {
  connectSettings(() => chat.show(chat.conversation));
  connectClosing();
  connectKey();
  byId("new").addEventListener("click", () => open(store.create()));
  byId("model").addEventListener("change", allowPictures);
  byId("toggle-live").addEventListener("click", ({ target }) => {
    target.setAttribute("aria-pressed", String(target.getAttribute("aria-pressed") !== "true"));
    watch();
  });
  for (const button of document.querySelectorAll(".tabs button")) {
    button.addEventListener("click", () => choosePanel(button.dataset.panel));
  }
  document.addEventListener("visibilitychange", watch);
  wide.addEventListener("change", watch);
  store.addEventListener("change", list);
  turns.addEventListener("change", (event) => {
    if (event.detail === chat.conversation.id) chat.renew();
  });
}

connect();
open(store.list()[0] ?? store.create());
loadModels();
