// Elements, numbers as text, and the address: what every page is made of.
"use strict";

/** Return an element: h("td", { class: "number" }, "4"); text is never read as HTML. */
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value);
  }
  const present = children
    .flat(3)
    .filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...present);
  return element;
}

/** Return an object without inherited keys, so that nothing is found under `constructor`. */
function plain(entries) {
  return Object.assign(Object.create(null), entries);
}

/** Take the inherited keys from the data's objects: a metric may be named `toString`. */
function withoutInherited(value) {
  if (value === null || typeof value !== "object") return value;
  if (Array.isArray(value)) {
    if (typeof value[0] === "object") value.forEach(withoutInherited);
    return value;
  }
  Object.setPrototypeOf(value, null);
  Object.values(value).forEach(withoutInherited);
  return value;
}

/** Return a number in at most four digits, 0.05 or 2e-7, a whole one in all; nothing for nothing. */
function short(value) {
  if (value === null || value === undefined) return "";
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  const few = size && (size < 1e-3 || size >= 1e9);
  return few
    ? value
        .toExponential(2)
        .replace(/\.?0+e/, "e")
        .replace("e+", "e")
    : String(Number(value.toPrecision(4)));
}

/** Return minutes as `48 s`, `3 min 05 s` or `2 h 10 min`; nothing for nothing. */
function duration(minutes) {
  if (minutes === null || minutes === undefined) return "";
  const seconds = Math.round(60 * minutes);
  const two = (value) => String(value).padStart(2, "0");
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${two(Math.floor((seconds % 3600) / 60))} min`;
}

function percent(value) {
  return value === null || value === undefined ? "" : (100 * value).toFixed(1);
}

/** Return a number of bytes as GiB or MiB. */
function bytes(value) {
  if (!value) return "";
  const mebi = value / 2 ** 20;
  return mebi < 1024 ? `${mebi.toFixed(0)} MiB` : `${(mebi / 1024).toFixed(1)} GiB`;
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** Return a table; cells are texts, numbers or elements, and numbers stand at the right. */
function table(headings, rows, label) {
  const numeric = headings.map((_, column) => rows.some((row) => typeof row[column] === "number"));
  const cell = (tag, column, content) =>
    h(
      tag,
      { class: numeric[column] ? "number" : null, scope: tag === "th" ? "col" : null },
      typeof content === "number" ? short(content) : content,
    );
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label || "Table" },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          headings.map((heading, column) => cell("th", column, heading)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((content, column) => cell("td", column, content)),
          ),
        ),
      ),
    ),
  );
}

/** Return a labelled choice; `all` is the text of no choice, and null where there must be one. */
function choice(label, name, values, selected, onchange, all = "all") {
  const options = values.map((value) =>
    h(
      "option",
      { value: String(value), selected: String(value) === String(selected) },
      String(value),
    ),
  );
  if (all !== null) options.unshift(h("option", { value: "" }, all));
  return h("label", {}, label, h("select", { id: `choose-${name}`, name, onchange }, options));
}

/** Return the choice of a stage of a page, beside its other choices. */
function stageChoice(page, stages, selected, ...otherChoices) {
  const change = (event) => go(page, event.target.value);
  return h(
    "div",
    { class: "filters" },
    choice("stage", "stage", stages, selected, change, null),
    otherChoices,
  );
}

/** Return what the address says: the page, the stage and the options, as `link` wrote them. */
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, stage] = path.split("/").map(decoded);
  return { page: page || "verdict", stage, options: new URLSearchParams(query || "") };
}

/** Return a part of an address decoded; one that nobody encoded, such as `%`, as it is. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function link(page, stage, options) {
  const path = [page, ...(stage ? [stage] : [])].map(encodeURIComponent).join("/");
  const stated = Object.entries(options || {}).filter(
    ([, value]) => value !== "" && value !== null,
  );
  const query = new URLSearchParams(stated).toString();
  return "#/" + path + (query ? "?" + query : "");
}

function go(page, stage, options) {
  location.hash = link(page, stage, options);
}

/** Return the present options with others in place of some. */
function withOptions(changed) {
  return { ...Object.fromEntries(place().options.entries()), ...changed };
}

/** Change some options of the address, and nothing else of it. */
function goWith(changed) {
  const { page, stage } = place();
  go(page, stage, withOptions(changed));
}

/** Return a colour of the page's style. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Return a canvas's pen in units of the page, whatever the screen's are; it clears the canvas. */
function penOf(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return pen;
}

/** Return the width that a page's content has. */
function contentWidth(element) {
  const style = getComputedStyle(element);
  return element.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
}

/** Return a text whose parts between backticks are code. */
function withCode(text) {
  return text.split("`").map((piece, at) => (at % 2 ? h("code", {}, piece) : piece));
}
