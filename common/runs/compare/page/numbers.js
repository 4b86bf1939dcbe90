"use strict";
// The data of the page, its state, and functions for numbers and scales. The page contains the scripts one after the other.
const {runs, charts, positions, reload} = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const findAll = (selector, parent = document) => [...parent.querySelectorAll(selector)];

const AXIS_TITLES = ["step", "samples", "seconds", "part of the run"];
const PART_OF_RUN = 3; // index of an axis
const view = {axis: +document.querySelector("[name=along]:checked").value, logX: false, logLoss: false, smoothing: 0.6, zoom: null, highlightedRun: -1};

const runElements = runs.map((_, run) => findAll(`[data-run="${run}"]`)); // entry in the legend, images, row of the table
const checkboxes = runElements.map(([legendEntry]) => legendEntry.querySelector("input"));
const filteredOut = runs.map(() => false);
const isVisible = run => checkboxes[run].checked && !filteredOut[run];
findAll(".chart").forEach((box, i) => { charts[i].box = box; });
for (const chart of charts) for (const curve of chart.curves) curve.positions = positions[curve.at];

// ---- numbers
const compactNumber = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});
const fullNumber = new Intl.NumberFormat("en", {maximumSignificantDigits: 6});
const countDecimals = step => Math.max(0, -Math.floor(Math.log10(step) + 1e-9));

function formatTick(value, step, isPercent) {
  if (isPercent) return (100 * value).toFixed(countDecimals(100 * step)) + "%";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(countDecimals(step / 10 ** Math.floor(Math.log10(Math.abs(value)))));
  if (Math.abs(value) >= 1e4) return compactNumber.format(value).replace("K", "k");
  return value.toFixed(Math.min(8, countDecimals(step)));
}
function formatValue(value, unit) {
  if (unit === "%") return (100 * value).toFixed(2) + " %";
  return fullNumber.format(value) + (unit && " " + unit);
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
