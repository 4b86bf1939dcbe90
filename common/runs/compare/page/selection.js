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
  findAll("#images .run").forEach(box => { box.hidden = !isVisible(+box.dataset.run); });
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

