// Which experts a stage's tokens take: by layer and expert, over steps, and by domain.
"use strict";

const CELL = { least: 4, most: 28, height: 22, left: 60 };
const ROUTERS = [
  "router_agreement",
  "router_movement",
  "router_entropy",
  "expert_load_max",
  "dead_experts",
];

function routingPage(data, { stage, options }) {
  const curves = Object.keys(data.curves).filter((name) => routerCurves(data, name).length);
  const stages = [...new Set([...Object.keys(data.routing), ...curves])];
  if (!stages.length)
    return [
      h(
        "p",
        {},
        "No stage has recorded its experts: routing.replay is none, or logging.tokens is 0.",
      ),
    ];
  const name = stages.includes(stage) ? stage : stages[0];
  const trends = routerCurves(data, name);
  return [
    stageChoice("routing", stages, name),
    ...(data.routing[name] ? expertMaps(data.routing[name], name, options) : []),
    trends.length ? h("h2", {}, "Routers") : null,
    h(
      "div",
      { class: "charts" },
      trends.map((metric) => metricChart(data, name, metric)),
    ),
  ];
}

function routerCurves(data, stage) {
  const curves = data.curves[stage];
  return curves && !curves.domain
    ? metricNames(curves).filter((name) => /rout|expert|load/.test(name))
    : [];
}

function expertMaps(routing, name, options) {
  const domains = Object.keys(routing.steps[0].slots);
  const domain = domains.includes(options.get("domain")) ? options.get("domain") : domains[0];
  const last = routing.steps.length - 1;
  const at = Math.min(Number(options.get("at") ?? last), last);
  const map = h("canvas", {
    id: "experts",
    role: "img",
    "aria-label": "Share of each expert in every routed layer; the table has the largest",
  });
  const caption = h("p", { class: "quiet", id: "expert" });
  const paint = (place) => paintExperts(map, caption, routing.steps[place], domain);
  const slider = h("input", {
    type: "range",
    min: 0,
    max: last,
    value: at,
    id: "step",
    "aria-valuetext": `step ${routing.steps[at].step}`,
    oninput: (event) => {
      event.target.setAttribute(
        "aria-valuetext",
        `step ${routing.steps[Number(event.target.value)].step}`,
      );
      paint(Number(event.target.value));
    },
    onchange: (event) => goWith({ at: event.target.value }),
  });
  queueMicrotask(() => paint(at));
  const change = (event) => goWith({ domain: event.target.value });
  const owners = Object.entries(routing.owned).map(([owner, experts]) => [
    owner,
    experts
      .map(([layer, expert, times]) => `layer ${layer} expert ${expert} (${short(times)} times)`)
      .join(" · ") || "none",
  ]);
  return [
    domains.length > 1
      ? h("form", { class: "filters" }, choice("domain", "domain", domains, domain, change, null))
      : null,
    h("p", {}, h("label", {}, "step ", slider)),
    caption,
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Experts" }, map),
    h("h2", {}, "Experts of each domain"),
    h(
      "p",
      { class: "quiet" },
      domains.length > 1
        ? "used at least twice as often as in the other domains"
        : "used at least twice as often as an equal share",
    ),
    table(["domain", "experts"], owners, "Experts of each domain"),
    routing.churn.length
      ? figure(
          [
            {
              label: "churn",
              x: routing.churn.map(([step]) => step),
              y: routing.churn.map(([, value]) => value),
            },
          ],
          {
            caption: [
              h("b", {}, "churn"),
              ": share of slots that went to another expert than in the step before",
            ],
          },
        )
      : null,
  ];
}

function paintExperts(canvas, caption, step, domain) {
  const layers = step.slots[domain] || [];
  const experts = layers.length ? layers[0].length : 0;
  const room = contentWidth(document.getElementById("main")) - CELL.left;
  const cell = Math.max(CELL.least, Math.min(CELL.most, Math.floor(room / Math.max(experts, 1))));
  const pen = penOf(canvas, CELL.left + cell * experts, CELL.height * layers.length);
  const shares = layers.map((layer) => {
    const sum = layer.reduce((one, other) => one + other, 0) || 1;
    return layer.map((count) => count / sum);
  });
  shares.forEach((layer, row) => {
    pen.fillStyle = colour("text");
    pen.fillText(`layer ${row}`, 0, CELL.height * (row + 0.5));
    layer.forEach((share, expert) => {
      pen.fillStyle = `rgba(${isDark() ? "86, 180, 233" : "0, 114, 178"}, ${Math.min(1, (share * experts) / 3).toFixed(3)})`; // full from three equal shares on
      pen.fillRect(CELL.left + cell * expert, CELL.height * row + 1, cell - 1, CELL.height - 2);
    });
  });
  const about = `step ${step.step}, ${domain}`;
  caption.textContent = `${about}: a cell is an expert; the ${isDark() ? "brighter" : "darker"}, the more tokens; hold the pointer over one`;
  canvas.onpointermove = (event) => {
    const row = Math.floor(event.offsetY / CELL.height);
    const expert = Math.floor((event.offsetX - CELL.left) / cell);
    if (shares[row] === undefined || shares[row][expert] === undefined) return;
    caption.textContent = `${about}: layer ${row}, expert ${expert} takes ${percent(shares[row][expert])} % (an equal share is ${percent(1 / experts)} %)`;
  };
}
