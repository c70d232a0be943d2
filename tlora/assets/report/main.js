"use strict";
startTheme();
drawLegend();
startLoss();
startComposition();
refresh();
drawThroughput();
drawTuning();
startPlacement();
drawSparks();
document.querySelectorAll("table.sortable").forEach(makeSortable);

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  drawLoss();
  drawThroughput();
  drawTuning();
  drawPlacement();
  drawComposition();
});
document.documentElement.dataset.drawn = "yes";
