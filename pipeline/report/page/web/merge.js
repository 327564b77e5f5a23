// The merge: how far the student is from its teachers, by domain, by position and token by token.
"use strict";

const PARTS = 10; // of a response, over which positions are counted
const EXAMPLES = 12;
const BEFORE = 8; // tokens that are shown before an example's

function mergePage(data, { stage }) {
  const stages = Object.keys(data.samples).filter((name) =>
    Object.values(data.samples[name].tokens).some((tokens) => tokens.teacher_kl),
  );
  const curves = Object.keys(data.curves).filter((name) => teacherCurves(data.curves[name]).length);
  const withLosses = [...new Set([...stages, ...curves])];
  if (!withLosses.length)
    return [h("p", {}, "No merge of this run has logged its teachers' divergence.")];
  const name = withLosses.includes(stage) ? stage : withLosses[0];
  const measured = stages.includes(name) ? divergences(data.samples[name]) : {};
  const trends = data.curves[name] ? teacherCurves(data.curves[name]) : [];
  return [
    stageChoice("merge", withLosses, name),
    ...(trends.length
      ? [
          h("h2", {}, "Divergence from the teachers"),
          figure(trends, {
            caption: h("b", {}, "teacher_kl, a token's mean in nats"),
            height: 240,
            legend: true,
          }),
        ]
      : []),
    ...(Object.keys(measured).length
      ? divergenceTables(data, name, measured)
      : [h("p", { class: "quiet" }, "No tokens' losses are recorded (logging.tokens).")]),
  ];
}

/** Return teacher_kl and its parts by domain, where they are more than one. */
function teacherCurves(curves) {
  const names = Object.keys(curves.metrics).filter(
    (name) => name === "teacher_kl" || name.startsWith("teacher_kl/"),
  );
  return names.map((name) => ({
    label: name.replace("teacher_kl/", ""),
    x: curves.step,
    y: curves.metrics[name],
  }));
}

/** Return by domain the recorded tokens' losses: their sums by tenth of the response, and each one. */
function divergences(samples) {
  const byDomain = Object.create(null);
  for (const [index, recorded] of Object.entries(samples.tokens)) {
    if (!recorded.teacher_kl) continue;
    const domain = valueOf(samples, "domain", Number(index));
    const losses = (byDomain[domain] ||= {
      sums: new Array(PARTS).fill(0),
      counts: new Array(PARTS).fill(0),
      worst: [],
    });
    const length = recorded.teacher_kl.length;
    const learned = recorded.learned ? new Set(recorded.learned) : null;
    recorded.teacher_kl.forEach((loss, at) => {
      if (learned && !learned.has(at)) return;
      const tenth = Math.min(PARTS - 1, Math.floor((PARTS * at) / length));
      losses.sums[tenth] += loss;
      losses.counts[tenth] += 1;
      keepWorst(losses.worst, [loss, Number(index), at]);
    });
  }
  return byDomain;
}

/** Keep the EXAMPLES tokens with the largest loss. */
function keepWorst(worst, token) {
  if (worst.length === EXAMPLES && token[0] <= worst.at(-1)[0]) return;
  worst.push(token);
  worst.sort(([one], [other]) => other - one);
  worst.length = Math.min(worst.length, EXAMPLES);
}

function divergenceTables(data, stage, measured) {
  const total = (losses, name) => losses[name].reduce((sum, value) => sum + value, 0);
  const whole = Object.values(measured).reduce((sum, losses) => sum + total(losses, "sums"), 0);
  const rows = Object.entries(measured)
    .map(([domain, losses]) => [
      domain,
      total(losses, "counts"),
      total(losses, "sums") / total(losses, "counts"),
      `${percent(total(losses, "sums") / whole)} %`,
    ])
    .sort((one, other) => other[2] - one[2]);
  const series = Object.entries(measured).map(([label, losses]) => ({
    label,
    x: losses.sums.map((_, tenth) => Math.round((100 * (tenth + 0.5)) / PARTS)),
    y: losses.sums.map((sum, tenth) => (losses.counts[tenth] ? sum / losses.counts[tenth] : null)),
  }));
  const worst = Object.values(measured)
    .flatMap((losses) => losses.worst)
    .sort(([one], [other]) => other - one)
    .slice(0, EXAMPLES);
  return [
    h("h2", {}, "By domain"),
    h(
      "p",
      { class: "quiet" },
      `of ${Object.keys(data.samples[stage].tokens).length} of the ${data.samples[stage].with_tokens} samples whose tokens are recorded (logging.tokens), spread over the steps`,
    ),
    table(["domain", "tokens", "mean loss", "share of the loss"], rows, "Loss by domain"),
    h("h2", {}, "By position"),
    figure(series, {
      caption: h("b", {}, "mean loss of a token, by its place in the response in %"),
      unit: "place",
      height: 240,
      legend: true,
    }),
    h("h2", {}, "Tokens with the largest loss"),
    table(
      ["loss", "domain", "step", "token, after those before it"],
      worst.map((token) => example(data, stage, token)),
      "Examples",
    ),
  ];
}

function example(data, stage, [loss, index, at]) {
  const samples = data.samples[stage];
  const texts = samples.tokens[index].ids.map((id) => data.vocabulary[id] ?? `[${id}]`);
  const problem = (valueOf(samples, "problem", index) || "").slice(0, KEY_DIGITS);
  const step = samples.columns.step[index];
  return [
    loss,
    valueOf(samples, "domain", index),
    h("a", { href: link("samples", stage, { problem, step: String(step) }) }, String(step)),
    h(
      "span",
      { class: "code" },
      texts.slice(Math.max(0, at - BEFORE), at).join(""),
      h("mark", {}, texts[at]),
    ),
  ];
}
