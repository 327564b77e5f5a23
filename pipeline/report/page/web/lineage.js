// Where the run came from and what happened to it; and how it differs from other runs.
"use strict";

function lineagePage(data) {
  const events = data.stages.flatMap((stage) =>
    data.history[stage.name].map((event) => [
      stage.name,
      clockTime(event.time),
      event.attempt,
      event.state,
      event.step,
      event.cause,
    ]),
  );
  events.sort((one, other) => (one[1] < other[1] ? -1 : 1));
  const parents = data.stages.map((stage) => [
    stage.name,
    stage.from,
    data.edges
      .filter((edge) => edge.target === stage.name)
      .map((edge) => `${edge.source} (${edge.role})`)
      .join(", "),
  ]);
  return [
    h("h2", {}, "History"),
    table(["stage", "time (UTC)", "attempt", "state", "after step", "cause"], events, "History"),
    h("h2", {}, "Stages and what they read"),
    table(["stage", "from", "after"], parents, "Lineage"),
    h("h2", {}, "Commands"),
    h("pre", {}, data.commands.join("\n")),
    h("h2", {}, "Settings"),
    h("p", { class: "quiet" }, "those that differ from their defaults"),
    h("pre", { id: "settings" }, data.settings),
  ];
}

/** Return a moment to the second, in UTC. */
function clockTime(time) {
  return new Date(time).toISOString().slice(0, 19).replace("T", " ");
}

function runsPage(data, { stage }) {
  const names = Object.keys(data.others);
  if (!names.length)
    return [
      h("p", {}, "This report is of one run. Write one of several with "),
      h("pre", {}, `braid report ${data.run.name} OTHER_RUN`),
    ];
  const name = names.includes(stage) ? stage : names[0];
  const { differences, comparison } = data.others[name];
  const rows = (block) =>
    Object.entries(block).map(([key, [here, there]]) => [key, valueText(here), valueText(there)]);
  const change = (event) => go("runs", event.target.value);
  const stages = Object.entries(differences.stages).flatMap(([stageName, block]) =>
    rows(block).map((row) => [stageName, ...row]),
  );
  return [
    h("form", { class: "filters" }, choice("run", "run", names, name, change, null)),
    h("h2", {}, "Settings that differ"),
    rows(differences.settings).length
      ? table(["key", data.run.name, name], rows(differences.settings), "Settings")
      : h("p", {}, "none"),
    h("h2", {}, "Stages that differ"),
    stages.length
      ? table(["stage", "what", data.run.name, name], stages, "Stages")
      : h("p", {}, "none"),
    ...resultsBeside(data, name, comparison),
    h(
      "p",
      { class: "quiet" },
      "The curves of both are on the page Curves, where both have the stage.",
    ),
  ];
}

function resultsBeside(data, name, other) {
  if (!data.comparison || !other) return [];
  const domains = Object.keys(data.comparison.problems).filter(
    (domain) => domain in other.problems,
  );
  const shared = Object.keys(data.comparison.models).filter((model) => other.models[model]);
  const cell = (models, model, domain) => {
    const score = models[model].scores[domain];
    return score
      ? `${percent(score.accuracy.accuracy)} [${percent(score.accuracy.low)}, ${percent(score.accuracy.high)}]`
      : "";
  };
  const rows = shared.flatMap((model) => [
    [model, data.run.name, ...domains.map((domain) => cell(data.comparison.models, model, domain))],
    ["", name, ...domains.map((domain) => cell(other.models, model, domain))],
  ]);
  return [h("h2", {}, "Accuracy in %"), table(["model", "run", ...domains], rows, "Accuracy")];
}

function valueText(value) {
  return value === null || value === undefined
    ? ""
    : typeof value === "string"
      ? value
      : JSON.stringify(value);
}
