"use strict";
// Which jobs are drawn: the legend, and a slot (a colour and a dash) for each chosen job. A slot is
// taken when a job is chosen and freed when it is not, so that up to eight always differ in colour.
const FIRST_SHOWN = 8;
const slots = new Map();
const watchers = [];

function chosenJobs() { return [...slots.keys()].sort((one, other) => one - other); }
function slotOf(job) { return slots.has(job) ? slots.get(job) : null; }
function onChoice(watcher) { watchers.push(watcher); }

function choose(job, wanted) {
  if (!wanted) { slots.delete(job); return; }
  if (slots.has(job)) return;
  const taken = new Set(slots.values());
  let slot = 0;
  while (taken.has(slot)) slot++;
  slots.set(job, slot);
}

function drawLegend() {
  const legend = document.getElementById("legend");
  DATA.jobs.forEach((job, at) => {
    const button = html("button", { type: "button", "aria-pressed": "false" });
    button.addEventListener("click", () => { choose(at, !slots.has(at)); refresh(); });
    button.addEventListener("dblclick", () => { slots.clear(); choose(at, true); refresh(); });
    button.title = "click: show or hide; double click: only this one";
    legend.append(button);
  });
  const filter = document.getElementById("filter");
  filter.hidden = DATA.jobs.length <= 12;
  filter.addEventListener("input", () => {
    [...legend.children].forEach((button, at) => { button.hidden = !DATA.jobs[at].name.includes(filter.value.trim().toLowerCase()); });
  });
  const shown = () => DATA.jobs.map((_, at) => at).filter((at) => !legend.children[at].hidden);
  document.getElementById("all").addEventListener("click", () => { shown().forEach((at) => choose(at, true)); refresh(); });
  document.getElementById("none").addEventListener("click", () => { shown().forEach((at) => choose(at, false)); refresh(); });
  document.getElementById("pick").hidden = DATA.jobs.length < 2;
  DATA.jobs.slice(0, FIRST_SHOWN).forEach((_, at) => choose(at, true));
}

function refresh() {
  const legend = document.getElementById("legend");
  DATA.jobs.forEach((job, at) => {
    const button = legend.children[at];
    button.setAttribute("aria-pressed", String(slots.has(at)));
    button.replaceChildren(swatch(slotOf(at)), job.name);
  });
  watchers.forEach((watcher) => watcher());
}

// A small curve of the training loss in each row of the results.
function drawSparks() {
  for (const cell of document.querySelectorAll("td.spark")) {
    const { loss } = DATA.jobs[Number(cell.dataset.job)].train;
    const values = known(loss);
    if (values.length < 2) { cell.textContent = "-"; continue; }
    const low = Math.min(...values), high = Math.max(...values);
    const points = values.map((value, at) =>
      [2 + (at / (values.length - 1)) * 96, 2 + (1 - (value - low) / (high - low || 1)) * 16]);
    cell.append(svg("svg", { width: 100, height: 20, role: "img", "aria-label": `from ${lossText(values[0])} to ${lossText(values.at(-1))}` },
      svg("path", { d: line(points), fill: "none", stroke: "var(--accent)", "stroke-width": 1.3 })));
  }
}
