"use strict";
startTheme();
drawLegend();
startLoss();
startComposition();
refresh();
drawThroughput();
drawSparks();
document.querySelectorAll("table.sortable").forEach(makeSortable);

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  drawLoss();
  drawThroughput();
  drawComposition();
});
document.documentElement.dataset.drawn = "yes";
