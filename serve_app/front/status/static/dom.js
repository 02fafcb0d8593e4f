// Elements are made once and then only changed, so that focus, selection and scrolling stay.

export const $ = (id) => document.getElementById(id);

/** An element, as "p.muted.note"; attributes by name and `on...` listeners, if any; children. */
export function h(kind, ...children) {
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  const [tag, ...classes] = kind.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** An element of a drawing. */
export function s(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value == null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** Make the children of `parent` those of `items`, [key, item] each, in that order. */
export function keep(parent, items, make, update = (child, item) => child.update?.(item)) {
  const known = new Map();
  for (const child of [...parent.children]) {
    if (child.key === undefined) child.remove();
    else known.set(child.key, child);
  }
  let place = parent.firstElementChild;
  for (const [key, item] of items) {
    const child = known.get(key) ?? make(key, item);
    child.key = key;
    known.delete(key);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

const ICONS = { gone: "gone", unseen: "gone", silent: "silent" };
const WORDS = { silent: "no answer", unseen: "not watched" };

export const word = (state) => WORDS[state] ?? state;

function icon(state) {
  return s("svg", { class: "icon", "aria-hidden": "true" }, s("use", { href: `#i-${ICONS[state] ?? state}` }));
}

/** A state as a shape and a word; the colour comes on top. */
export function pill(state) {
  return h("span.pill", { "data-state": state }, icon(state), h("span", word(state)));
}

export function setPill(node, state, text = word(state)) {
  if (node.dataset.state !== state) {
    node.dataset.state = state;
    node.firstElementChild.replaceWith(icon(state));
  }
  setText(node.lastElementChild, text);
}

/** <div><dt>label</dt><dd>…</dd></div> for each label; gives the element and its <dd>s. */
export function facts(...labels) {
  const values = labels.map(() => h("dd"));
  const rows = labels.map((label, i) => h("div", h("dt", label), values[i]));
  return [h("dl.facts", ...rows), values];
}
