"use strict";
// Draws the charts of the compare page as SVG, and sorts and filters its table. Text of runs only ever becomes textContent.
const {runs, charts} = JSON.parse(document.getElementById("data").textContent);
const byId = name => document.getElementById(name), all = (what, of = document) => [...of.querySelectorAll(what)];
const view = {along: 0, logX: false, logY: false, smooth: 0.6, zoom: null, hot: -1};
const AXES = ["step", "samples", "seconds", "part of the run"], FEW = 6, POINTS = 30;
const elements = runs.map((_, i) => all(`[data-run="${i}"]`)); // of a run: its entry in the legend, its row
const boxes = runs.map((_, i) => elements[i][0].querySelector("input")), left_out = runs.map(() => false);
all(".chart").forEach((box, i) => { charts[i].box = box; });
const isShown = run => boxes[run].checked && !left_out[run];

// ---- numbers
const short = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});
const long = new Intl.NumberFormat("en", {maximumSignificantDigits: 6});
function formatTick(value, step, percent) {
  if (percent) return (100 * value).toFixed(Math.max(0, -Math.floor(Math.log10(100 * step) + 1e-9))) + "%";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(0);
  if (Math.abs(value) >= 1e4) return short.format(value).replace("K", "k");
  return value.toFixed(Math.min(8, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))));
}
const formatValue = (value, percent) => percent ? (100 * value).toFixed(2) + " %" : long.format(value);

// ---- curves
function smoothCurve(curve) { // exponential mean, freed of its start; its memory is in steps, so that thinning changes nothing
  const at = curve.positions[0], usual = (at.at(-1) - at[0]) / (at.length - 1) || 1;
  let sum = 0, weight = 0;
  return curve.y.map((value, i) => {
    const keep = view.smooth ** (i ? (at[i] - at[i - 1]) / usual : 1);
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return weight ? sum / weight : value;
  });
}
function placeAlong(curve) {
  const [steps] = curve.positions;
  return view.along < 3 ? curve.positions[view.along] : steps.map(step => step / steps.at(-1));
}
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}
function makeScale(low, high, from, to, log) {
  const f = log ? Math.log10 : v => v, a = f(low), b = f(high);
  const scale = value => from + (f(value) - a) / (b - a) * (to - from);
  scale.invert = pixel => { const v = a + (pixel - from) / (to - from) * (b - a); return log ? 10 ** v : v; };
  return scale;
}
function makeTicks(low, high, count, log) { // [value, size of a step there]
  if (log && high / low > 5) {
    const found = [], parts = Math.log10(high / low) > count / 2 ? [1] : [1, 2, 5], skip = Math.ceil(Math.log10(high / low) / count);
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += skip)
      for (const part of parts) { const v = part * 10 ** power; if (v >= low && v <= high) found.push([v, 10 ** power]); }
    return found;
  }
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(m => m * power >= raw * 0.999) * power, found = [];
  for (let i = Math.ceil(low / step - 1e-6); i * step <= high + 1e-6 * step; i++) found.push([i * step, step]);
  return found;
}
function findRangeX(curves) {
  if (view.zoom) return view.zoom;
  const log = view.logX, ends = curves.map(c => extent(log ? c.x.filter(v => v > 0) : c.x));
  const high = Math.max(...ends.map(e => e[1])), low = log ? Math.min(...ends.map(e => e[0])) : 0;
  return low < high ? [low, high] : log ? [low / 2, high * 2] : [0, high || 1];
}
function findRangeY(curves, [left, right], percent, log, few) { // of what is drawn
  let low = Infinity, high = -Infinity;
  for (const c of curves) (few ? c.y : c.line).forEach((value, i) => {
    if (value === null || c.x[i] < left || c.x[i] > right || (log && value <= 0)) return;
    low = Math.min(low, value); high = Math.max(high, value);
  });
  if (low > high) return null;
  if (log) return low < high ? [low / 1.1, high * 1.1] : [low / 2, high * 2];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1, floor = low >= 0 ? 0 : -Infinity;
  return [Math.max(floor, low - margin), Math.min(percent ? 1 : Infinity, high + margin)];
}

