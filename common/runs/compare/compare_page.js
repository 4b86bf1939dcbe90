"use strict";
// Draws the charts of the compare page as SVG, and sorts and filters its table. Texts of runs are only set as textContent.
const {runs, charts} = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const findAll = (selector, parent = document) => [...parent.querySelectorAll(selector)];

const AXIS_TITLES = ["step", "samples", "seconds", "part of the run"];
const PART_OF_RUN = 3; // index of an axis
const MAX_DETAILED_CURVES = 6; // in a chart; more curves are drawn without bands and unsmoothed lines
const MAX_DOTS = 30; // of a curve
const view = {axis: 0, logX: false, logLoss: false, smoothing: 0.6, zoom: null, highlightedRun: -1};

const runElements = runs.map((_, run) => findAll(`[data-run="${run}"]`)); // entry in the legend, row of the table
const checkboxes = runElements.map(([legendEntry]) => legendEntry.querySelector("input"));
const filteredOut = runs.map(() => false);
const isVisible = run => checkboxes[run].checked && !filteredOut[run];
findAll(".chart").forEach((box, i) => { charts[i].box = box; });

// ---- numbers
const compactNumber = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});
const fullNumber = new Intl.NumberFormat("en", {maximumSignificantDigits: 6});
const countDecimals = step => Math.max(0, -Math.floor(Math.log10(step) + 1e-9));

function formatTick(value, step, isPercent) {
  if (isPercent) return (100 * value).toFixed(countDecimals(100 * step)) + "%";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(0);
  if (Math.abs(value) >= 1e4) return compactNumber.format(value).replace("K", "k");
  return value.toFixed(Math.min(8, countDecimals(step)));
}
const formatValue = (value, isPercent) => isPercent ? (100 * value).toFixed(2) + " %" : fullNumber.format(value);

// ---- curves
function smoothCurve(curve) { // exponential mean without bias of its start; weights decay per step, independent of thinning
  const steps = curve.positions[0];
  const meanGap = (steps.at(-1) - steps[0]) / (steps.length - 1) || 1;
  let sum = 0;
  let weight = 0;
  return curve.y.map((value, i) => {
    const decay = view.smoothing ** (i ? (steps[i] - steps[i - 1]) / meanGap : 1);
    if (value === null) return null;
    sum = decay * sum + (1 - decay) * value;
    weight = decay * weight + (1 - decay);
    return weight ? sum / weight : value;
  });
}
function selectPositions(curve) {
  if (view.axis !== PART_OF_RUN) return curve.positions[view.axis];
  const steps = curve.positions[0];
  return steps.map(step => step / steps.at(-1));
}
function findExtent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}
function makeScale(low, high, from, to, isLog) { // from values to pixels
  const transform = isLog ? Math.log10 : value => value;
  const start = transform(low);
  const length = transform(high) - start;
  const scale = value => from + (transform(value) - start) / length * (to - from);
  scale.invert = pixel => {
    const transformed = start + (pixel - from) / (to - from) * length;
    return isLog ? 10 ** transformed : transformed;
  };
  return scale;
}
function makeLogTicks(low, high, count) {
  const decades = Math.log10(high / low);
  const factors = decades > count / 2 ? [1] : [1, 2, 5];
  const stride = Math.ceil(decades / count);
  const ticks = [];
  for (let exponent = Math.floor(Math.log10(low)); 10 ** exponent <= high; exponent += stride)
    for (const factor of factors) {
      const value = factor * 10 ** exponent;
      if (value >= low && value <= high) ticks.push([value, 10 ** exponent]);
    }
  return ticks;
}
function makeTicks(low, high, count, isLog) { // pairs of a value and the distance to its neighbours
  if (isLog && high / low > 5) return makeLogTicks(low, high, count);
  const minStep = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(minStep));
  const step = [1, 2, 5, 10].find(factor => factor * power >= minStep * 0.999) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-6); i * step <= high + 1e-6 * step; i++) ticks.push([i * step, step]);
  return ticks;
}
function findRangeX(curves) {
  if (view.zoom) return view.zoom;
  const extents = curves.map(curve => findExtent(view.logX ? curve.x.filter(x => x > 0) : curve.x));
  const high = Math.max(...extents.map(extent => extent[1]));
  const low = view.logX ? Math.min(...extents.map(extent => extent[0])) : 0;
  if (low < high) return [low, high];
  return view.logX ? [low / 2, high * 2] : [0, high || 1];
}
function findRangeY(curves, [left, right], isPercent, isLog, isDetailed) { // of the visible parts of the curves
  const values = [];
  for (const curve of curves) (isDetailed ? curve.y : curve.line).forEach((value, i) => {
    const isDrawn = value !== null && !(isLog && value <= 0);
    if (isDrawn && curve.x[i] >= left && curve.x[i] <= right) values.push(value);
  });
  const [low, high] = findExtent(values);
  if (low > high) return null;
  if (isLog) return low < high ? [low / 1.1, high * 1.1] : [low / 2, high * 2];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const minimum = low >= 0 ? 0 : -Infinity;
  const maximum = isPercent ? 1 : Infinity;
  return [Math.max(minimum, low - margin), Math.min(maximum, high + margin)];
}

