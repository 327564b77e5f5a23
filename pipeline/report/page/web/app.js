// Opens the data, draws the page that the address names, and follows the keyboard.
"use strict";

const PAGES = plain({
  verdict: ["Verdict", verdictPage],
  curves: ["Curves", curvesPage],
  samples: ["Samples", samplesPage],
  versus: ["Versus", versusPage],
  merge: ["Merge", mergePage],
  routing: ["Routing", routingPage],
  time: ["Time", timePage],
  lineage: ["Lineage", lineagePage],
  runs: ["Runs", runsPage],
});
const KEYS = [
  ["1 to 9", "the pages"],
  ["j, k", "the next and the previous sample"],
  ["m", "compare the next samples with this one"],
  ["/", "search"],
  ["d", "dark or light"],
  ["?", "these keys"],
];

async function open() {
  const text = atob(document.getElementById("data").textContent);
  const packed = new Uint8Array(text.length);
  // Uint8Array.from with a function takes 20 times as long: 2 s of 15 MB.
  for (let at = 0; at < text.length; at++) packed[at] = text.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

function frame(data, current) {
  const alarms = data.health.filter((symptom) => symptom.alarm).length;
  const advice = data.health.length - alarms;
  const unknown = (data.verdicts || []).filter((verdict) => !isGood(verdict)).length;
  const text = alarms
    ? `! ${alarms} alarm${alarms > 1 ? "s" : ""}`
    : advice
      ? `· ${advice} to look at`
      : unknown
        ? "· too short to say"
        : "✓ healthy";
  document.getElementById("header").replaceChildren(
    h("h1", {}, data.run.name),
    h("span", { class: "quiet" }, `seed ${data.run.seed} · written ${clockTime(data.made)} UTC`),
    h("span", { class: alarms ? "alarm" : advice || unknown ? "advice" : "fine" }, text),
    h(
      "details",
      { id: "keys" },
      h("summary", {}, "keys"),
      h(
        "dl",
        {},
        KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)]),
      ),
    ),
  );
  const pages = Object.entries(PAGES).map(([page, [title]]) =>
    h(
      "a",
      { id: `page-${page}`, href: link(page), "aria-current": page === current ? "page" : null },
      title,
    ),
  );
  document.getElementById("nav").replaceChildren(...pages);
}

function draw(data) {
  const where = place();
  const page = PAGES[where.page] ? where.page : "verdict";
  frame(data, page);
  const focused = document.activeElement && document.activeElement.id;
  document
    .getElementById("main")
    .replaceChildren(...PAGES[page][1](data, where).flat().filter(Boolean));
  if (focused && document.getElementById(focused))
    document.getElementById(focused).focus({ preventScroll: true });
  document.title = `${data.run.name} · ${PAGES[page][0]}`;
  document.body.dataset.page = page;
  document.body.dataset.drawn = location.hash;
}

function keys(event) {
  const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName);
  if (event.key === "Escape") document.activeElement.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const page = Object.keys(PAGES)[Number(event.key) - 1];
  if (page) go(page);
  const list = document.getElementById("samples");
  if (["j", "k"].includes(event.key) && list && document.activeElement !== list) {
    list.focus();
    list.dispatchEvent(new KeyboardEvent("keydown", { key: event.key }));
  }
  if (event.key === "m" && document.getElementById("mark")) document.getElementById("mark").click();
  if (event.key === "/" && document.getElementById("search")) {
    event.preventDefault();
    document.getElementById("search").focus();
  }
  if (event.key === "d") document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  if (event.key === "d") draw(opened); // charts take their colours when they are drawn
  if (event.key === "?") document.getElementById("keys").toggleAttribute("open");
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

let opened;
open()
  .then((data) => {
    opened = withoutInherited(data);
    addEventListener("hashchange", () => draw(data));
    addEventListener("keydown", keys);
    draw(data);
    document.body.dataset.ready = String(Math.round(performance.now())); // milliseconds
  })
  .catch((error) => {
    const text = `The report cannot be opened: ${error}. It needs a browser of 2023 or later.`;
    document.getElementById("main").replaceChildren(h("p", { class: "alarm" }, text));
  });
