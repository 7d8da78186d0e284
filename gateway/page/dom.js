// Makes elements. Text of a model or a client enters the page here, as text and never as markup.

/**
 * An element. `properties`: attributes by name; `class`, and `on...` with a function, as in HTML; false and null are left out.
 * Children that are strings become text nodes.
 */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

/** A number for people: 12,345. */
export function count(number) {
  return Math.round(number).toLocaleString("en");
}

/** A duration for people. */
export function duration(seconds) {
  if (seconds > 0 && seconds < 0.001) return "under 1 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}
