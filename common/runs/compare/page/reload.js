// ---- start, and reload: a page that make compare FOLLOW=1 keeps up to date reloads itself and keeps the choices of its user
function saveChoices() {
  const {highlightedRun, ...choices} = view;
  const sorted = document.querySelector("#results [aria-sort]");
  history.replaceState({
    view: choices,
    showsAllColumns,
    filter: byId("filter").value,
    hiddenRuns: runs.filter((_, run) => !checkboxes[run].checked).map(({key}) => key),
    sort: sorted && {title: sorted.textContent, order: sorted.getAttribute("aria-sort")},
  }, "");
}
function restoreChoices({view: choices, filter, hiddenRuns, sort, ...table}) {
  Object.assign(view, choices);
  document.querySelector(`[name=along][value="${view.axis}"]`).checked = true;
  document.querySelector(`[name=x][value="${view.logX ? "log" : ""}"]`).checked = true;
  document.querySelector(`[name=y][value="${view.logLoss ? "log" : ""}"]`).checked = true;
  byId("smooth").value = view.smoothing;
  byId("smoothed").textContent = view.smoothing.toFixed(2);
  checkboxes.forEach((box, run) => { box.checked = !hiddenRuns.includes(runs[run].key); });
  const head = findAll("#results thead th").find(({textContent}) => textContent === sort?.title);
  if (head) sortTable(head, sort.order === "descending");
  showsAllColumns = table.showsAllColumns;
  byId("filter").value = filter;
  byId("filter").oninput();
}
if (history.state) restoreChoices(history.state);
history.replaceState(null, ""); // a reload by the user resets all choices

function reloadWhenIdle() { // not while the pointer drags over a chart or the page is in the background
  if (document.hidden || document.querySelector(".pick")) return void setTimeout(reloadWhenIdle, 500);
  saveChoices();
  location.reload();
}
if (reload) setTimeout(reloadWhenIdle, 1000 * reload);

let drawnWidth = 0;
new ResizeObserver(([{contentRect}]) => {
  if (!contentRect.width || contentRect.width === drawnWidth) return;
  drawnWidth = contentRect.width;
  drawAll();
  fitColumns();
}).observe(byId("charts"));
