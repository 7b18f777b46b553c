"use strict";
// Tables sort by a click on a header and show the rows that hold what is typed above them; graphs zoom.
for (const table of document.querySelectorAll("table.sorted")) {
  const body = table.tBodies[0];
  const value = (row, column) => {
    const cell = row.cells[column];
    const number = cell.dataset.value ?? cell.textContent;
    return number.trim() !== "" && !Number.isNaN(Number(number)) ? Number(number) : cell.textContent.toLowerCase();
  };
  table.querySelectorAll("th").forEach((header, column) => {
    const button = document.createElement("button");
    button.textContent = header.textContent;
    header.replaceChildren(button);
    button.addEventListener("click", () => {
      const rising = header.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const rows = [...body.rows].sort((one, other) => {
        const a = value(one, column), b = value(other, column);
        const order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
        return rising ? order : -order;
      });
      body.append(...rows);
    });
  });
  const search = document.createElement("input");
  search.type = "search";
  search.placeholder = "search these rows";
  search.setAttribute("aria-label", "search the table below");
  table.closest(".scroll").before(search);
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}
for (const graph of document.querySelectorAll(".graph")) {
  const drawing = graph.querySelector("svg");
  const natural = drawing.viewBox.baseVal.width || drawing.getBoundingClientRect().width || 800;
  let scale = 1;
  const show = (next) => {
    scale = Math.min(8, Math.max(0.05, next));
    drawing.style.width = `${natural * scale}px`;
    drawing.style.height = "auto";
  };
  const bar = document.createElement("p");
  bar.className = "zoom";
  for (const [label, action] of [["−", () => show(scale / 1.3)], ["+", () => show(scale * 1.3)], ["fit", () => show((graph.clientWidth - 20) / natural)]]) {
    const button = document.createElement("button");
    button.textContent = label;
    button.setAttribute("aria-label", { "−": "smaller", "+": "larger", fit: "fit the width" }[label]);
    button.addEventListener("click", action);
    bar.append(button, " ");
  }
  graph.before(bar);
}
