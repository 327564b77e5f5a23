// One chart: series over whole numbers, with a guard's threshold and what interrupted the stage.
"use strict";

const BRIGHT = [
  "#56b4e9",
  "#f0a050",
  "#3ddbb0",
  "#f0a8d0",
  "#f0e442",
  "#9cc4ff",
  "#c8a2ff",
  "#a8d86e",
];
const PALETTE = [
  "#0072b2",
  "#d55e00",
  "#009e73",
  "#cc79a7",
  "#b8860b",
  "#56b4e9",
  "#7a5195",
  "#5b8c00",
];
const PALE = "55"; // the opacity of values below their moving mean, of ff
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]]; // beside the colour, for who sees none
const WHOLE = [1, 2, 5]
  .flatMap((digit) => [0, 1, 2, 3, 4, 5, 6].map((power) => digit * 10 ** power))
  .sort((one, other) => one - other);

/** Return the window of a smoothed curve: a tenth of its steps; 1, of few, smooths nothing. */
function windowOf(count) {
  return count < 20 ? 1 : Math.max(3, Math.round(count / 10));
}

/** Return the mean of the values around each; null stays, and counts for nothing around it. */
function movingMean(values, window) {
  const half = Math.floor(window / 2);
  return values.map((value, at) => {
    if (value === null) return null;
    const around = values.slice(Math.max(0, at - half), at + half + 1);
    return mean(around.filter((near) => near !== null));
  });
}

/**
 * Return a figure of series, each {label, x, y}; null in y is a gap.
 *
 * `about` may have `caption`, `guards`, `interruptions`, `sync` (charts of a name share a cursor),
 * `onclick` (given the x that was clicked), `height`, `legend`, and `smooth`: a moving mean is drawn
 * over the values, which are pale then.
 */
function figure(series, about) {
  const { x, columns } = aligned(series);
  const element = h("figure", {}, about.caption ? h("figcaption", {}, about.caption) : null);
  element.dataset.points = columns.flat().filter((value) => value !== null).length;
  requestAnimationFrame(() => {
    const width = Math.max(260, element.clientWidth || 360);
    const options = chartOptions(series, about, x.length, width);
    const plot = new uPlot(options, [x, ...columns], element);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label", spoken(series, columns));
    if (about.onclick)
      plot.over.addEventListener(
        "click",
        () => plot.cursor.idx !== null && about.onclick(x[plot.cursor.idx]),
      );
    element.dataset.drawn = "true";
  });
  return element;
}

function chartOptions(series, about, points, width) {
  const quiet = colour("quiet");
  const smooth = about.smooth && windowOf(points) > 1;
  const axis = { stroke: quiet, grid: { stroke: quiet, width: 0.2 }, ticks: { width: 0.4 } };
  return {
    width,
    height: about.height || 180,
    cursor: { drag: { x: true, y: false }, sync: about.sync ? { key: `of ${about.sync}` } : undefined },
    legend: { show: about.legend ?? series.length > 1 },
    scales: { x: { time: false }, y: { range: valueRange } },
    axes: [
      { ...axis, incrs: WHOLE },
      { ...axis, size: 60, values: (_, values) => values.map(short) },
    ],
    series: [
      { label: about.unit || "step" },
      ...series.map(({ label }, at) => ({
        label,
        stroke: seriesColour(at) + (smooth ? PALE : ""),
        dash: DASHES[Math.floor(at / PALETTE.length) % DASHES.length],
        width: 1.5,
        points: { show: points < 30 },
        spanGaps: true,
        value: (_, value) => short(value),
      })),
    ],
    hooks: {
      drawAxes: [(plot) => drawMarks(plot, about.guards || [], about.interruptions || [])],
      draw: smooth ? [drawMeans] : [],
    },
  };
}

function seriesColour(at) {
  return (isDark() ? BRIGHT : PALETTE)[at % PALETTE.length];
}

/** Draw the moving mean of each series. */
function drawMeans(plot) {
  const { ctx: pen, bbox, data } = plot;
  pen.save();
  pen.beginPath();
  pen.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  pen.clip();
  pen.lineWidth = 2 * (devicePixelRatio || 1);
  data.slice(1).forEach((column, at) => {
    pen.strokeStyle = seriesColour(at);
    pen.beginPath();
    const present = data[0].map((x, place) => [x, column[place]]).filter(([, y]) => y !== null);
    const means = movingMean(
      present.map(([, y]) => y),
      windowOf(present.length),
    );
    present.forEach(([x], place) =>
      pen.lineTo(plot.valToPos(x, "x", true), plot.valToPos(means[place], "y", true)),
    );
    pen.stroke();
  });
  pen.restore();
}

/** Return the range of a value's axis; a constant has its own value in the middle. */
function valueRange(plot, least, most) {
  if (least === null || least === undefined) return [0, 1];
  if (least === 0 && most === 0) return [0, 1];
  const room = Math.abs(least) * 0.1;
  return least === most ? [least - room, most + room] : uPlot.rangeNum(least, most, 0.1, true);
}

/** Shade what is beyond a guard's threshold, and mark its firings and the stage's interruptions. */
function drawMarks(plot, guards, interruptions) {
  const { ctx: pen, bbox } = plot;
  pen.save();
  pen.beginPath();
  pen.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  pen.clip();
  for (const guard of guards) {
    const at = plot.valToPos(guard.threshold, "y", true);
    const [top, bottom] = guard.side === "above" ? [bbox.top, at] : [at, bbox.top + bbox.height];
    pen.fillStyle = "rgba(213, 94, 0, 0.12)";
    if (bottom > top) pen.fillRect(bbox.left, top, bbox.width, bottom - top);
    line(pen, bbox.left, at, bbox.left + bbox.width, at, "#d55e00", [5, 4]);
    for (const step of guard.fired) {
      const x = plot.valToPos(step, "x", true);
      line(pen, x, bbox.top, x, bbox.top + bbox.height, "#d55e00", []);
    }
  }
  for (const { step } of interruptions) {
    const x = plot.valToPos(step, "x", true);
    line(pen, x, bbox.top, x, bbox.top + bbox.height, colour("quiet"), [2, 4]);
  }
  pen.restore();
}

function line(pen, x, y, toX, toY, stroke, dash) {
  pen.strokeStyle = stroke;
  pen.lineWidth = devicePixelRatio || 1;
  pen.setLineDash(dash.map((length) => length * (devicePixelRatio || 1)));
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(toX, toY);
  pen.stroke();
}

/** Return the union of the series' x, and each series on it, null where it has no value. */
function aligned(series) {
  const x = [...new Set(series.flatMap((curve) => curve.x))].sort((one, other) => one - other);
  const at = new Map(x.map((value, index) => [value, index]));
  const columns = series.map((curve) => {
    const column = new Array(x.length).fill(null);
    curve.x.forEach((value, index) => {
      column[at.get(value)] = curve.y[index];
    });
    return column;
  });
  return { x, columns };
}

/** Return a chart in words, for who hears the page. */
function spoken(series, columns) {
  const phrases = series.map(({ label }, at) => {
    const values = columns[at].filter((value) => value !== null);
    return values.length
      ? `${label}: from ${short(values[0])} to ${short(values.at(-1))}`
      : `${label}: no value`;
  });
  return phrases.join("; ");
}
