// One sample: what it earned, its texts, its tokens, and how it differs from another one.
"use strict";

const COLOURINGS = {
  difference: "|engine - trainer|",
  entropies: "entropy",
  advantages: "advantage",
  teacher_kl: "merge's loss",
  logprobs: "engine's log-probability",
};
const NUMBERS = ["logprobs", "trainer_logprobs", "entropies", "advantages", "teacher_kl"];
const MOST_COMPARED = 1500; // words of a response that are compared with another one's

function sampleView(data, stage, index, options) {
  const samples = data.samples[stage];
  const value = (name) => valueOf(samples, name, index);
  const messages = samples.columns.messages[index];
  const marked = options.get("mark");
  return [
    h(
      "h2",
      {},
      [value("model") || `step ${value("step")}, group ${value("group")}`, value("domain")].join(
        " · ",
      ),
    ),
    h("p", { id: "earned" }, earned(samples, index)),
    messages
      ? Object.entries(messages).map(([name, text]) =>
          h("p", { class: "quiet" }, `${name}: ${text}`),
        )
      : null,
    value("problem") ? sampleLinks(stage, index, value("problem")) : null,
    !samples.names.prompt
      ? h("p", { class: "quiet" }, "The texts are left out of this report (--redact).")
      : [
          h("h2", {}, "Prompt"),
          h("pre", {}, value("prompt") || ""),
          samples.names.answer && value("answer")
            ? [h("h2", {}, "Reference answer"), h("pre", { id: "answer" }, value("answer"))]
            : null,
          h("h2", {}, "Response"),
          h("pre", { id: "response" }, value("response") || ""),
        ],
    marked !== null && Number(marked) !== index && samples.names.response
      ? differenceView(samples, Number(marked), index)
      : null,
    samples.tokens[index]
      ? tokensView(data, samples.tokens[index], samples.columns.advantage[index])
      : null,
  ];
}

function earned(samples, index) {
  const value = (name) => valueOf(samples, name, index);
  if (value("reward") === null)
    return `no reward: ${value("reward_failure") || "it was not graded"}`;
  const scored = Object.entries(samples.parts)
    .filter(([, scores]) => scores[index] !== null)
    .map(([name, scores]) => `${name} ${short(scores[index])}`);
  return [
    `reward ${short(value("reward"))} (${scored.join(", ")})`,
    value("model") ? "" : `, advantage ${short(value("advantage"))}`,
    value("staleness") ? `, ${value("staleness")} steps old` : "",
    value("finish_reason") === "length" ? ", truncated" : "",
  ].join("");
}

function sampleLinks(stage, index, problem) {
  const key = problem.slice(0, KEY_DIGITS);
  const same = link("samples", stage, { problem: key });
  const mark = link("samples", stage, withOptions({ mark: String(index) }));
  return h(
    "p",
    {},
    h("a", { href: same, id: "same-prompt" }, "all samples of this prompt"),
    " · ",
    h("a", { href: mark, id: "mark" }, "compare the next ones with it"),
    h("span", { class: "quiet code" }, ` ${key}`),
  );
}

/** Return a response's tokens, coloured by what was recorded of them. */
function tokensView(data, recorded, advantage) {
  const { logprobs: engine, trainer_logprobs: trainer } = recorded;
  const learned = recorded.learned ? new Set(recorded.learned) : null; // of others trainer's values are 0
  const difference =
    engine && trainer
      ? trainer.map((value, at) => (learned && !learned.has(at) ? 0 : Math.abs(value - engine[at])))
      : null;
  const columns = { ...recorded, difference };
  const colourings = Object.keys(COLOURINGS).filter((name) => columns[name]);
  const preferred = place().options.get("colour");
  const colouring = colourings.includes(preferred) ? preferred : colourings[0];
  const text = h("pre", { class: "tokens", id: "tokens", tabindex: 0, "aria-label": "Tokens" });
  const caption = h(
    "p",
    { class: "quiet", id: "token" },
    `advantage of the response ${short(advantage)}; hold the pointer over a token for its numbers`,
  );
  const paint = (name) => {
    const values = columns[name];
    const most = values.reduce((largest, value) => Math.max(largest, Math.abs(value)), 1e-12);
    text.replaceChildren(
      ...recorded.ids.map((id, at) => tokenSpan(data, recorded, id, at, values[at], most)),
    );
  };
  text.addEventListener("pointerover", (event) => {
    if (event.target.title) caption.textContent = event.target.title.replaceAll("\n", " · ");
  });
  const chooser = h(
    "select",
    { id: "colouring", onchange: (event) => goWith({ colour: event.target.value }) },
    colourings.map((name) =>
      h("option", { value: name, selected: name === colouring }, COLOURINGS[name]),
    ),
  );
  if (colourings.length) paint(colouring);
  return [
    h("h2", {}, "Tokens"),
    h("p", {}, h("label", { class: "quiet" }, "coloured by ", chooser)),
    text,
    caption,
  ];
}

function tokenSpan(data, recorded, id, at, value, most) {
  const hue = value < 0 ? "86, 180, 233" : "230, 159, 0";
  const numbers = NUMBERS.filter((name) => recorded[name]).map(
    (name) => `${name} ${recorded[name][at]}`,
  );
  const style = `background: rgba(${hue}, ${((0.85 * Math.abs(value)) / most).toFixed(2)})`;
  return h(
    "span",
    { style, title: [`token ${at}`, ...numbers].join("\n") },
    data.vocabulary[id] ?? `[${id}]`,
  );
}

/** Return what two responses have in common, and what only one of them says. */
function differenceView(samples, marked, index) {
  const [before, after] = [marked, index].map(
    (sampleIndex) => valueOf(samples, "response", sampleIndex) || "",
  );
  const name = (sampleIndex) =>
    valueOf(samples, "model", sampleIndex) || `step ${samples.columns.step[sampleIndex]}`;
  const pieces = wordDifference(before, after).map(([kind, text]) =>
    kind === "same" ? text : h(kind, {}, text),
  );
  return [
    h("h2", {}, "Difference"),
    h(
      "p",
      { class: "quiet" },
      `struck out: only the marked one (${name(marked)}); underlined: only this one (${name(index)})`,
    ),
    h("pre", { id: "difference" }, pieces),
  ];
}

/** Return runs of words, each "same", "del" (only before) or "ins" (only after), in order. */
function wordDifference(before, after) {
  const [a, b] = [before, after].map((text) =>
    (text.match(/\s+|[^\s]+/g) || []).slice(0, MOST_COMPARED),
  );
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width); // of the longest common subsequence
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      lengths[i * width + j] =
        a[i] === b[j]
          ? lengths[(i + 1) * width + j + 1] + 1
          : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const runs = [];
  const add = (kind, word) => {
    if (runs.length && runs.at(-1)[0] === kind) runs.at(-1)[1] += word;
    else runs.push([kind, word]);
  };
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add("same", a[i++]);
      j++;
    } else if (
      j >= b.length ||
      (i < a.length && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])
    )
      add("del", a[i++]);
    else add("ins", b[j++]);
  }
  return runs;
}
