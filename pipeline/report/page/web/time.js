// Where the time and the memory of ranks and engines went.
"use strict";

const LANE = 26; // pixels of a process
const LANES_LEFT = 90;
// All different, and seen on a light ground as on a dark one.
const PHASE_COLOURS = plain({
  wait: "#8a939c",
  train: "#2f86c9",
  sample: "#c2571a",
  rollout: "#e69f00",
  collect: "#b8a11f",
  "weight sync": "#35b5c9",
  load: "#9a6fc0",
  checkpoint: "#cc79a7",
  "finish checkpoint": "#a34a72",
  log: "#009e73",
  record: "#6aa84f",
  step: "#5f6b78",
});
const OTHER_PHASES = "#9aa86f";

function timePage(data, { stage }) {
  const stages = Object.keys(data.timelines);
  const memory = memoryTable(data);
  if (!stages.length)
    return [h("p", {}, "No process of this run has recorded its phases."), ...memory];
  const name = stages.includes(stage)
    ? stage
    : stages.find((stageName) => withEngines(data, stageName)) || stages[0];
  const timelines = data.timelines[name];
  const names = [
    ...new Set(Object.values(timelines).flatMap((timeline) => Object.keys(timeline.seconds))),
  ];
  const rows = Object.entries(timelines).map(([process, timeline]) => {
    const whole = Math.max(timeline.until - timeline.since, 1e-9);
    const share = (phase) =>
      timeline.seconds[phase] === undefined
        ? ""
        : `${((100 * timeline.seconds[phase]) / whole).toFixed(0)} %`;
    return [process, Math.round(whole), ...names.map(share)];
  });
  const canvas = h("canvas", {
    id: "lanes",
    role: "img",
    "aria-label": "Phases of every process over time; the table above has their sums",
  });
  const caption = h("p", { class: "quiet", id: "phase" }, "hold the pointer over a phase");
  queueMicrotask(() => drawLanes(canvas, caption, timelines));
  return [
    stageChoice("time", stages, name),
    waitingLine(timelines),
    h("p", { class: "quiet" }, "shares of each process's time, without the phases inside a phase"),
    table(["process", "seconds", ...names.map(phaseHeading)], rows, "Phases of each process"),
    h("h2", {}, "Phases"),
    caption,
    canvas,
    ...memory,
  ];
}

function phaseHeading(name) {
  const style = `background: ${PHASE_COLOURS[name] || OTHER_PHASES}`;
  return h("span", {}, h("span", { class: "swatch", style }), name);
}

function withEngines(data, stage) {
  return Object.keys(data.timelines[stage]).some((process) => process.startsWith("engine"));
}

/** Say for whom the ranks wait, and how long engines do nothing. */
function waitingLine(timelines) {
  const shares = plain({});
  const idle = [];
  const ranks = Object.keys(timelines).filter((process) => process.startsWith("rank"));
  for (const [process, timeline] of Object.entries(timelines)) {
    const whole = Math.max(timeline.until - timeline.since, 1e-9);
    if (process.startsWith("engine")) {
      const busy = Object.values(timeline.seconds).reduce((sum, value) => sum + value, 0);
      idle.push(Math.max(0, 1 - busy / whole));
    } else {
      for (const [whom, seconds] of Object.entries(timeline.waits)) {
        shares[whom] = (shares[whom] || 0) + seconds / whole / ranks.length;
      }
    }
  }
  if (!idle.length) return null;
  const phrases = Object.entries(shares)
    .sort(([, one], [, other]) => other - one)
    .map(([whom, share]) => `for ${whom} ${(100 * share).toFixed(0)} %`);
  const waits = phrases.length
    ? `Ranks wait ${phrases.join(", ")} of their time`
    : "Ranks wait for nobody";
  return h(
    "p",
    { id: "waiting" },
    `${waits}; engines are idle ${(100 * mean(idle)).toFixed(0)} % of theirs.`,
  );
}

function memoryTable(data) {
  const peaks = plain(Object.fromEntries(data.costs.map((cost) => [cost.stage, cost])));
  const rows = data.stages
    .filter((stage) => peaks[stage.name])
    .map((stage) => [
      stage.name,
      bytes(stage.planned_bytes),
      bytes(peaks[stage.name].peak_bytes),
      bytes(peaks[stage.name].peak_gpu_bytes),
    ]);
  if (!rows.length) return [];
  return [
    h("h2", {}, "Memory"),
    h(
      "p",
      { class: "quiet" },
      "of the fullest rank: the models, gradients, optimizer and activations that were planned; and the most that it had, on the host with Python and its libraries",
    ),
    table(["stage", "planned", "host", "GPU"], rows, "Memory"),
  ];
}

function drawLanes(canvas, caption, timelines) {
  const processes = Object.entries(timelines);
  const width = contentWidth(document.getElementById("main"));
  const height = LANE * processes.length + 20;
  const pen = penOf(canvas, width, height);
  const since = Math.min(...processes.map(([, timeline]) => timeline.since));
  const until = Math.max(...processes.map(([, timeline]) => timeline.until));
  const scale = (width - LANES_LEFT) / Math.max(until - since, 1e-9);
  const at = (time) => LANES_LEFT + scale * (time - since);
  processes.forEach(([process, timeline], lane) => {
    pen.fillStyle = colour("text");
    pen.fillText(process, 0, LANE * (lane + 0.5), LANES_LEFT - 8);
    for (const [name, begin, end] of timeline.phases) {
      pen.fillStyle = PHASE_COLOURS[name] || OTHER_PHASES;
      pen.fillRect(at(begin), LANE * lane + 3, Math.max(at(end) - at(begin), 0.5), LANE - 6);
    }
  });
  pen.fillStyle = colour("text");
  pen.fillText("0 s", LANES_LEFT, height - 8);
  pen.fillText(`${Math.round(until - since)} s`, width - 40, height - 8);
  canvas.onpointermove = (event) => {
    const lane = processes[Math.floor(event.offsetY / LANE)];
    if (!lane) return;
    const time = since + (event.offsetX - LANES_LEFT) / scale;
    const inside = lane[1].phases.filter(([, begin, end]) => begin <= time && time < end).at(-1);
    if (!inside) return;
    const [name, begin, end, waitsFor, step] = inside;
    caption.textContent = `${lane[0]}: ${name}${step ? ` of step ${step}` : ""}, ${(end - begin).toFixed(2)} s${waitsFor ? `, waits for ${waitsFor}` : ""}`;
  };
}
