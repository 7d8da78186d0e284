// What the user has set for all conversations, kept in this browser, and the dialog that changes it.

import { byId } from "./dom.js";

const NAME = "everbatch.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

let values = read();
applyTheme();

export function systemPrompt() {
  return values.system ?? "";
}

/** The sampling fields of a request; one that is not set is left to the server. */
export function sampling() {
  const set = NUMBERS.filter((name) => values[name] !== undefined && values[name] !== "");
  return Object.fromEntries(set.map((name) => [name, Number(values[name])]));
}

/** Whether answers are shown as they were generated: Markdown changes code that stands in no code block. */
export function isPlain() {
  return values.answers === "plain";
}

/** Lets the dialog open and save. `onSaved` is called after a change. */
export function connectSettings(onSaved) {
  const dialog = byId("settings");
  const form = dialog.querySelector("form");
  byId("open-settings").addEventListener("click", () => {
    for (const field of fields(form)) field.value = values[field.name] ?? "";
    dialog.showModal();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    values = Object.fromEntries(fields(form).map((field) => [field.name, field.value.trim()]));
    localStorage.setItem(NAME, JSON.stringify(values));
    applyTheme();
    onSaved();
    dialog.close();
  });
}

/** Buttons that close the dialog they are in. */
export function connectClosing() {
  for (const button of document.querySelectorAll("dialog [data-close]")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
}

function fields(form) {
  return [...form.elements].filter((field) => field.name);
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(NAME)) ?? {};
  } catch {
    return {};
  }
}

function applyTheme() {
  if (values.theme) document.documentElement.dataset.theme = values.theme;
  else delete document.documentElement.dataset.theme;
  document.dispatchEvent(new Event("theme"));
}
