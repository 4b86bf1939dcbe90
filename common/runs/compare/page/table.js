// ---- sorting: within each experiment; cells without a number come last
function compareCells(a, b, sign) {
  const [numberA, numberB] = [a.dataset.value, b.dataset.value];
  if (numberA !== undefined && numberB !== undefined) return sign * (numberA - numberB);
  if (numberA !== undefined || numberB !== undefined) return numberA !== undefined ? -1 : 1;
  return sign * a.textContent.localeCompare(b.textContent, "en", {numeric: true});
}
function sortTable(head, isDescending) {
  const table = head.closest("table");
  findAll("thead th", table).forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
  const compareRows = (a, b) => compareCells(a.cells[head.cellIndex], b.cells[head.cellIndex], isDescending ? -1 : 1);
  for (const body of table.tBodies) body.append(...findAll("tr:not(.group)", body).sort(compareRows));
}
findAll("thead th").forEach(head => {
  head.firstChild.onclick = () => sortTable(head, head.getAttribute("aria-sort") === "ascending");
});


// ---- columns that do not fit next to the others are hidden, except the last one with the files
let showsAllColumns = false;
function fitColumns() {
  const table = byId("results");
  const rows = [...table.rows].filter(row => !row.classList.contains("group"));
  const count = rows[0].cells.length;
  const hideColumn = (column, isHidden) => rows.forEach(row => { row.cells[column].hidden = isHidden; });
  for (let column = 0; column < count; column++) hideColumn(column, false);
  let visible = count - 1;
  const isTooWide = () => table.offsetWidth > table.parentNode.clientWidth;
  while (!showsAllColumns && visible > 2 && isTooWide()) hideColumn(--visible, true);
  const hidden = count - 1 - visible;
  byId("columns").hidden = !hidden && !showsAllColumns;
  byId("columns").textContent = showsAllColumns ? "show fewer columns" : `show ${hidden} more column${hidden > 1 ? "s" : ""}`;
}
byId("columns").onclick = () => { showsAllColumns = !showsAllColumns; fitColumns(); };
