"use strict";
startTheme();
drawFates();
drawCurves();
drawCourse();
drawParallel();
drawSaving();
for (const id of ["curve-x", "curve-y", "curve-log"]) control(id).addEventListener("input", drawCurves);
document.querySelectorAll("table.sortable").forEach(makeSortable);

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  drawCurves();
  drawCourse();
  drawParallel();
  drawSaving();
});
document.documentElement.dataset.drawn = "yes";
