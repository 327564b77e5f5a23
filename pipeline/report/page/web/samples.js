// The sample browser: the trend, a step, a group, a sample, its tokens.
"use strict";

const SHOWN = 300; // of the samples found, in the list
const CLIPPED = 200; // characters of a response in the list
// Of the chat templates of the supported families, and Llama's.
const USER_TURNS = [
  /<\|im_start\|>user\n([^]*?)<\|im_end\|>/g, // Qwen
  /\[INST\]([^]*?)\[\/INST\]/g, // Mixtral
  /<\|user\|>\n?([^]*?)(?=<\|(?:assistant|user|system|observation)\|>|$)/g, // GLM
  /<｜User｜>([^]*?)(?=<｜Assistant｜>|$)/g, // DeepSeek
  /<\|start\|>user(?:<\|channel\|>\w+)?<\|message\|>([^]*?)<\|end\|>/g, // gpt-oss
  /<\|start_header_id\|>user<\|end_header_id\|>([^]*?)<\|eot_id\|>/g,
];
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
  const samples = data.samples[name];
  const matches = select(samples, options);
  const current = Math.min(Number(options.get("at")) || 0, Math.max(matches.length - 1, 0));
  const from = Math.max(0, Math.min(current - SHOWN / 2, matches.length - SHOWN));
  const list = h(
    "div",
    {
      class: "list",
      role: "listbox",
      tabindex: 0,
      "aria-label": "Samples",
      "aria-activedescendant": matches.length ? `sample-${current}` : null,
      id: "samples",
    },
    matches
      .slice(from, from + SHOWN)
      .map((index, at) => sampleOption(samples, index, from + at, from + at === current)),
  );
  list.addEventListener("keydown", (event) => move(event, matches.length, current));
  queueMicrotask(() => {
    const current = list.querySelector("[aria-selected=true]");
    if (current) current.scrollIntoView({ block: "nearest" });
  });
  const shown = matches.length
    ? sampleView(data, name, matches[current], options)
    : h("p", {}, "No sample is like that.");
  return [
    stageChoice("samples", stages, name),
    sampleFilters(samples, name, options),
    h("p", { id: "count" }, countText(samples, matches)),
    trend(samples, matches, name),
    h(
      "div",
      { class: "browser" },
      list,
      h("section", { id: "sample", "aria-label": "Sample" }, shown),
    ),
  ];
}

function countText(samples, matches) {
  const recorded = samples.left_out
    ? `; the stage recorded ${samples.of}, and those of ${samples.prompts - samples.left_out} of ${samples.prompts} prompts are here`
    : "";
  const listed = matches.length > SHOWN ? `; ${SHOWN} are listed` : "";
  return `${matches.length} of ${samples.columns.step.length} samples${recorded}${listed}`;
}

function valueOf(samples, name, index) {
  const value = samples.columns[name] ? samples.columns[name][index] : null;
  return samples.names[name] && value !== null ? samples.names[name][value] : value;
}

/** Return the numbers of the samples that the options ask for, in their order. */
function select(samples, options) {
  const { columns } = samples;
  let matches = columns.step.map((_, index) => index);
  const keep = (applies, test) => {
    if (applies) matches = matches.filter(test);
  };
  for (const name of FILTERS) {
    const number = samples.names[name] ? samples.names[name].indexOf(options.get(name)) : -1;
    keep(options.get(name), (index) => columns[name][index] === number);
  }
  const steps = (options.get("step") || "").split(/[ ,]+/).filter(Boolean).map(Number);
  keep(steps.length, (index) => steps.includes(columns.step[index]));
  const problem = options.get("problem");
  // A redacted report has numbers for keys, of which "1" is no beginning of "10".
  const whole = samples.names.problem.includes(problem);
  keep(problem, (index) => {
    const key = valueOf(samples, "problem", index) || "";
    return whole ? key === problem : key.startsWith(problem);
  });
  const solved = Number(options.get("solved") === "yes");
  keep(options.get("solved"), (index) => columns.solved[index] === solved);
  const scored = (options.get("reward") || "").split("=");
  const scores = scored.length > 1 ? samples.parts[scored[0].trim()] || [] : columns.reward;
  keep(options.get("reward"), (index) => scores[index] === Number(scored.at(-1)));
  if (options.get("search")) {
    let pattern;
    try {
      pattern = new RegExp(options.get("search"));
    } catch {
      return [];
    }
    keep(true, (index) =>
      ["prompt", "response"].some((name) => pattern.test(valueOf(samples, name, index) || "")),
    );
  }
  return ordered(samples, matches, options.get("order"));
}

