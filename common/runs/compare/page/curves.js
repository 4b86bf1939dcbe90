// ---- curves: smoothing, positions, and ranges of the axes
const lastSteps = runs.map(() => 0);
for (const chart of charts) for (const {run, positions: [steps]} of chart.curves) lastSteps[run] = Math.max(lastSteps[run], steps.at(-1));

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
  return curve.positions[0].map(step => step / lastSteps[curve.run]);
}
function findRangeX(curves) {
  if (view.zoom) return view.zoom;
  const extents = curves.map(curve => findExtent(view.logX ? curve.x.filter(x => x > 0) : curve.x));
  const high = view.axis === PART_OF_RUN ? 1 : Math.max(...extents.map(extent => extent[1]));
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