// ---- drawing
function tracePath(xs, ys, sx, sy, log, begin = "M") {
  let path = "", pen = begin;
  for (let i = 0; i < ys.length; i++) {
    const x = xs[i], y = ys[i];
    if (y === null || (view.logX && x <= 0) || (log && y <= 0)) { pen = "M"; continue; }
    path += pen + sx(x).toFixed(1) + " " + sy(y).toFixed(1);
    pen = "L";
  }
  return path;
}
function traceBand(c, sx, sy, log) { // one closed area; a gap is bridged
  const kept = c.y.map((v, i) => i).filter(i => c.y[i] !== null && !(view.logX && c.x[i] <= 0) && !(log && c.low[i] <= 0));
  if (!kept.length) return "";
  const of = (indices, values, begin) => tracePath(indices.map(i => c.x[i]), indices.map(i => values[i]), sx, sy, log, begin);
  return of(kept, c.high) + of(kept.toReversed ? kept.toReversed() : [...kept].reverse(), c.low, "L") + "Z";
}
function drawCurve(c, chart, few) {
  const {sx, sy, log} = chart, {colour, dash} = runs[c.run], parts = [];
  if (c.low && (few || view.hot === c.run)) parts.push(`<path class="band" d="${traceBand(c, sx, sy, log)}"/>`);
  if (c.line !== c.y && few) parts.push(`<path class="raw" d="${tracePath(c.x, c.y, sx, sy, log)}"/>`);
  parts.push(`<path class="line" stroke-dasharray="${dash}" d="${tracePath(c.x, c.line, sx, sy, log)}"/>`);
  if (c.y.length <= POINTS && !chart.may_smooth || c.y.length === 1) c.y.forEach((y, i) => {
    if (y === null || (view.logX && c.x[i] <= 0) || (log && y <= 0)) return;
    parts.push(`<circle class="dot" cx="${sx(c.x[i]).toFixed(1)}" cy="${sy(y).toFixed(1)}" r="2.6"/>`);
  });
  return `<g class="own${view.hot === c.run ? " hot" : ""}" data-own="${c.run}" style="--c:${colour}">${parts.join("")}</g>`;
}
function draw(chart) {
  const width = chart.box.clientWidth, height = Math.round(Math.min(330, Math.max(200, width * 0.58)));
  const percent = chart.kind === "percent", log = chart.may_log && view.logY;
  const shown = chart.curves.filter(c => isShown(c.run)), few = shown.length <= FEW;
  const curves = shown.map(c => ({...c, x: placeAlong(c), line: chart.may_smooth && view.smooth ? smoothCurve(c) : c.y}));
  const range = curves.length ? findRangeX(curves) : null, rangeY = range && findRangeY(curves, range, percent, log, few);
  chart.drawn = rangeY ? curves : [];
  if (!rangeY) { chart.box.innerHTML = `<svg height="${height}"><text x="8" y="20">no point here</text></svg>`; return; }
  const ticksY = makeTicks(...rangeY, Math.max(4, height / 38), log).map(([v, step]) => [v, formatTick(v, step, percent)]);
  const left = 10 + 6.6 * Math.max(...ticksY.map(t => t[1].length)), right = width - 16, top = 8, bottom = height - 38;
  const sx = makeScale(...range, left, right, view.logX), sy = makeScale(...rangeY, bottom, top, log);
  const ticksX = makeTicks(...range, Math.max(2, (right - left) / 75), view.logX);
  const grid = ticksY.map(([v, text]) => `<path class="grid" d="M${left} ${sy(v).toFixed(1)}H${right}"/>`
      + `<text x="${left - 5}" y="${(sy(v) + 4).toFixed(1)}" text-anchor="end">${text}</text>`);
  let free = -Infinity; // pixels from which on the next number fits
  for (const [v, step] of ticksX) {
    const text = formatTick(v, step, view.along === 3), half = 3.8 * text.length, x = Math.min(sx(v), width - half);
    grid.push(`<path class="grid" d="M${sx(v).toFixed(1)} ${top}V${bottom}"/>`);
    if (x - half < free) continue;
    grid.push(`<text x="${x.toFixed(1)}" y="${bottom + 18}" text-anchor="middle">${text}</text>`);
    free = x + half + 6;
  }
  Object.assign(chart, {sx, sy, log, left, right, top, bottom});
  const clip = `clip${charts.indexOf(chart)}`, lines = curves.map(c => drawCurve(c, chart, few));
  chart.box.innerHTML = `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">`
    + `<clipPath id="${clip}"><rect x="${left}" y="${top - 3}" width="${right - left + 3}" height="${bottom - top + 6}"/></clipPath>${grid.join("")}`
    + `<path class="frame" d="M${left} ${top}V${bottom}H${right}"/><g clip-path="url(#${clip})">${lines.join("")}</g>`
    + `<text x="${(left + right) / 2}" y="${height - 4}" text-anchor="middle">${AXES[view.along]}</text></svg>`;
}
const drawAll = () => { hideTip(); charts.forEach(draw); byId("whole").hidden = !view.zoom; };

