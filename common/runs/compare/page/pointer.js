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
  const format = value => formatValue(value, chart.unit);
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

