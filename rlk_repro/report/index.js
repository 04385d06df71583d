// Sorts and filters the tables of the page over several bundles. Without scripts, the page shows the same rows.
const UNITS = { "µs": 1e-6, ms: 1e-3, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 };
const tables = [...document.querySelectorAll("main table")];

function read(cell) {
  const text = cell.textContent.trim().replace("−", "-").replaceAll(",", "");
  const found = text.match(/^([+-]?[\d.]+)\s*([^\s\d]*)/);
  return found && !/^\d{4}-\d\d-/.test(text) ? Number(found[1]) * (UNITS[found[2]] ?? 1) : text;
}

function sort(table, column, heading) {
  const way = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const rows = [...table.tBodies[0].rows].map((row) => [read(row.cells[column]), row]);
  const order = ([a], [b]) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);
  rows.sort((a, b) => way * order(a, b));
  table.tBodies[0].append(...rows.map(([, row]) => row));
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
}

function filter(words) {
  for (const table of tables) {
    const section = table.closest("section");
    const title = section.querySelector("h2").textContent;
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const text = `${title} ${row.textContent}`.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    section.hidden = !shown;
  }
}

for (const table of tables) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sort(table, column, heading));
    heading.append(button);
  });
}
const box = document.createElement("input");
box.type = "search";
box.placeholder = "show only rows with … (faster, tp2, torch.compile)";
box.setAttribute("aria-label", "Filter the rows of all tables");
box.addEventListener("input", () => filter(box.value.toLowerCase().split(/\s+/).filter(Boolean)));
const note = document.createElement("p");
note.className = "note";
note.append("A click on a column's name sorts its table.");
document.querySelector("section.first").append(box, note);
