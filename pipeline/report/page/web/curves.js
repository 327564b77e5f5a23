// The metrics of a stage, a chart each; or one metric of all stages.
"use strict";

const ALL = "all stages";
const MOST_CHARTS = 200; // of a page: a browser draws 10,000 for minutes
const MOST_SERIES = 100; // of one chart
const PANELS = ["learning", "policy", "signal", "responses", "domains"]; // engines and time follow
const OTHER = "other";
const FIRST = [
  ...[
    "reward",
    "teacher_kl",
    "loss",
    "entropy",
    "kl",
    "gradient_norm",
    "unfinished",
    "zero_variance",
  ],
  ...["mismatch_max", "response_tokens", "router_agreement", "learning_rate"],
];

function curvesPage(data, { stage, options }) {
  // An evaluation's lines are of models and domains, which the first page compares.
  const stages = Object.keys(data.curves).filter((name) => !data.curves[name].domain);
  if (!stages.length) return [h("p", {}, "No stage has logged a step yet.")];
  if (stage === ALL) return metricOfStages(data, stages, options.get("metric"));
  const name = stages.includes(stage) ? stage : stages[0];
  const substring = options.get("metric") || "";
  const matches = metricNames(data.curves[name]).filter((metric) => metric.includes(substring));
  const names = matches.slice(0, MOST_CHARTS);
  const search = h(
    "label",
    {},
    "metric contains",
    h("input", { id: "search", name: "metric", value: substring, size: 18 }),
  );
  const smooth = options.get("smooth") !== "no";
  const smoothing = h(
    "label",
    {},
    "smoothed",
    h("input", {
      id: "smooth",
      type: "checkbox",
      checked: smooth,
      onchange: (event) => goWith({ smooth: event.target.checked ? "" : "no" }),
    }),
  );
  const again = (event) => {
    event.preventDefault();
    goWith({ metric: document.getElementById("search").value });
  };
  return [
    stageChoice(
      "curves",
      [ALL, ...stages],
      name,
      h("form", { onsubmit: again }, search),
      smoothing,
    ),
    matches.length > names.length
      ? h("p", { class: "quiet", id: "drawn" }, `${names.length} of ${matches.length} metrics`)
      : null,
    ...interruptionLines(interruptions(data, name)),
    marksLine(data, name),
    h("div", { id: "charts" }, panels(data, name, names, smooth)),
  ];
}

/** Return a heading and the charts of each panel, in the order of the first of their metrics. */
function panels(data, stage, names, smooth) {
  const byPanel = plain({});
  for (const panel of PANELS) byPanel[panel] = [];
  for (const name of names) {
    const meaning = definition(data.definitions, name);
    (byPanel[(meaning && meaning.panel) || OTHER] ??= []).push(name);
  }
  return Object.entries(byPanel)
    .filter(([, metrics]) => metrics.length)
    .map(([panel, metrics]) => [
      h("h2", { "data-panel": panel }, panel),
      h(
        "div",
        { class: "charts" },
        metrics.map((metric) => metricChart(data, stage, metric, smooth)),
      ),
    ]);
}

/**
 * Return the metrics that have a value, the ones to look at first at the beginning.
 *
 * The loss of a policy gradient is about 0 by construction: last.
 */
function metricNames(curves) {
  const rank = (name) =>
    name === "loss" && curves.metrics.reward && !curves.metrics.teacher_kl
      ? FIRST.length + 1
      : FIRST.includes(name)
        ? FIRST.indexOf(name)
        : FIRST.length;
  return Object.keys(curves.metrics)
    .filter((name) => curves.metrics[name].some((value) => value !== null))
    .sort((one, other) => rank(one) - rank(other) || one.localeCompare(other));
}

/** Return when a stage was started, continued or stopped, but not that it was done. */
function interruptions(data, stage) {
  return data.history[stage].filter((event) => event.state !== "done");
}

