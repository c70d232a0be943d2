"use strict";
// Curves of every policy, and who held which GPU under one of them.
const CLASSES = [[1, "1 job"], [2, "2 jobs"], [4, "3-4 jobs"], [8, "5-8 jobs"], [Infinity, "9 jobs or more"]];
let shown = DATA.policies[0];

// Lines that lie on each other can still be told apart.
const STROKES = ["", "9 4", "2 3", "10 3 2 3", "5 3", "14 4", "6 2 2 2 2 2", "3 6"];

function spanText(seconds) {
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= length * 0.9995) return `${trim(seconds / length)} ${unit}`;
  }
  return seconds >= 1 || seconds === 0 ? `${trim(seconds)} s` : `${seconds.toPrecision(1)} s`;
}

function percentText(value) { return `${Math.round(value * 100)} %`; }

function drawLegend() {
  for (const [place, item] of [...document.querySelectorAll("#policies li")].entries()) item.prepend(mark(DATA.slots[place]));
}

function mark(slot) {
  return svg("svg", { width: 34, height: 12, "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 34, y1: 6, y2: 6, stroke: colour(slot), "stroke-width": slot ? 2.5 : 3.5, "stroke-dasharray": STROKES[slot % STROKES.length] }));
}

// A policy looks the same whatever it is compared with.
function withSlots() {
  return DATA.policies.map((policy, place) => [DATA.slots[place], policy]);
}

// The first policy is drawn last, above the others.
function inDrawingOrder() {
  return withSlots().reverse();
}

function curve(slot, points) {
  return svg("path", { d: line(points), class: slot ? "curve" : "curve first", stroke: colour(slot), "stroke-dasharray": STROKES[slot % STROKES.length] });
}

function axisTitle(frame, text) {
  frame.root.append(svg("text", { x: frame.left + frame.innerWidth / 2, y: frame.height - 4, "text-anchor": "middle", class: "title" }, text));
}

// Round durations between two of them, on a logarithmic axis.
function durationTicks(low, high, count) {
  const nice = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 18000, 43200, 86400, 172800, 432000, 864000, 2592000, 8640000];
  const inside = nice.filter((each) => each >= low && each <= high);
  const every = Math.max(1, Math.ceil(inside.length / count));
  return inside.filter((_, at) => at % every === 0);
}

function drawJct() {
  const frame = new Frame(document.getElementById("jct"), { height: 320, label: "Part of the jobs that is done within a time, one line per policy" });
  frame.bottom = 44;
  const all = DATA.policies.flatMap((policy) => DATA.jct[policy]);
  if (!all.length) { frame.empty("no job was done"); return; }
  const low = Math.min(...all), high = Math.max(...all) * 1.02;
  frame.scaleX(Math.log10(low), Math.log10(high));
  frame.scaleY(0, 1);
  frame.axisY([0, 0.25, 0.5, 0.75, 1], percentText);
  frame.axisX(durationTicks(low, high, frame.room).map(Math.log10), (at) => spanText(Math.pow(10, at)));
  axisTitle(frame, "time from arrival to end");
  for (const [slot, policy] of inDrawingOrder()) {
    const times = DATA.jct[policy];
    frame.root.append(curve(slot, times.map((time, at) => [frame.x(Math.log10(time)), frame.y(at / (times.length - 1))])));
  }
  frame.onHover((wanted) => {
    const limit = Math.pow(10, wanted);
    const rows = withSlots().map(([slot, policy]) => {
      const times = DATA.jct[policy], inside = times.filter((time) => time <= limit).length;
      return [mark(slot), policy, times.length ? percentText(Math.max(0, inside - 1) / (times.length - 1)) : "-"];
    });
    return { at: wanted, title: `within ${spanText(limit)}`, rows };
  });
}

function drawOverTime(name, { text, whole, last }) {
  const frame = new Frame(document.getElementById(name), { height: last ? 190 : 160, label: `${name} over time, one line per policy` });
  frame.bottom = last ? 44 : 26;
  const times = DATA.times, end = times.at(-1);
  const most = Math.max(whole ? 1 : 0, ...DATA.policies.map((policy) => Math.max(...DATA.over_time[policy][name])));
  const high = most * 1.05 || 1;
  frame.scaleX(0, end);
  frame.scaleY(0, high);
  frame.axisY(ticks(0, high, 4).filter((at) => text !== countText || Number.isInteger(at)), text);
  frame.axisX(timeTicks(0, end, frame.room), spanText);
  if (whole) frame.root.append(svg("line", { x1: frame.left, x2: frame.width - frame.right, y1: frame.y(1), y2: frame.y(1), class: "full" }));
  if (last) axisTitle(frame, "time since the first arrival");
  for (const [slot, policy] of inDrawingOrder()) {
    const values = DATA.over_time[policy][name];
    frame.root.append(curve(slot, values.map((value, at) => [frame.x((times[at - 1] ?? 0) / 2 + times[at] / 2), frame.y(value)])));
  }
  frame.onHover((wanted) => {
    let at = times.findIndex((each) => each >= wanted);
    if (at < 0) at = times.length - 1;
    return { at: wanted, title: spanText(wanted), rows: withSlots().map(([slot, policy]) => [mark(slot), policy, text(DATA.over_time[policy][name][at])]) };
  });
}

function jobsClass(jobs) { return 1 + CLASSES.findIndex(([most]) => jobs <= most); }

function drawGantt() {
  const [from, to, end] = DATA.window, bars = DATA.gantt[shown];
  const row = Math.max(3, Math.min(16, 420 / DATA.gpus));
  const frame = new Frame(document.getElementById("gantt"), { height: Math.round(row * DATA.gpus) + 54, label: `Groups on GPUs over time under ${shown}` });
  frame.bottom = 44;
  frame.scaleX(from, to);
  frame.y = (gpu) => frame.top + gpu * row;
  for (let node = 0, first = 0; first < DATA.gpus; node++, first += DATA.per_node) {
    const size = Math.min(DATA.per_node, DATA.gpus - first);
    if (node % 2 === 0) frame.root.append(svg("rect", { x: frame.left, y: frame.y(first), width: frame.innerWidth, height: size * row, class: "band" }));
    if (size * row >= 12) frame.root.append(svg("text", { x: frame.left - 8, y: frame.y(first) + (size * row) / 2 + 4, "text-anchor": "end" }, `node ${node}`));
  }
  const gap = row > 6 ? 1 : 0.4;
  for (const [gpu, count, start, stop, group, base, jobs, gpus] of bars) {
    const x = frame.x(start), wide = Math.max(0.6, frame.x(stop) - x - 0.4);
    const bar = svg("rect", { x, y: frame.y(gpu) + gap / 2, width: wide, height: count * row - gap, fill: `var(--g${jobsClass(jobs)})` });
    bar.said = { title: `${group} on ${base}`, rows: [[null, "jobs", String(jobs)], [null, "GPUs", String(gpus)], [null, "from", spanText(start)], [null, "for", spanText(stop - start)]] };
    frame.root.append(bar);
  }
  for (const [gpu, start, stop] of DATA.down[shown]) {
    const bar = svg("rect", { x: frame.x(start), y: frame.y(gpu), width: Math.max(1, frame.x(stop) - frame.x(start)), height: row, class: "down" });
    bar.said = { title: `GPU ${gpu} is down`, rows: [[null, "from", spanText(start)], [null, "for", spanText(stop - start)]] };
    frame.root.append(bar);
  }
  frame.axisX(timeTicks(from, to, frame.room), spanText);
  axisTitle(frame, "time since the first arrival");
  frame.root.addEventListener("pointermove", (event) => {
    const said = event.target.said;
    if (said) showTip(event, said.title, said.rows); else hideTip();
  });
  frame.root.addEventListener("pointerleave", hideTip);
  document.getElementById("gantt-note").textContent = to - from < end * 0.999
    ? `Shown: ${spanText(from)} to ${spanText(to)} of ${spanText(end)}, around the time with most jobs.` : "";
}

function startGantt() {
  const choice = document.getElementById("shown");
  for (const policy of DATA.policies) {
    const button = html("button", { type: "button", "aria-pressed": String(policy === shown) }, policy);
    button.addEventListener("click", () => {
      shown = policy;
      for (const each of choice.children) each.setAttribute("aria-pressed", String(each === button));
      drawGantt();
    });
    choice.append(button);
  }
  const legend = document.getElementById("classes");
  for (const [place, [, name]] of CLASSES.entries()) {
    legend.append(html("li", {}, svg("svg", { width: 18, height: 12, "aria-hidden": "true" },
      svg("rect", { width: 18, height: 12, rx: 2, fill: `var(--g${place + 1})` })), name));
  }
}

function drawAll() {
  drawJct();
  drawOverTime("busy", { text: percentText, whole: true });
  drawOverTime("effective", { text: percentText, whole: true });
  drawOverTime("waiting", { text: countText, last: true });
  drawGantt();
}

startTheme();
drawLegend();
startGantt();
drawAll();
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  drawAll();
});
document.documentElement.dataset.drawn = "yes";
