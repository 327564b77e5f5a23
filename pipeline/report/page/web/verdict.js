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

function verdictPage(data) {
  return [
    h("h2", {}, "Health"),
    healthList(data.health),
    ...verdicts(data),
    ...data.damaged.map((text) => h("p", { class: "advice" }, `not in this report: ${text}`)),
    h("h2", {}, "Stages"),
    stageTable(data),
    ...gates(data),
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
  return rest.length ? [h("ul", { class: "health", id: "verdicts" }, rest.map(item))] : [];
}

function isGood(verdict) {
  return ["learns", "is solved"].includes(verdict.word);
}

function stageTable(data) {
  const rows = data.stages.map((stage) => [
    h(
      "span",
      { class: "code tree" },
      stage.branch.slice(0, stage.branch.length - stage.name.length),
      data.curves[stage.name]
        ? h("a", { href: link("curves", stage.name) }, stage.name)
        : stage.name,
    ),
    stage.kind,
    h("span", { class: stage.state }, `${STATE_SIGNS[stage.state] || ""} ${stage.state}`),
    progress(stage),
    duration(stage.minutes),
    stage.cause || "",
  ]);
  return table(["stage", "kind", "state", "steps", "time", "cause"], rows, "Stages");
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

function models(data) {
  const comparison = data.comparison;
  if (!comparison) return [h("h2", {}, "Models"), h("p", { class: "quiet" }, data.not_compared)];
  const domains = Object.keys(comparison.problems);
  const scored = Object.entries(comparison.models);
  const accuracy = scored.map(([name, model]) => [
    name,
    ...domains.map((domain) => accuracyCell(model, domain)),
  ]);
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
    h("h2", {}, "Models"),
    h(
      "p",
      { class: "quiet" },
      `accuracy in %, and its change against ${comparison.start} in points; ▲ ▼ the whole 95 % interval is above or below 0; ◆ an expert's own domain`,
    ),
    table(["model", ...domains], accuracy, "Accuracy"),
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