/** Return what the lines in a stage's charts mean; nothing where there are none. */
function marksLine(data, stage) {
  const guarded = data.guards[stage].length;
  const fired = data.guards[stage].some((guard) => guard.fired.length);
  const interrupted = interruptions(data, stage).some((event) => event.step > 0);
  const meanings = [
    guarded ? "dashed and shaded: a guard's threshold, and what is beyond it" : null,
    fired ? "upright: the guard fired" : null,
    interrupted ? "dotted: the stage was interrupted" : null,
  ].filter(Boolean);
  return meanings.length ? h("p", { class: "quiet", id: "marks" }, meanings.join("; ")) : null;
}

function interruptionLines(events) {
  return events
    .filter((event) => event.attempt > 1 || event.state !== "running")
    .map((event) =>
      h(
        "p",
        { class: "quiet" },
        `after step ${event.step}: attempt ${event.attempt} ${event.state}`,
        event.cause ? `: ${event.cause}` : "",
      ),
    );
}

function metricChart(data, stage, metric, smooth = true) {
  const meaning = definition(data.definitions, metric);
  const guards = data.guards[stage].filter((guard) => guard.metric === metric);
  const otherRuns = Object.entries(data.others).map(([run, other]) => [run, other.curves[stage]]);
  const series = [[data.run.name, data.curves[stage]], ...otherRuns]
    .filter(([, curves]) => curves && curves.metrics[metric])
    .map(([label, curves]) => ({ label, x: curves.step, y: curves.metrics[metric] }));
  const element = figure(series, {
    caption: [
      h("b", {}, metric),
      meaning ? [" ", withCode(meaning.meaning), ". "] : " ",
      meaning && meaning.healthy ? h("i", {}, withCode(meaning.healthy), ". ") : null,
      guards.map(guardText),
    ],
    sync: stage,
    smooth,
    guards,
    interruptions: interruptions(data, stage).filter((event) => event.step > 0),
  });
  element.dataset.metric = metric;
  return element;
}

function guardText(guard) {
  const bound = `guard ${guard.name}: ${guard.action} ${guard.side} ${short(guard.threshold)}`;
  const fired = guard.fired.length
    ? `, fired at step ${guard.fired.join(", ")}: ${guard.remedy}`
    : "";
  return h("span", { class: guard.fired.length ? "alarm" : "" }, bound + fired + ". ");
}

/** Return one metric of every stage that has it, also by domain. */
function metricOfStages(data, stages, preferred) {
  const names = [...new Set(stages.flatMap((stage) => metricNames(data.curves[stage])))].filter(
    (name) => !name.includes("/"),
  );
  names.sort(
    (one, other) => FIRST.includes(other) - FIRST.includes(one) || one.localeCompare(other),
  );
  const metric = names.includes(preferred) ? preferred : names[0];
  const every = stages.flatMap((stage) =>
    Object.entries(data.curves[stage].metrics)
      .filter(([name]) => name === metric || name.startsWith(`${metric}/`))
      .map(([name, y]) => ({
        label: name === metric ? stage : `${stage} ${name.slice(metric.length)}`,
        x: data.curves[stage].step,
        y,
      })),
  );
  const series = every.slice(0, MOST_SERIES);
  const change = (event) => go("curves", ALL, { metric: event.target.value });
  const last = series.map(({ label, y }) => [
    label,
    mean(y.filter((value) => value !== null).slice(-10)),
  ]);
  const chart = figure(series, {
    caption: h("b", {}, metric),
    height: 360,
    legend: true,
    smooth: true,
  });
  chart.dataset.metric = metric;
  return [
    stageChoice("curves", [ALL, ...stages], ALL),
    h("form", { class: "filters" }, choice("metric", "metric", names, metric, change, null)),
    h("div", { id: "charts" }, chart),
    table(["stage", `mean of the last ten steps`], last, metric),
  ];
}

/** Return a metric's definition; one with a number or a name in it is declared once. */
function definition(definitions, name) {
  return (
    definitions[name] ||
    definitions[name.replace(/_\d+$/, "_N")] ||
    definitions[name.replace(/\/.*$/, "/NAME")]
  );
}
