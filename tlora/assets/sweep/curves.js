"use strict";
// Learning curves of trials, coloured by what became of them, and the best so far against tokens.
const control = (id) => document.getElementById(id);
const FATE_DASHES = { winner: "", completed: "", underperforming: "4 3", diverging: "7 3", overfitting: "2 3", asha: "9 3 2 3", median: "6 2 1 2", budget: "1 3", person: "8 2", failed: "2 2", live: "" };
const hiddenFates = new Set();

function fateColour(fate) { return `var(--${fate})`; }

function fateSwatch(fate) {
  return svg("svg", { width: 18, height: 12, viewBox: "0 0 18 12", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 18, y1: 6, y2: 6, stroke: fateColour(fate), "stroke-width": 3, "stroke-dasharray": FATE_DASHES[fate] ?? "" }));
}

function drawFates() {
  const host = control("fates");
  host.replaceChildren(...DATA.fates.map(({ name, words, count }) => {
    const button = html("button", { type: "button", "aria-pressed": String(!hiddenFates.has(name)), title: words },
      fateSwatch(name), `${name} (${count})`);
    button.addEventListener("click", () => {
      if (!hiddenFates.delete(name)) hiddenFates.add(name);
      drawFates(); drawCurves(); drawParallel();
    });
    return button;
  }));
}

function shownTrials() {
  // The best last, so that they lie on top.
  const order = (trial) => DATA.fates.findIndex(({ name }) => name === trial.fate);
  return DATA.trials.filter((trial) => !hiddenFates.has(trial.fate)).sort((one, other) => order(other) - order(one));
}

function plain(value) { return String(Number(value.toPrecision(4))); }

function drawCurves() {
  const axis = control("curve-x").value, loss = control("curve-y").value;
  const curves = shownTrials().map((trial) => ({
    trial, y: trial[loss],
    x: axis === "share" ? trial.step.map((step) => step / trial.total_steps) : trial[axis],
  })).filter((curve) => known(curve.y).length);
  const frame = new Frame(control("curves"), { height: 380, right: 110, label: `${loss} of ${curves.length} trials` });
  const ys = known(curves.flatMap((curve) => curve.y));
  if (!ys.length) { frame.empty("nothing was evaluated"); return; }
  const logarithmic = control("curve-log").checked && ys.every((value) => value > 0);
  const sorted = [...ys].sort((a, b) => a - b), low = sorted[0];
  // A trial that runs away would leave no room for the others: it is cut off at the top.
  const high = Math.min(sorted.at(-1), sorted[Math.floor(sorted.length * 0.95)] * 1.5);
  const room = (high - low || Math.abs(high) || 1) * 0.04;
  const bottom = logarithmic ? low * 0.95 : low >= 0 && low < (high - low) * 0.3 ? 0 : low - room;
  const last = curves.reduce((found, curve) => Math.max(found, curve.x.at(-1)), axis === "share" ? 1 : 0);
  frame.scaleX(0, last || 1);
  frame.scaleY(bottom, high + room, logarithmic);
  frame.axisY(logarithmic ? logTicks(bottom, high + room) : ticks(bottom, high + room, 6), plain);
  frame.axisX(ticks(0, last, frame.room).filter((at) => axis === "share" || Number.isInteger(at)),
    axis === "share" ? (at) => `${Math.round(at * 100)}%` : countText);
  const clip = svg("clipPath", { id: "inside" }, svg("rect", { x: frame.left, y: 0, width: frame.innerWidth + 8, height: frame.height - frame.bottom }));
  const lines = svg("g", { "clip-path": "url(#inside)" });
  frame.root.append(clip, lines);
  for (const { trial, x, y } of curves) {
    const points = x.map((at, place) => [frame.x(at), y[place] === null ? NaN : frame.y(y[place])]);
    lines.append(svg("path", {
      d: line(points), stroke: fateColour(trial.fate), "stroke-dasharray": FATE_DASHES[trial.fate] ?? "",
      class: `curve ${trial.fate}`,
    }));
    const end = points.findLast(([, at]) => Number.isFinite(at));
    if (end && trial.fate !== "completed" && trial.fate !== "live") {
      lines.append(svg("circle", { cx: end[0], cy: end[1], r: trial.fate === "winner" ? 4.5 : 2.6, stroke: fateColour(trial.fate), class: "end" }));
    }
    if (trial.fate === "winner" && end) {
      frame.root.append(svg("text", { x: frame.width - frame.right + 8, y: end[1] + 4, class: "name", style: `fill:${fateColour("winner")}` }, trial.name));
    }
  }
  frame.onHover((wanted) => describeCurves(curves, wanted, axis));
}

function describeCurves(curves, wanted, axis) {
  const reached = curves.filter((curve) => curve.x.at(-1) >= wanted);
  if (!reached.length) return null;
  const rows = reached.map((curve) => ({ curve, at: nearest(curve.x, wanted) }))
    .filter(({ curve, at }) => curve.y[at] !== null)
    .sort((one, other) => one.curve.y[one.at] - other.curve.y[other.at]);
  const more = rows.length > 12 ? [[null, `and ${rows.length - 12} more`, ""]] : [];
  const title = { share: `${Math.round(wanted * 100)}% of the steps`, step: `step ${Math.round(wanted)}`, tokens: `${countText(wanted)} tokens` }[axis];
  return { at: wanted, title, rows: [...rows.slice(0, 12).map(({ curve, at }) => [fateSwatch(curve.trial.fate), curve.trial.name, lossText(curve.y[at])]), ...more] };
}

function drawCourse() {
  const { tokens, value, trial, full } = DATA.course;
  const frame = new Frame(control("course"), { height: 260, right: 24, label: `Best ${DATA.metric} so far against trained tokens` });
  if (!tokens.length) { frame.empty("nothing was evaluated"); return; }
  const low = Math.min(...value), high = Math.max(...value), room = (high - low || Math.abs(high) || 1) * 0.06;
  frame.scaleX(0, Math.max(full, tokens.at(-1)));
  frame.scaleY(low - room, high + room);
  frame.axisY(ticks(low - room, high + room, 5), plain);
  frame.axisX(ticks(0, Math.max(full, tokens.at(-1)), frame.room), countText);
  let path = "";
  tokens.forEach((at, place) => {
    const x = frame.x(at).toFixed(1), y = frame.y(value[place]).toFixed(1);
    path += place ? `H${x}V${y}` : `M${x} ${y}`;
  });
  frame.root.append(svg("path", { d: path, class: "course" }),
    svg("line", { x1: frame.x(full), x2: frame.x(full), y1: frame.top, y2: frame.height - frame.bottom, class: "full" }),
    svg("circle", { cx: frame.x(tokens.at(-1)), cy: frame.y(value.at(-1)), r: 4, class: "end", stroke: "var(--c2)" }));
  frame.onHover((wanted) => {
    let at = tokens.findLastIndex((each) => each <= wanted);
    if (at < 0) at = 0;
    return { at: tokens[at], title: `${countText(tokens[at])} tokens`, rows: [[null, `best, ${trial[at]}`, lossText(value[at])]] };
  });
}
