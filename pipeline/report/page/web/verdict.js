// The first page: is the run healthy, where does it stand, what did its models learn?
"use strict";

const NOW = [
  "reward",
  "loss",
  "teacher_kl",
  "kl",
  "entropy",
  "unfinished",
  "zero_variance",
  "mismatch_max",
];

const CURVES = ["teacher_kl", "reward", "reward_margin", "kept", "loss"]; // the first is drawn
const SPARK = { width: 120, height: 24 };

function verdictPage(data) {
  return [
    h("h2", {}, "Health"),
    healthList(data.health),
    ...data.damaged.map((text) => h("p", { class: "advice" }, `not in this report: ${text}`)),
    ...outcome(data),
    h("h2", {}, "Stages"),
    stageTable(data),
    ...gates(data),
    ...verdicts(data),
    ...latest(data),
    ...models(data),
  ];
}

function healthList(health) {
  if (!health.length)
    return h("p", { class: "fine", id: "health" }, "✓ nothing is out of its range");
  const item = (symptom) =>
    h(
      "li",
      { class: symptom.alarm ? "alarm" : "advice" },
      `${symptom.alarm ? "!" : "·"} ${symptom.stage}: `,
      symptom.word ? `${symptom.word}: ` : "",
      `${symptom.what}. `,
      h("span", { class: "quiet" }, symptom.remedy ? `${symptom.remedy}: ` : ""),
      symptom.command ? h("code", {}, symptom.command) : null,
    );
  return h("ul", { class: "health", id: "health" }, health.map(item));
}

/** Return a line of every stage that no symptom judges: what it learned, and the evidence. */
function verdicts(data) {
  const judged = new Set(data.health.filter(({ word }) => word).map(({ stage }) => stage));
  const rest = (data.verdicts || []).filter(({ stage }) => !judged.has(stage));
  const item = (verdict) =>
    h(
      "li",
      { class: isGood(verdict) ? "fine" : verdict.alarm ? "alarm" : "advice" },
      `${isGood(verdict) ? "✓" : verdict.alarm ? "!" : "·"} ${verdict.stage} ${verdict.word}: `,
      h("span", { class: "quiet" }, verdict.evidence),
    );
  return rest.length
    ? [h("h2", {}, "Evidence"), h("ul", { class: "health", id: "verdicts" }, rest.map(item))]
    : [];
}

function isGood(verdict) {
  return ["learns", "is solved"].includes(verdict.word);
}

function stageTable(data) {
  const words = plain(Object.fromEntries((data.verdicts || []).map((said) => [said.stage, said])));
  const causes = data.stages.some((stage) => stage.cause && stage.cause !== "finished");
  const rows = data.stages.map((stage) => [
    h(
      "span",
      { class: "code tree" },
      stage.branch.slice(0, stage.branch.length - stage.name.length),
      data.curves[stage.name]
        ? h("a", { href: link("curves", stage.name) }, stage.name)
        : stage.name,
    ),
    h("span", { class: `whole ${stage.state}` }, `${STATE_SIGNS[stage.state] || ""} ${stage.state}`),
    sparkline(data.curves[stage.name]),
    verdictWord(words[stage.name]),
    progress(stage),
    h("span", { class: "whole" }, duration(stage.minutes)),
    ...(causes ? [stage.cause === "finished" ? "" : stage.cause || ""] : []),
  ]);
  const headings = ["stage", "state", "curve", "verdict", "steps", "time"];
  return table([...headings, ...(causes ? ["cause"] : [])], rows, "Stages");
}

function verdictWord(verdict) {
  if (!verdict) return "";
  const mark = isGood(verdict) ? "fine" : verdict.alarm ? "alarm" : "advice";
  return h("span", { class: `whole ${mark}` }, verdict.word);
}

/** Return the metric that says how a stage does, drawn small, and its means at both ends. */
function sparkline(curves) {
  const metric = curves && !curves.domain && CURVES.find((name) => curves.metrics[name]);
  const values = metric ? curves.metrics[metric].filter((value) => value !== null) : [];
  if (values.length < 2) return "";
  const line = movingMean(values, windowOf(values.length));
  const [least, most] = [Math.min(...line), Math.max(...line)];
  const spread = most - least || 1;
  const points = line.map(
    (value, at) =>
      `${((SPARK.width * at) / (line.length - 1)).toFixed(1)},${(SPARK.height - 2 - ((SPARK.height - 4) * (value - least)) / spread).toFixed(1)}`,
  );
  const ends = Math.max(1, Math.min(10, Math.floor(values.length / 4)));
  const [first, last] = [values.slice(0, ends), values.slice(-ends)].map((part) => short3(mean(part)));
  const text = `${metric} ${first} → ${last}`;
  return h("span", { class: "spark" }, drawing(points.join(" "), text), text);
}

function drawing(points, label) {
  const element = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const size = { width: SPARK.width, height: SPARK.height };
  const picture = element("svg", { ...size, role: "img", "aria-label": label });
  picture.append(element("polyline", { points }));
  return picture;
}

function short3(value) {
  return short(Number(value.toPrecision(3)));
}

const STATE_SIGNS = plain({
  done: "✓",
  failed: "✗",
  running: "▶",
  stale: "↻",
  stopped: "■",
  pending: "·",
});

