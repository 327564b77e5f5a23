// The sample browser: the trend, a step, a group, a sample, its tokens.
"use strict";

const SHOWN = 300; // of the samples found, in the list
const CLIPPED = 200; // characters of a response in the list
const SHORT = 40; // characters of a prompt before it
const KEY_DIGITS = 12; // of a problem's key
const ORDERS = ["first", "worst", "longest", "flipped"];
const FILTERS = ["domain", "model", "finish_reason"];

function samplesPage(data, { stage, options }) {
  const stages = Object.keys(data.samples);
  if (!stages.length)
    return [
      h("p", {}, "No samples are recorded, or this report is of a run before its first step."),
    ];
  const name = stages.includes(stage) ? stage : stages[0];
  const own = data.samples[name];
  const found = select(own, options);
  const chosen = Math.min(Number(options.get("at")) || 0, Math.max(found.length - 1, 0));
  const from = Math.max(0, Math.min(chosen - SHOWN / 2, found.length - SHOWN));
  const list = h(
    "div",
    {
      class: "list",
      role: "listbox",
      tabindex: 0,
      "aria-label": "Samples",
      "aria-activedescendant": found.length ? `sample-${chosen}` : null,
      id: "samples",
    },
    found
      .slice(from, from + SHOWN)
      .map((index, at) => sampleOption(own, index, from + at, from + at === chosen)),
  );
  list.addEventListener("keydown", (event) => move(event, found.length, chosen));
  queueMicrotask(() => {
    const current = list.querySelector("[aria-selected=true]");
    if (current) current.scrollIntoView({ block: "nearest" });
  });
  const shown = found.length
    ? sampleView(data, name, found[chosen], options)
    : h("p", {}, "No sample is like that.");
  return [
    stageChoice("samples", stages, name),
    sampleFilters(own, name, options),
    h("p", { id: "count" }, countText(own, found)),
    trend(own, found, name),
    h(
      "div",
      { class: "browser" },
      list,
      h("section", { id: "sample", "aria-label": "Sample" }, shown),
    ),
  ];
}

function countText(own, found) {
  const part = own.left_out
    ? `; the stage recorded ${own.of}, and those of ${own.prompts - own.left_out} of ${own.prompts} prompts are here`
    : "";
  const listed = found.length > SHOWN ? `; ${SHOWN} are listed` : "";
  return `${found.length} of ${own.columns.step.length} samples${part}${listed}`;
}

function valueOf(own, name, index) {
  const value = own.columns[name] ? own.columns[name][index] : null;
  return own.names[name] && value !== null ? own.names[name][value] : value;
}

/** Return the numbers of the samples that the options ask for, in their order. */
function select(own, options) {
  const { columns } = own;
  let found = columns.step.map((_, index) => index);
  const keep = (wanted, test) => {
    if (wanted) found = found.filter(test);
  };
  for (const name of FILTERS) {
    const number = own.names[name] ? own.names[name].indexOf(options.get(name)) : -1;
    keep(options.get(name), (index) => columns[name][index] === number);
  }
  const steps = (options.get("step") || "").split(/[ ,]+/).filter(Boolean).map(Number);
  keep(steps.length, (index) => steps.includes(columns.step[index]));
  const problem = options.get("problem");
  // A redacted report has numbers for keys, of which "1" is no beginning of "10".
  const whole = own.names.problem.includes(problem);
  keep(problem, (index) => {
    const key = valueOf(own, "problem", index) || "";
    return whole ? key === problem : key.startsWith(problem);
  });
  const solved = Number(options.get("solved") === "yes");
  keep(options.get("solved"), (index) => columns.solved[index] === solved);
  const scored = (options.get("reward") || "").split("=");
  const scores = scored.length > 1 ? own.parts[scored[0].trim()] || [] : columns.reward;
  keep(options.get("reward"), (index) => scores[index] === Number(scored.at(-1)));
  if (options.get("search")) {
    let pattern;
    try {
      pattern = new RegExp(options.get("search"));
    } catch {
      return [];
    }
    keep(true, (index) =>
      ["prompt", "response"].some((name) => pattern.test(valueOf(own, name, index) || "")),
    );
  }
  return ordered(own, found, options.get("order"));
}

function ordered(own, found, order) {
  const { reward, step, tokens } = own.columns;
  if (order === "worst") {
    const graded = found.filter((index) => reward[index] !== null);
    return graded.sort((one, other) => reward[one] - reward[other] || step[other] - step[one]);
  }
  if (order === "longest")
    return found.sort((one, other) => tokens[other] - tokens[one] || step[other] - step[one]);
  return order === "flipped" ? flipped(own, found) : found;
}