// ---- the run at the pointer
const tip = byId("tip");
function hideTip() { tip.hidden = true; setHot(-1); }
function setHot(run) {
  if (run === view.hot) return;
  all(".hot").forEach(element => element.classList.remove("hot"));
  all(".extra").forEach(element => element.remove());
  view.hot = run;
  byId("charts").classList.toggle("dim", run >= 0);
  if (run < 0) return;
  elements[run].forEach(element => element.classList.add("hot"));
  for (const chart of charts) {
    const own = chart.box.querySelector(`[data-own="${run}"]`), curve = (chart.drawn || []).find(c => c.run === run);
    if (!own || !curve) continue;
    own.classList.add("hot");
    own.parentNode.append(own); // above the others
    if (!curve.low || own.querySelector(".band")) continue;
    const band = document.createElementNS("http://www.w3.org/2000/svg", "path");
    band.setAttribute("class", "band extra");
    band.setAttribute("d", traceBand(curve, chart.sx, chart.sy, chart.log));
    own.prepend(band);
  }
}
function findNearest(chart, x, y) {
  let best = null, least = Infinity;
  for (const c of chart.drawn || []) {
    const at = chart.sx.invert(x);
    let low = 0, high = c.x.length - 1;
    while (low < high) { const middle = (low + high) >> 1; if (c.x[middle] < at) low = middle + 1; else high = middle; }
    for (const i of [low - 1, low]) {
      if (i < 0 || c.y[i] === null) continue;
      const far = Math.hypot(chart.sx(c.x[i]) - x, chart.sy(c.y[i]) - y);
      if (far < least) { least = far; best = {curve: c, i}; }
    }
  }
  return best;
}
function showTip(chart, event) {
  const box = chart.box.getBoundingClientRect(), found = findNearest(chart, event.clientX - box.left, event.clientY - box.top);
  if (!found) return hideTip();
  const {curve: c, i} = found, percent = chart.kind === "percent", value = v => formatValue(v, percent);
  setHot(c.run);
  const spread = c.low && c.low[i] !== c.high[i] ? `\n${value(c.low[i])} to ${value(c.high[i])}` : "";
  const [step, samples, seconds] = c.positions.map(values => long.format(values[i]));
  tip.textContent = `${runs[c.run].name}\n${chart.title} ${value(c.y[i])}${spread}\nstep ${step}, ${samples} samples, ${seconds} s`;
  tip.hidden = false;
  const {width, height} = tip.getBoundingClientRect(), beyond = event.clientX + 14 + width > innerWidth;
  tip.style.left = Math.max(4, beyond ? event.clientX - 14 - width : event.clientX + 14) + "px";
  tip.style.top = Math.max(4, Math.min(innerHeight - height - 4, event.clientY + 12)) + "px";
}
document.addEventListener("pointerover", event => {
  if (event.target.closest(".chart")) return;
  const run = event.target.closest("[data-run]");
  tip.hidden = true;
  setHot(run ? +run.dataset.run : -1);
});