function progress(stage) {
  if (stage.steps === null) return "";
  const done = stage.step ?? 0;
  if (done === stage.steps) return String(done);
  const bar = h("progress", {
    max: stage.steps,
    value: done,
    "aria-label": `steps of ${stage.name}`,
  });
  return [bar, ` ${done} of ${stage.steps}`];
}

function gates(data) {
  const judged = data.stages.filter(
    (stage) => stage.kind === "gate" && (stage.outcome || stage.reasons.length),
  );
  if (!judged.length) return [];
  const rows = judged.map((gate) => [
    gate.name,
    h("span", { class: gate.outcome === "passed" ? "fine" : "stopped" }, gate.outcome || "damaged"),
    gate.reasons.join("; "),
  ]);
  return [h("h2", {}, "Gates"), table(["gate", "outcome", "reasons"], rows, "Gates")];
}

/** Return the present values of each stage's metrics, means of the last ten steps. */
function latest(data) {
  const stages = Object.entries(data.curves).filter(([, curves]) => !curves.domain);
  const names = NOW.filter((name) => stages.some(([, curves]) => curves.metrics[name]));
  if (!names.length) return [];
  const value = (curves, name) =>
    mean((curves.metrics[name] || []).filter((number) => number !== null).slice(-10)) ?? "";
  const heading = (name) => h("a", { href: link("curves", ALL, { metric: name }) }, name);
  return [
    h("h2", {}, "Metrics"),
    h("p", { class: "quiet" }, "means of the last ten steps"),
    table(
      ["stage", ...names.map(heading)],
      stages.map(([stage, curves]) => [stage, ...names.map((name) => value(curves, name))]),
      "Metrics",
    ),
  ];
}

/** Return the accuracies of the run's models, or why there are none. */
function outcome(data) {
  const comparison = data.comparison;
  const heading = h("h2", {}, "Outcome");
  if (!comparison) return [heading, h("p", { class: "quiet" }, data.not_compared)];
  const domains = Object.keys(comparison.problems);
  const rows = Object.entries(comparison.models).map(([name, model]) => [
    name,
    ...domains.map((domain) => accuracyCell(model, domain)),
  ]);
  return [
    heading,
    h(
      "p",
      { class: "quiet" },
      `accuracy in %, and its change against ${comparison.start} in points; ▲ ▼ the whole 95 % interval is above or below 0; ◆ an expert's own domain`,
    ),
    table(["model", ...domains], rows, "Accuracy"),
  ];
}

function models(data) {
  const comparison = data.comparison;
  if (!comparison) return [];
  const domains = Object.keys(comparison.problems);
  const scored = Object.entries(comparison.models);
  const headroom = scored
    .filter(([, model]) => model.mean_headroom)
    .map(([name, model]) => [
      name,
      ...domains.map((domain) =>
        interval(model.scores[domain] && model.scores[domain].headroom, "recovered"),
      ),
      interval(model.mean_headroom, "recovered"),
    ]);
  const forgotten = scored
    .filter(([, model]) => Object.keys(model.forgetting).length)
    .map(([name, model]) => [
      name,
      ...domains.map((domain) => interval(model.forgetting[domain], "difference")),
    ]);
  return [
    ...section(
      "Headroom",
      `recovered, in %: 0 is ${comparison.start}, 100 the domain's expert; 95 % intervals`,
      ["model", ...domains, "mean"],
      headroom,
    ),
    ...section(
      "Forgetting",
      `change on domains not trained on, in points against ${comparison.start}; 95 % intervals`,
      ["model", ...domains],
      forgotten,
    ),
    ...section(
      "Cost",
      "time of all attempts, most memory of a rank",
      ["stage", "sampled tokens", "trained tokens", "time", "memory"],
      comparison.stages.map((cost) => [
        ...[
          cost.stage,
          cost.sampled_tokens ?? "",
          cost.trained_tokens ?? "",
          duration(cost.minutes),
        ],
        bytes(cost.peak_gpu_bytes || cost.peak_bytes),
      ]),
    ),
    ...comparison.notes.map((note) => h("p", { class: "quiet" }, note)),
  ];
}

function section(title, below, headings, rows) {
  return rows.length
    ? [h("h2", {}, title), h("p", { class: "quiet" }, below), table(headings, rows, title)]
    : [];
}

function accuracyCell(model, domain) {
  const score = model.scores[domain];
  if (!score) return "";
  const mark = model.expert_of.includes(domain) ? "◆ " : "";
  const { accuracy, low, high } = score.accuracy;
  const text = `${mark}${percent(accuracy)} [${percent(low)}, ${percent(high)}]`;
  if (!score.change) return text;
  const { difference, low: least, high: most } = score.change;
  const sign = least > 0 ? " ▲" : most < 0 ? " ▼" : "";
  return [
    text,
    h("span", { class: "quiet" }, ` ${difference > 0 ? "+" : ""}${percent(difference)}${sign}`),
  ];
}

/** Return a value with its interval; nothing where there is none. */
function interval(bounds, name) {
  return bounds ? `${percent(bounds[name])} [${percent(bounds.low)}, ${percent(bounds.high)}]` : "";
}