/** Return a sample of the first and of the last step of each prompt that became right or wrong. */
function flipped(own, found) {
  const { step, solved, problem, domain } = own.columns;
  const prompts = new Map();
  for (const index of found) {
    if (problem[index] === null || solved[index] === null) continue;
    const key = `${domain[index]} ${problem[index]}`;
    if (!prompts.has(key)) prompts.set(key, new Map());
    const steps = prompts.get(key);
    steps.set(step[index], [...(steps.get(step[index]) || []), index]);
  }
  return [...prompts.values()].flatMap((steps) => {
    const ends = [Math.min(...steps.keys()), Math.max(...steps.keys())].map((each) =>
      steps.get(each),
    );
    const right = ends.map((own) => Number(mean(own.map((index) => solved[index])) >= 0.5));
    return right[0] === right[1]
      ? []
      : ends.map((own, at) => own.find((index) => solved[index] === right[at]));
  });
}

function sampleFilters(own, stage, options) {
  const change = () => {
    const values = Object.fromEntries(new FormData(form).entries());
    go("samples", stage, {
      ...values,
      order: values.order === "first" ? "" : values.order,
      mark: options.get("mark") || "",
      colour: options.get("colour") || "",
    });
  };
  const input = (name, label, attributes) =>
    h(
      "label",
      {},
      label,
      h("input", { name, value: options.get(name) || "", onchange: change, ...attributes }),
    );
  const distinct = (name) => own.names[name] || [];
  const submit = (event) => {
    event.preventDefault();
    change();
  };
  const form = h(
    "form",
    { class: "filters", id: "filters", onsubmit: submit },
    distinct("domain").length > 1
      ? choice("domain", "domain", distinct("domain"), options.get("domain"), change)
      : null,
    distinct("model").length
      ? choice("model", "model", distinct("model"), options.get("model"), change)
      : null,
    input("step", "steps", { size: 6 }),
    choice("solved", "solved", ["yes", "no"], options.get("solved"), change),
    choice(
      "finish",
      "finish_reason",
      distinct("finish_reason"),
      options.get("finish_reason"),
      change,
    ),
    input("reward", "reward, or NAME=SCORE", { size: 12 }),
    input("problem", "problem", { size: 14 }),
    own.names.response
      ? input("search", "search (regular expression)", { id: "search", size: 22 })
      : null,
    choice("order", "order", ORDERS, options.get("order") || "first", change, null),
  );
  return form;
}

function sampleOption(own, index, at, selected) {
  const reward = own.columns.reward[index];
  const count = own.columns.tokens[index];
  const about = [
    valueOf(own, "model", index) || `step ${own.columns.step[index]}`,
    valueOf(own, "domain", index),
    reward === null ? "no reward" : `reward ${short(reward)}`,
    `${count} token${count === 1 ? "" : "s"}`,
  ];
  return h(
    "div",
    {
      role: "option",
      id: `sample-${at}`,
      "aria-selected": String(selected),
      "data-index": index,
      onclick: () => goTo(at),
    },
    h("div", { class: "quiet" }, about.join(" · ")),
    h(
      "div",
      { class: "clip code" },
      h("span", { class: "quiet" }, `${(valueOf(own, "prompt", index) ?? "").slice(0, SHORT)} `),
      (valueOf(own, "response", index) ?? "").slice(0, CLIPPED),
    ),
  );
}

function goTo(at) {
  const { stage } = place();
  go("samples", stage, withOptions({ at: String(at) }));
}

function move(event, count, chosen) {
  const page = {
    ArrowDown: 1,
    j: 1,
    n: 1,
    ArrowUp: -1,
    k: -1,
    p: -1,
    PageDown: 10,
    PageUp: -10,
    Home: -count,
    End: count,
  }[event.key];
  if (page === undefined || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  event.stopPropagation();
  goTo(Math.max(0, Math.min(count - 1, chosen + page)));
}

/** Return the mean reward of the samples by step; a click asks for a step. */
function trend(own, found, stage) {
  const sums = new Map();
  for (const index of found) {
    const reward = own.columns.reward[index];
    if (reward === null || valueOf(own, "model", index)) continue;
    const [sum, count] = sums.get(own.columns.step[index]) || [0, 0];
    sums.set(own.columns.step[index], [sum + reward, count + 1]);
  }
  if (sums.size < 2) return null;
  const x = [...sums.keys()].sort((one, other) => one - other);
  const y = x.map((step) => sums.get(step)[0] / sums.get(step)[1]);
  const element = figure([{ label: "mean reward", x, y }], {
    caption: [h("b", {}, "mean reward"), " of these samples; click for a step"],
    height: 120,
    onclick: (step) => go("samples", stage, withOptions({ at: "", step: String(step) })),
  });
  element.id = "trend";
  return element;
}
