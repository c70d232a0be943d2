"use strict";
// A click on a column's head sorts by it, another one the other way round.
function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = html("button", { type: "button" }, ...head.childNodes);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((one, other) => compare(sortKey(one.cells[column]), sortKey(other.cells[column]), up));
      table.tBodies[0].append(...rows);
    });
  });
}

function sortKey(cell) { return cell.dataset.key ?? cell.textContent.trim(); }

// Numbers by size, words by alphabet; what is missing stays at the end.
function compare(one, other, up) {
  if (one === "" || other === "") return (one === "") - (other === "");
  const order = one !== "" && other !== "" && !isNaN(one) && !isNaN(other)
    ? Number(one) - Number(other) : one.localeCompare(other);
  return up ? order : -order;
}