// ---- drawing
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
function drawCurve(curve, chart, isDetailed) {
  const {colour, dash} = runs[curve.run];
  const isHighlighted = view.highlightedRun === curve.run;
  const parts = [];
  if (curve.low && (isDetailed || isHighlighted)) parts.push(`<path class="band" d="${traceBand(curve, chart)}"/>`);
  if (curve.line !== curve.y && isDetailed) parts.push(`<path class="raw" d="${tracePath(curve.x, curve.y, chart)}"/>`);
  parts.push(`<path class="line" stroke-dasharray="${dash}" d="${tracePath(curve.x, curve.line, chart)}"/>`);
  if (curve.y.length === 1 || (curve.y.length <= MAX_DOTS && !chart.may_smooth)) curve.y.forEach((y, i) => {
    if (!isOnAxes(curve.x[i], y, chart.isLog)) return;
    const [pixelX, pixelY] = [chart.scaleX(curve.x[i]).toFixed(1), chart.scaleY(y).toFixed(1)];
    parts.push(`<circle class="dot" cx="${pixelX}" cy="${pixelY}" r="2.6"/>`);
  });
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
    parts.push(`<path class="grid" d="M${scaleX(value).toFixed(1)} ${top}V${bottom}"/>`);
    if (x - halfWidth < nextFreePixel) continue;
    parts.push(`<text x="${x.toFixed(1)}" y="${bottom + 18}" text-anchor="middle">${text}</text>`);
    nextFreePixel = x + halfWidth + 6;
  }
  return parts.join("");
}
function drawGridY(chart, ticks) {
  const {scaleY, left, right} = chart;
  return ticks.map(([value, text]) => `<path class="grid" d="M${left} ${scaleY(value).toFixed(1)}H${right}"/>`
    + `<text x="${left - 5}" y="${(scaleY(value) + 4).toFixed(1)}" text-anchor="end">${text}</text>`).join("");
}
function drawChart(chart) {
  const width = chart.box.clientWidth;
  const height = Math.round(Math.min(330, Math.max(200, width * 0.58)));
  const isPercent = chart.kind === "percent";
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

// ---- the run at the pointer
const tip = byId("tip");
function hideTip() { tip.hidden = true; highlightRun(-1); }
function highlightRun(run) { // -1 for none
  if (run === view.highlightedRun) return;
  findAll(".hot").forEach(element => element.classList.remove("hot"));
  findAll(".extra").forEach(element => element.remove());
  view.highlightedRun = run;
  byId("charts").classList.toggle("dim", run >= 0);
  if (run < 0) return;
  runElements[run].forEach(element => element.classList.add("hot"));
  for (const chart of charts) {
    const group = chart.box.querySelector(`[data-curve="${run}"]`);
    const curve = (chart.drawnCurves || []).find(drawn => drawn.run === run);
    if (!group || !curve) continue;
    group.classList.add("hot");
    group.parentNode.append(group); // in front of the others
    if (!curve.low || group.querySelector(".band")) continue;
    const band = document.createElementNS("http://www.w3.org/2000/svg", "path");
    band.setAttribute("class", "band extra");
    band.setAttribute("d", traceBand(curve, chart));
    group.prepend(band);
  }
}
function findFirstIndex(sortedValues, minimum) { // of a value that is at least `minimum`
  let low = 0;
  let high = sortedValues.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sortedValues[middle] < minimum) low = middle + 1;
    else high = middle;
  }
  return low;
}
function findNearestPoint(chart, x, y) { // of a pixel
  let nearest = null;
  let minDistance = Infinity;
  for (const curve of chart.drawnCurves || []) {
    const index = findFirstIndex(curve.x, chart.scaleX.invert(x));
    for (const i of [index - 1, index]) {
      if (i < 0 || curve.y[i] === null) continue;
      const distance = Math.hypot(chart.scaleX(curve.x[i]) - x, chart.scaleY(curve.y[i]) - y);
      if (distance >= minDistance) continue;
      minDistance = distance;
      nearest = {curve, i};
    }
  }
  return nearest;
}
function showTip(chart, event) {
  const box = chart.box.getBoundingClientRect();
  const nearest = findNearestPoint(chart, event.clientX - box.left, event.clientY - box.top);
  if (!nearest) return hideTip();
  const {curve, i} = nearest;
  const format = value => formatValue(value, chart.kind === "percent");
  highlightRun(curve.run);
  const hasSpread = curve.low && curve.low[i] !== curve.high[i];
  const spread = hasSpread ? `\n${format(curve.low[i])} to ${format(curve.high[i])}` : "";
  const [step, samples, seconds] = curve.positions.map(values => fullNumber.format(values[i]));
  tip.textContent = `${runs[curve.run].name}\n${chart.title} ${format(curve.y[i])}${spread}\n`
    + `step ${step}, ${samples} samples, ${seconds} s`;
  tip.hidden = false;
  const {width, height} = tip.getBoundingClientRect();
  const fitsRight = event.clientX + 14 + width <= innerWidth;
  tip.style.left = Math.max(4, fitsRight ? event.clientX + 14 : event.clientX - 14 - width) + "px";
  tip.style.top = Math.max(4, Math.min(innerHeight - height - 4, event.clientY + 12)) + "px";
}
document.addEventListener("pointerover", event => {
  if (event.target.closest(".chart")) return;
  const element = event.target.closest("[data-run]");
  tip.hidden = true;
  highlightRun(element ? +element.dataset.run : -1);
});

