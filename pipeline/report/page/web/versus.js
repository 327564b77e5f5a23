// Two models on the same problems: both right, only one, neither, with McNemar's exact test.
"use strict";

const KINDS = ["both", "only the first", "only the second", "neither"];

function versusPage(data, { stage, options }) {
  const answers = answersByModel(data);
  const names = Object.keys(answers);
  if (names.length < 2) return [h("p", {}, "No two models' answers are recorded in this report.")];
  const first = answers[stage] ? stage : names[0];
  const second =
    answers[options.get("other")] && options.get("other") !== first
      ? options.get("other")
      : names.find((name) => name !== first);
  const outcomes = outcomesOf(answers[first], answers[second]);
  const change = () => {
    const [one, other] = ["first", "second"].map(
      (name) => document.getElementById(`choose-${name}`).value,
    );
    go("versus", one, { other });
  };
  const counts = Object.entries(outcomes).map(([domain, kinds]) => [
    domain,
    ...KINDS.map((kind) =>
      h(
        "a",
        {
          href: link("versus", first, { other: second, domain, kind }),
          "aria-label": `${kind}, ${domain}: ${kinds[kind].length}`,
        },
        String(kinds[kind].length),
      ),
    ),
    mcnemar(kinds[KINDS[1]].length, kinds[KINDS[2]].length),
  ]);
  const incomplete = Object.values(data.samples).some(
    (samples) => samples.left_out && samples.names.model && samples.names.model.length,
  );
  return [
    h(
      "form",
      { class: "filters" },
      choice("first", "first", names, first, change, null),
      choice(
        "second",
        "second",
        names.filter((name) => name !== first),
        second,
        change,
        null,
      ),
    ),
    h(
      "p",
      { class: "quiet" },
      "problems that both were asked, by who solves them; p is of McNemar's exact test that both solve equally many",
    ),
    incomplete
      ? h(
          "p",
          { class: "advice" },
          "This report has only a part of the answers; braid look --versus counts all.",
        )
      : null,
    table(["domain", ...KINDS, "p"], counts, "Outcomes"),
    ...problemsOf(data, outcomes, [first, second], options, answers),
  ];
}

/** Return by model, domain and problem the samples, as [stage, index]. */
function answersByModel(data) {
  const byModel = Object.create(null); // a model may be called constructor
  for (const [stage, samples] of Object.entries(data.samples)) {
    if (!data.measured.includes(stage)) continue; // not a gate's, nor a stale evaluation's
    samples.columns.step.forEach((_, index) => {
      const [model, domain, problem] = ["model", "domain", "problem"].map((name) =>
        valueOf(samples, name, index),
      );
      if (model === null || problem === null || samples.columns.solved[index] === null) return;
      const problems = ((byModel[model] ||= Object.create(null))[domain] ||= Object.create(null));
      (problems[problem] ||= []).push([stage, index, samples.columns.solved[index]]);
    });
  }
  return byModel;
}

function outcomesOf(first, second) {
  const outcomes = plain({});
  for (const domain of Object.keys(first).filter((name) => second[name])) {
    const kinds = Object.fromEntries(KINDS.map((kind) => [kind, []]));
    for (const problem of Object.keys(first[domain]).filter((key) => second[domain][key])) {
      const [one, other] = [first, second].map(
        (byDomain) => mean(byDomain[domain][problem].map(([, , solved]) => solved)) >= 0.5,
      );
      kinds[KINDS[one ? (other ? 0 : 1) : other ? 2 : 3]].push(problem);
    }
    outcomes[domain] = kinds;
  }
  return outcomes;
}

/** Return the two-sided exact p that two models solve equally many, by what only one solved. */
function mcnemar(onlyFirst, onlySecond) {
  const count = onlyFirst + onlySecond;
  if (count > 1000) return ""; // beyond what doubles hold; braid look has it
  let term = 0.5 ** count;
  let tail = 0;
  for (let wins = 0; wins <= Math.min(onlyFirst, onlySecond); wins++) {
    tail += term;
    term *= (count - wins) / (wins + 1);
  }
  return Math.min(1, 2 * tail);
}

function problemsOf(data, outcomes, names, options, answers) {
  const [domain, kind] = [options.get("domain"), options.get("kind")];
  if (!outcomes[domain] || !KINDS.includes(kind)) return [];
  const problems = outcomes[domain][kind];
  const shown = problems.slice(0, 50).map((problem) => {
    const texts = names.map((name) => {
      const [stage, index] = answers[name][domain][problem][0];
      return [
        h("h3", {}, name),
        h("p", { class: "quiet" }, earned(data.samples[stage], index)),
        h("pre", {}, valueOf(data.samples[stage], "response", index) ?? "(left out)"),
      ];
    });
    const [stage, index] = answers[names[0]][domain][problem][0];
    return h(
      "article",
      {},
      h("h2", {}, `problem ${problem.slice(0, KEY_DIGITS)}`),
      h("pre", {}, valueOf(data.samples[stage], "prompt", index) ?? "(left out)"),
      h(
        "div",
        { class: "pair" },
        texts.map((content) => h("div", {}, content)),
      ),
    );
  });
  return [
    h(
      "p",
      { id: "count" },
      `${problems.length} problems of ${domain}: ${kind}` +
        (problems.length > 50 ? "; 50 are shown" : ""),
    ),
    ...shown,
  ];
}