// ---- a part of the range: drag over a chart
charts.forEach(chart => {
  let from = null, pick = null;
  const at = event => Math.min(chart.right, Math.max(chart.left, event.clientX - chart.box.getBoundingClientRect().left));
  chart.box.addEventListener("pointerdown", event => {
    if (!chart.drawn?.length) return;
    from = at(event);
    chart.box.setPointerCapture(event.pointerId);
  });
  chart.box.addEventListener("pointermove", event => {
    if (from === null) return showTip(chart, event);
    tip.hidden = true;
    const to = at(event), svg = chart.box.querySelector("svg");
    pick ??= svg.appendChild(document.createElementNS(svg.namespaceURI, "rect"));
    const box = {class: "pick", x: Math.min(from, to), y: chart.top, width: Math.abs(to - from), height: chart.bottom - chart.top};
    for (const name in box) pick.setAttribute(name, box[name]);
  });
  const end = event => {
    const ends = from === null ? [0, 0] : [from, at(event)].sort((a, b) => a - b);
    from = null; pick?.remove(); pick = null;
    if (event.type === "pointerup" && ends[1] - ends[0] > 5) { view.zoom = ends.map(chart.sx.invert); drawAll(); }
  };
  ["pointerup", "pointercancel"].forEach(name => chart.box.addEventListener(name, end));
  chart.box.addEventListener("pointerleave", hideTip);
  chart.box.addEventListener("dblclick", () => { view.zoom = null; drawAll(); });
});
byId("whole").onclick = () => { view.zoom = null; drawAll(); };

// ---- controls
all("#controls input[type=radio]").forEach(input => input.onchange = () => {
  if (input.name === "y") view.logY = input.value === "log";
  else view.zoom = null;
  if (input.name === "x") view.logX = input.value === "log";
  if (input.name === "along") view.along = +input.value;
  drawAll();
});
byId("smooth").oninput = () => {
  view.smooth = +byId("smooth").value;
  byId("smoothed").textContent = view.smooth.toFixed(2);
  drawAll();
};

// ---- which runs are shown
function updateKinds() {
  all(".kind").forEach(kind => {
    const own = all(".run input", kind).filter(box => !box.closest(".run").hidden), head = kind.querySelector(".all");
    head.checked = own.some(box => box.checked);
    head.indeterminate = head.checked && !own.every(box => box.checked);
    kind.hidden = !own.length;
  });
  drawAll();
}
byId("legend").addEventListener("change", event => {
  if (event.target.classList.contains("all"))
    all(".run:not([hidden]) input", event.target.closest(".kind")).forEach(box => { box.checked = event.target.checked; });
  updateKinds();
});
byId("legend").addEventListener("dblclick", event => { // a run alone; once more: all
  const run = event.target.closest(".run");
  if (!run) return;
  event.preventDefault();
  const own = boxes[+run.dataset.run], alone = boxes.every(box => box.checked === (box === own));
  boxes.forEach(box => { box.checked = alone || box === own; });
  updateKinds();
});
byId("filter").oninput = () => {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  runs.forEach((_, i) => {
    const told = elements[i].find(element => element.dataset.words !== undefined).dataset.words;
    left_out[i] = !words.every(word => told.includes(word));
    elements[i].forEach(element => { element.hidden = left_out[i]; });
  });
  all("#results .group").forEach(head => { head.hidden = !all(".run", head.parentNode).some(row => !row.hidden); });
  const kept = left_out.filter(out => !out).length;
  byId("count").textContent = words.length ? `${kept} of ${runs.length} runs` : "";
  updateKinds();
};

// ---- sorting: within each experiment, what has no number last
all("thead button").forEach(button => button.onclick = () => {
  const head = button.parentNode, table = head.closest("table"), column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  all("thead th", table).forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const compare = (a, b) => {
    const [x, y] = [a, b].map(row => row.cells[column]), [p, q] = [x, y].map(cell => cell.dataset.value);
    if (p !== undefined && q !== undefined) return (down ? -1 : 1) * (p - q);
    if (p !== undefined || q !== undefined) return p !== undefined ? -1 : 1;
    return (down ? -1 : 1) * x.textContent.localeCompare(y.textContent, "en", {numeric: true});
  };
  for (const body of table.tBodies) body.append(...all("tr:not(.group)", body).sort(compare));
});

let drawnWidth = 0;
new ResizeObserver(([{contentRect}]) => {
  if (contentRect.width && contentRect.width !== drawnWidth) { drawnWidth = contentRect.width; drawAll(); }
}).observe(byId("charts"));