// ---- zoom: drag over a chart
charts.forEach(chart => {
  let startX = null;
  let selection = null;
  const findX = event => {
    const x = event.clientX - chart.box.getBoundingClientRect().left;
    return Math.min(chart.right, Math.max(chart.left, x));
  };
  chart.box.addEventListener("pointerdown", event => {
    if (!chart.drawnCurves?.length) return;
    startX = findX(event);
    chart.box.setPointerCapture(event.pointerId);
  });
  chart.box.addEventListener("pointermove", event => {
    if (startX === null) return showTip(chart, event);
    tip.hidden = true;
    const x = findX(event);
    const svg = chart.box.querySelector("svg");
    selection ??= svg.appendChild(document.createElementNS(svg.namespaceURI, "rect"));
    const rectangle = {x: Math.min(startX, x), y: chart.top, width: Math.abs(x - startX), height: chart.bottom - chart.top};
    for (const name in rectangle) selection.setAttribute(name, rectangle[name]);
    selection.setAttribute("class", "pick");
  });
  const endDrag = event => {
    const bounds = startX === null ? [0, 0] : [startX, findX(event)].sort((a, b) => a - b);
    startX = null;
    selection?.remove();
    selection = null;
    if (event.type !== "pointerup" || bounds[1] - bounds[0] <= 5) return;
    view.zoom = bounds.map(chart.scaleX.invert);
    drawAll();
  };
  ["pointerup", "pointercancel"].forEach(name => chart.box.addEventListener(name, endDrag));
  chart.box.addEventListener("pointerleave", hideTip);
  chart.box.addEventListener("dblclick", resetZoom);
});
function resetZoom() { view.zoom = null; drawAll(); }
byId("whole").onclick = resetZoom;