function ordered(samples, matches, order) {
  const { reward, step, tokens } = samples.columns;
  if (order === "worst") {
    const graded = matches.filter((index) => reward[index] !== null);
    return graded.sort((one, other) => reward[one] - reward[other] || step[other] - step[one]);
  }
  if (order === "longest")
    return matches.sort((one, other) => tokens[other] - tokens[one] || step[other] - step[one]);
  return order === "flipped" ? flipped(samples, matches) : matches;
}

/** Return a sample of the first and of the last step of each prompt that became right or wrong. */
function flipped(samples, matches) {
  const { step, solved, problem, domain } = samples.columns;
  const prompts = new Map();
  for (const index of matches) {
    if (problem[index] === null || solved[index] === null) continue;
    const key = `${domain[index]} ${problem[index]}`;
    if (!prompts.has(key)) prompts.set(key, new Map());
    const steps = prompts.get(key);
    steps.set(step[index], [...(steps.get(step[index]) || []), index]);
  }
  return [...prompts.values()].flatMap((steps) => {
    const ends = [Math.min(...steps.keys()), Math.max(...steps.keys())].map((endStep) =>
      steps.get(endStep),
    );
    const right = ends.map((answers) => Number(mean(answers.map((index) => solved[index])) >= 0.5));
    return right[0] === right[1]
      ? []
      : ends.map((answers, at) => answers.find((index) => solved[index] === right[at]));
  });
}

function sampleFilters(samples, stage, options) {
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
  const distinct = (name) => samples.names[name] || [];
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
    samples.names.response
      ? input("search", "search (regular expression)", { id: "search", size: 22 })
      : null,
    choice("order", "order", ORDERS, options.get("order") || "first", change, null),
  );
  return form;
}

function sampleOption(samples, index, at, selected) {
  const reward = samples.columns.reward[index];
  const count = samples.columns.tokens[index];
  const about = [
    valueOf(samples, "model", index) || `step ${samples.columns.step[index]}`,
    valueOf(samples, "domain", index),
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
    samples.names.prompt ? sampleTexts(samples, index) : null,
  );
}

/** Return the last user turn, the response, and what was expected where it was not that. */
function sampleTexts(samples, index) {
  const text = (name) => valueOf(samples, name, index) ?? "";
  const answer = samples.names.answer && !samples.columns.solved[index] ? text("answer") : "";
  return [
    h("div", { class: "clip code quiet" }, lastUserTurn(text("prompt")).slice(0, CLIPPED)),
    h("div", { class: "clip code" }, text("response").slice(0, CLIPPED)),
    answer ? h("div", { class: "clip code quiet" }, `expected ${answer.slice(0, CLIPPED)}`) : null,
  ];
}

/** Return the last message of the user in a prompt of a known chat template; else the prompt. */
function lastUserTurn(prompt) {
  const turns = USER_TURNS.flatMap((pattern) => [...prompt.matchAll(pattern)]);
  return (turns.length ? turns.at(-1)[1] : prompt).trim();
}

function goTo(at) {
  const { stage } = place();
  go("samples", stage, withOptions({ at: String(at) }));
}

function move(event, count, current) {
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
  goTo(Math.max(0, Math.min(count - 1, current + page)));
}

/** Return the mean reward of the samples by step; a click asks for a step. */
function trend(samples, matches, stage) {
  const sums = new Map();
  for (const index of matches) {
    const reward = samples.columns.reward[index];
    if (reward === null || valueOf(samples, "model", index)) continue;
    const [sum, count] = sums.get(samples.columns.step[index]) || [0, 0];
    sums.set(samples.columns.step[index], [sum + reward, count + 1]);
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
