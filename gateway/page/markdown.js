// Markdown to elements. All text becomes text nodes; links go to http and https only; pictures are shown as links.

import { el } from "./dom.js";

const DEEPEST = 8; // nesting of quotes, lists and emphasis; deeper text is shown as it is
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** A fragment with the blocks of a text, which may be the beginning of one that still grows. */
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const found = document.createDocumentFragment();
  for (let at = 0; at < lines.length; ) {
    const [block, next] = blockAt(lines, at, depth);
    if (block) found.append(block);
    at = next;
  }
  return found;
}

/** The block that begins at a line (null for a blank one), and the line behind it. */
function blockAt(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [el(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2])), at + 1];
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (depth < DEEPEST && /^ {0,3}>/.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) return table(lines, at);
  return paragraph(lines, at);
}

function fenced(lines, at, [, mark, language]) {
  const isEnd = (line) => line.trimStart().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  return [codeBlock(lines.slice(at + 1, end).join("\n"), language), end + 1];
}

function codeBlock(text, language) {
  const copy = el("button", { type: "button", class: "copy" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed"; // Browsers want https or localhost for it.
    }
  });
  const code = el("code", {}, text);
  return el("figure", { class: "code" }, el("figcaption", {}, language || "text", copy), el("pre", { tabindex: 0 }, code));
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return [el("blockquote", {}, blocks(inside, depth + 1)), end];
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const item = ITEM.exec(lines[end]);
    if (item && item[1].length <= indent.length + 1) {
      if (/\d/.test(item[2]) !== isOrdered) break;
      items.push([item[3]]);
    } else if (/^\s{2,}/.test(lines[end])) {
      items.at(-1).push(lines[end].slice(Math.min(indent.length + 2, lines[end].search(/\S|$/))));
    } else if (lines[end].trim() || !/^\s{2,}\S|^\s*(?:[-*+]|\d{1,9}[.)])\s/.test(lines[end + 1] ?? "")) {
      break;
    }
  }
  const start = isOrdered && Number.parseInt(mark, 10) !== 1 ? { start: Number.parseInt(mark, 10) } : {};
  const shown = items.map((inside) => el("li", {}, tight(inside, depth)));
  return [el(isOrdered ? "ol" : "ul", start, ...shown), end];
}

/** The text of an item: without a paragraph around it where there is only one line. */
function tight(lines, depth) {
  return lines.length === 1 ? inline(lines[0]) : blocks(lines, depth + 1);
}

function table(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const head = el("tr", {}, ...cells(lines[at]).map((cell) => el("th", { scope: "col" }, cell)));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end += 1) {
    rows.push(el("tr", {}, ...cells(lines[end]).map((cell) => el("td", {}, cell))));
  }
  return [el("div", { class: "wide-table" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))), end];
}

function paragraph(lines, at) {
  let end = at + 1;
  const isOther = (line) => !line.trim() || FENCE.test(line) || HEADING.test(line) || /^ {0,3}>/.test(line) || ITEM.test(line);
  while (end < lines.length && !isOther(lines[end])) end += 1;
  const text = el("p"); // the style sheet keeps line breaks and indents: a model may write code outside of a fence
  lines.slice(at, end).forEach((line, index) => text.append(index ? "\n" : "", inline(line)));
  return [text, end];
}

const MARKS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

/** The text of one line. */
function inline(text, depth = 0) {
  const found = document.createDocumentFragment();
  let plain = "";
  const put = (element) => {
    found.append(plain, element);
    plain = "";
  };
  for (let at = 0; at < text.length; ) {
    const [element, next] = depth < DEEPEST ? spanAt(text, at, depth) : [null, at];
    if (element) put(element);
    else if (next > at) plain += text.slice(at + 1, next); // a backslash and what it protects
    else plain += text[at];
    at = Math.max(next, at + 1);
  }
  found.append(plain);
  return found;
}

/** The element that begins at a place, and the place behind it; [null, at] where none does. */
function spanAt(text, at, depth) {
  const letter = text[at];
  if (letter === "\\" && /[\\`*_{}[\]()#+\-.!~|>]/.test(text[at + 1] ?? "")) return [null, at + 2];
  if (letter === "`") return codeAt(text, at);
  if (letter === "[" || (letter === "!" && text[at + 1] === "[")) return linkAt(text, letter === "!" ? at + 1 : at, at, depth);
  if (letter === "h" && (at === 0 || /[\s(<]/.test(text[at - 1]))) return addressAt(text, at);
  if ("*_~".includes(letter)) return markedAt(text, at, depth);
  return [null, at];
}

function codeAt(text, at) {
  let width = 1;
  while (text[at + width] === "`") width += 1;
  const end = text.indexOf("`".repeat(width), at + width);
  if (end < 0 || text[end + width] === "`") return [null, at];
  return [el("code", {}, text.slice(at + width, end).trim() || " "), end + width];
}

function linkAt(text, open, at, depth) {
  const middle = text.indexOf("](", open);
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  if (end < 0 || text.slice(open + 1, middle).includes("[")) return [null, at];
  const link = linkTo(text.slice(middle + 2, end).trim().split(/\s/)[0], inline(text.slice(open + 1, middle), depth + 1));
  return link ? [link, end + 1] : [null, at];
}

function addressAt(text, at) {
  const found = /^https?:\/\/[^\s<>"')\]]+/.exec(text.slice(at, at + 2000));
  if (!found) return [null, at];
  const address = found[0].replace(/[.,;:!?]+$/, "");
  return [linkTo(address, address), at + address.length];
}

/** null for an address of another kind than http and https. */
function linkTo(address, content) {
  if (!/^https?:\/\//i.test(address)) return null;
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, content);
}

function markedAt(text, at, depth) {
  const mark = MARKS[text.slice(at, at + 2)] ? text.slice(at, at + 2) : text[at];
  const tag = MARKS[mark];
  const start = at + mark.length;
  const isWord = /\w/.test(text[at - 1] ?? "") && mark[0] === "_"; // some_name_with_underscores
  if (!tag || isWord || !text[start] || /\s/.test(text[start])) return [null, at];
  let end = text.indexOf(mark, start + 1);
  while (end > 0 && (/\s/.test(text[end - 1]) || (mark.length === 1 && text[end + 1] === mark))) {
    end = text.indexOf(mark, end + (text[end + 1] === mark ? 2 : 1));
  }
  if (end < 0 || (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? ""))) return [null, at];
  return [el(tag, {}, inline(text.slice(start, end), depth + 1)), end + mark.length];
}