// ---- controls
findAll("#controls input[type=radio]").forEach(input => input.onchange = () => {
  if (input.name === "y") view.logLoss = input.value === "log";
  else view.zoom = null;
  if (input.name === "x") view.logX = input.value === "log";
  if (input.name === "along") view.axis = +input.value;
  drawAll();
});
byId("smooth").oninput = () => {
  view.smoothing = +byId("smooth").value;
  byId("smoothed").textContent = view.smoothing.toFixed(2);
  drawAll();
};

// ---- selection of runs
function updateExperiments() {
  findAll(".experiment").forEach(group => {
    const shownBoxes = findAll(".run input", group).filter(box => !box.closest(".run").hidden);
    const groupBox = group.querySelector(".all");
    groupBox.checked = shownBoxes.some(box => box.checked);
    groupBox.indeterminate = groupBox.checked && !shownBoxes.every(box => box.checked);
    group.hidden = !shownBoxes.length;
  });
  drawAll();
}
byId("legend").addEventListener("change", ({target}) => {
  if (target.classList.contains("all"))
    findAll(".run:not([hidden]) input", target.closest(".experiment")).forEach(box => { box.checked = target.checked; });
  updateExperiments();
});
byId("legend").addEventListener("dblclick", event => { // show only one run; the second time, all runs
  const entry = event.target.closest(".run");
  if (!entry) return;
  event.preventDefault();
  const runBox = checkboxes[+entry.dataset.run];
  const isAlone = checkboxes.every(box => box.checked === (box === runBox));
  checkboxes.forEach(box => { box.checked = isAlone || box === runBox; });
  updateExperiments();
});
byId("filter").oninput = () => {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  runElements.forEach((elements, run) => {
    const searchText = elements.find(element => element.dataset.search !== undefined).dataset.search;
    filteredOut[run] = !words.every(word => searchText.includes(word));
    elements.forEach(element => { element.hidden = filteredOut[run]; });
  });
  findAll("#results .group").forEach(head => { head.hidden = findAll(".run", head.parentNode).every(row => row.hidden); });
  const count = filteredOut.filter(isOut => !isOut).length;
  byId("count").textContent = words.length ? `${count} of ${runs.length} runs` : "";
  updateExperiments();
};

// ---- sorting: within each experiment; cells without a number come last
function compareCells(a, b, sign) {
  const [numberA, numberB] = [a.dataset.value, b.dataset.value];
  if (numberA !== undefined && numberB !== undefined) return sign * (numberA - numberB);
  if (numberA !== undefined || numberB !== undefined) return numberA !== undefined ? -1 : 1;
  return sign * a.textContent.localeCompare(b.textContent, "en", {numeric: true});
}
findAll("thead button").forEach(button => button.onclick = () => {
  const head = button.parentNode;
  const table = head.closest("table");
  const isDescending = head.getAttribute("aria-sort") === "ascending";
  findAll("thead th", table).forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
  const compareRows = (a, b) => compareCells(a.cells[head.cellIndex], b.cells[head.cellIndex], isDescending ? -1 : 1);
  for (const body of table.tBodies) body.append(...findAll("tr:not(.group)", body).sort(compareRows));
});

let drawnWidth = 0;
new ResizeObserver(([{contentRect}]) => {
  if (!contentRect.width || contentRect.width === drawnWidth) return;
  drawnWidth = contentRect.width;
  drawAll();
}).observe(byId("charts"));
