// ---- drawing
const MAX_DETAILED_CURVES = 6; // in a chart; more curves are drawn without bands and unsmoothed lines
const MIN_SMOOTHED_POINTS = 31; // curves with fewer points have a dot at each point
const MARKER_GAP = 70; // pixels between two markers of a curve
const SMALL_CIRCLE = "M-2.6 0a2.6 2.6 0 1 0 5.2 0a2.6 2.6 0 1 0 -5.2 0Z";
const LARGE_CIRCLE = "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0Z";
const CROSS = "M-4 -4L4 4M-4 4L4 -4";
const END_SYMBOLS = {"": "", circle: LARGE_CIRCLE, cross: CROSS};
const isOnAxes = (x, y, isLog) => y !== null && !(view.logX && x <= 0) && !(isLog && y <= 0);

function tracePath(xs, ys, {scaleX, scaleY, isLog}, firstCommand = "M") {
  let path = "";
  let command = firstCommand;
  for (let i = 0; i < ys.length; i++) {
    if (!isOnAxes(xs[i], ys[i], isLog)) { command = "M"; continue; }
    path += command + scaleX(xs[i]).toFixed(1) + " " + scaleY(ys[i]).toFixed(1);
    command = "L";
  }
  return path;
}
function traceBand(curve, chart) { // one closed area; gaps are bridged
  const indices = curve.y.map((_, i) => i).filter(i => curve.y[i] !== null && isOnAxes(curve.x[i], curve.low[i], chart.isLog));
  if (!indices.length) return "";
  const traceEdge = (order, values, firstCommand) =>
    tracePath(order.map(i => curve.x[i]), order.map(i => values[i]), chart, firstCommand);
  return traceEdge(indices, curve.high) + traceEdge([...indices].reverse(), curve.low, "L") + "Z";
}
function drawSymbol(className, path, x, y) {
  return `<path class="${className}" d="${path}" transform="translate(${x.toFixed(1)} ${y.toFixed(1)})"/>`;
}
function drawMarkers(curve, chart) { // on every point of a short curve, otherwise at regular distances
  const {marker} = runs[curve.run];
  const hasDots = curve.y.length === 1 || (curve.y.length < MIN_SMOOTHED_POINTS && !chart.may_smooth);
  if (!hasDots && !marker) return "";
  const parts = [];
  let nextPixel = hasDots ? -Infinity : chart.left + curve.run * 11 % MARKER_GAP; // curves that coincide have separate markers
  curve.line.forEach((y, i) => {
    if (!isOnAxes(curve.x[i], y, chart.isLog)) return;
    const pixelX = chart.scaleX(curve.x[i]);
    if (!hasDots && pixelX < nextPixel) return;
    if (!hasDots) while (nextPixel <= pixelX) nextPixel += MARKER_GAP;
    parts.push(drawSymbol("dot", marker || SMALL_CIRCLE, pixelX, chart.scaleY(y)));
  });
  return parts.join("");
}
function drawEnd(curve, chart) { // a cross if the run did not finish, a circle if it is active
  const path = END_SYMBOLS[runs[curve.run].end_symbol];
  const i = curve.line.findLastIndex((y, i) => isOnAxes(curve.x[i], y, chart.isLog));
  return path && i >= 0 ? drawSymbol("end", path, chart.scaleX(curve.x[i]), chart.scaleY(curve.line[i])) : "";
}
function drawCurve(curve, chart, isDetailed) {
  const {colour, dash} = runs[curve.run];
  const isHighlighted = view.highlightedRun === curve.run;
  const parts = [];
  if (curve.low && (isDetailed || isHighlighted)) parts.push(`<path class="band" d="${traceBand(curve, chart)}"/>`);
  if (curve.line !== curve.y && isDetailed) parts.push(`<path class="raw" d="${tracePath(curve.x, curve.y, chart)}"/>`);
  parts.push(`<path class="line" stroke-dasharray="${dash}" d="${tracePath(curve.x, curve.line, chart)}"/>`);
  parts.push(drawMarkers(curve, chart), drawEnd(curve, chart));
  const classes = isHighlighted ? "curve hot" : "curve";
  return `<g class="${classes}" data-curve="${curve.run}" style="--c:${colour}">${parts.join("")}</g>`;
}
function drawGridX(chart, rangeX, width) {
  const {scaleX, left, right, top, bottom} = chart;
  const parts = [];
  let nextFreePixel = -Infinity;
  for (const [value, step] of makeTicks(...rangeX, Math.max(2, (right - left) / 75), view.logX)) {
    const text = formatTick(value, step, view.axis === PART_OF_RUN);
    const halfWidth = 3.8 * text.length;
    const x = Math.min(scaleX(value), width - halfWidth);
    parts.push(`<path class="rule" d="M${scaleX(value).toFixed(1)} ${top}V${bottom}"/>`);
    if (x - halfWidth < nextFreePixel) continue;
    parts.push(`<text x="${x.toFixed(1)}" y="${bottom + 18}" text-anchor="middle">${text}</text>`);
    nextFreePixel = x + halfWidth + 6;
  }
  return parts.join("");
}
function drawGridY(chart, ticks) {
  const {scaleY, left, right} = chart;
  return ticks.map(([value, text]) => `<path class="rule" d="M${left} ${scaleY(value).toFixed(1)}H${right}"/>`
    + `<text x="${left - 5}" y="${(scaleY(value) + 4).toFixed(1)}" text-anchor="end">${text}</text>`).join("");
}
function drawChart(chart) {
  const width = chart.box.clientWidth;
  const height = Math.round(Math.min(330, Math.max(200, width * 0.58)));
  const isPercent = chart.unit === "%";
  const isLog = chart.may_log && view.logLoss;
  const visibleCurves = chart.curves.filter(curve => isVisible(curve.run));
  const isDetailed = visibleCurves.length <= MAX_DETAILED_CURVES;
  const isSmoothed = chart.may_smooth && view.smoothing;
  const curves = visibleCurves.map(curve =>
    ({...curve, x: selectPositions(curve), line: isSmoothed ? smoothCurve(curve) : curve.y}));
  const rangeX = curves.length ? findRangeX(curves) : null;
  const rangeY = rangeX && findRangeY(curves, rangeX, isPercent, isLog, isDetailed);
  chart.drawnCurves = rangeY ? curves : [];
  if (!rangeY) {
    chart.box.innerHTML = `<svg height="${height}"><text x="8" y="20">no points in this range</text></svg>`;
    return;
  }

  const ticksY = makeTicks(...rangeY, Math.max(4, height / 38), isLog)
    .map(([value, step]) => [value, formatTick(value, step, isPercent)]);
  const left = 10 + 6.6 * Math.max(...ticksY.map(([, text]) => text.length));
  const right = width - 16;
  const top = 8;
  const bottom = height - 38;
  const scaleX = makeScale(...rangeX, left, right, view.logX);
  const scaleY = makeScale(...rangeY, bottom, top, isLog);
  Object.assign(chart, {scaleX, scaleY, isLog, left, right, top, bottom});

  const clipId = `clip${charts.indexOf(chart)}`;
  const clipBox = `x="${left}" y="${top - 3}" width="${right - left + 3}" height="${bottom - top + 6}"`;
  const lines = curves.map(curve => drawCurve(curve, chart, isDetailed)).join("");
  chart.box.innerHTML = `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">`
    + `<clipPath id="${clipId}"><rect ${clipBox}/></clipPath>${drawGridY(chart, ticksY)}${drawGridX(chart, rangeX, width)}`
    + `<path class="frame" d="M${left} ${top}V${bottom}H${right}"/><g clip-path="url(#${clipId})">${lines}</g>`
    + `<text x="${(left + right) / 2}" y="${height - 4}" text-anchor="middle">${AXIS_TITLES[view.axis]}</text></svg>`;
}
function drawAll() {
  hideTip();
  charts.forEach(drawChart);
  byId("whole").hidden = !view.zoom;
}

