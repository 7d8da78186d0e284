// Texts and pictures that are attached to the next question: chosen, dropped or pasted.

import { byId, el } from "./dom.js";
import { isPicture, pictureOf } from "./pictures.js";

const LARGEST_TEXT = 1 << 20; // bytes; the server takes bodies of 4 MiB unless it is set otherwise
const MOST_FILES = 8;

/** Each is { name, text } or, of a picture, { name, url }. */
export class Attachments {
  /** `say` tells a screen reader. */
  constructor(say) {
    this.say = say;
    this.files = [];
    this.takesPictures = false;
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", (event) => this.#add([...event.target.files]));
    byId("question").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (!files.length) return;
      event.preventDefault();
      this.#add(files);
    });
    this.#connectDropping(byId("chat"));
  }

  /** Whether the model that is chosen takes pictures. */
  allowPictures(isAllowed) {
    this.takesPictures = isAllowed;
    byId("attach").textContent = isAllowed ? "Attach text or picture" : "Attach text";
    if (isAllowed || !this.files.some(({ url }) => url)) return;
    this.files = this.files.filter(({ url }) => !url);
    this.#show("this model takes no pictures; they are not attached any more");
  }

  /** The files of a question that is sent now. */
  take() {
    const { files } = this;
    this.files = [];
    this.#show();
    return files;
  }

  async #add(files) {
    let refused = "";
    for (const file of files) {
      try {
        const found = await this.#read(file);
        if (this.files.length === MOST_FILES) refused = `${MOST_FILES} files are attached, the limit`;
        else this.files.push(found);
      } catch (error) {
        refused = error.message;
      }
    }
    byId("file").value = ""; // so that the same file can be chosen again
    this.#show(refused);
    if (!refused && this.files.length) this.say(`${this.files.at(-1).name} is attached`);
    byId("question").focus();
  }

  /** Throws an Error with a sentence for the user. */
  async #read(file) {
    if (isPicture(file)) {
      if (!this.takesPictures) throw new Error(`${file.name} is a picture, and this model takes no pictures`);
      return pictureOf(file);
    }
    if (file.size > LARGEST_TEXT) throw new Error(`${file.name} has more than 1 MiB, the limit`);
    const text = await file.text();
    if (text.includes("\0") || text.includes("\ufffd")) throw new Error(`${file.name} is not text in UTF-8`);
    return { name: file.name, text };
  }

  #show(refused = "") {
    const chips = this.files.map((file, index) => {
      const remove = () => {
        this.files.splice(index, 1);
        this.#show();
        this.say(`${file.name} is removed`);
        byId("question").focus();
      };
      const button = el("button", { type: "button", "aria-label": `Remove ${file.name}`, onclick: remove }, "×");
      if (!file.url) return el("li", { class: "chip" }, file.name, button);
      return el("li", { class: "thumb" }, el("img", { src: file.url, alt: `Picture ${file.name}` }), button);
    });
    if (refused) chips.push(el("li", { class: "error", role: "alert" }, refused));
    byId("files").replaceChildren(...chips);
  }

  #connectDropping(place) {
    const mark = (isOver) => place.classList.toggle("dropping", isOver);
    place.addEventListener("dragover", (event) => {
      event.preventDefault();
      mark(event.dataTransfer.types.includes("Files"));
    });
    place.addEventListener("dragleave", (event) => {
      if (!place.contains(event.relatedTarget)) mark(false);
    });
    place.addEventListener("drop", (event) => {
      event.preventDefault();
      mark(false);
      this.#add([...event.dataTransfer.files]);
    });
  }
}
