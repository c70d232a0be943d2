"use strict";
// Loss curves of the chosen jobs: each step thin, smoothed thick, held-out as rings.
const control = (id) => document.getElementById(id);

// The mean over a window around each value, which narrows towards both ends, so that nothing lags;
// strength 0 to 100.
function smooth(values, strength) {
  const most = Math.round((values.length * strength) / 100 / 8);
  const sums = [0], counts = [0];
  values.forEach((value, at) => {
    sums.push(sums[at] + (value ?? 0));
    counts.push(counts[at] + (value === null ? 0 : 1));
  });
  return values.map((value, at) => {
    const reach = Math.min(most, at, values.length - 1 - at), from = at - reach, to = at + reach + 1;
    return value === null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

function lossCurves() {
  const axis = control("loss-x").value;
  const strength = Number(control("smoothing").value);
  return chosenJobs().map((at) => {
    const job = DATA.jobs[at];
    return {
      name: job.name, slot: slotOf(at), each: job.train.each,
      x: job.train[axis], raw: job.train.loss, smoothed: smooth(job.train.loss, strength),
      evalX: job.eval[axis], evaluated: job.eval.loss,
    };
  });
}

function drawLoss() {
  const curves = lossCurves();
  const host = control("loss"), named = curves.length <= 10 && host.clientWidth > 600;
  const frame = new Frame(host, {
    height: 380, right: named ? 130 : 16,
    label: `Loss curves of ${curves.map((curve) => curve.name).join(", ")}`,
  });
  const raw = control("show-raw").checked, smoothed = control("show-smooth").checked;
  const evaluated = control("show-eval").checked, axis = control("loss-x").value;
  const xs = curves.flatMap((curve) => [...curve.x, ...(evaluated ? curve.evalX : [])]);
  const ys = known(curves.flatMap((curve) => [
    ...(raw ? curve.raw : []), ...(smoothed ? curve.smoothed : []), ...(evaluated ? curve.evaluated : [])]));
  if (!ys.length) { frame.empty(curves.length ? "nothing was logged" : "choose a job above"); return; }

  const logarithmic = control("log-scale").checked && ys.every((value) => value > 0);
  const high = ys.reduce((a, b) => Math.max(a, b)), low = ys.reduce((a, b) => Math.min(a, b));
  const room = (high - low || Math.abs(high) || 1) * 0.04;
  const bottom = logarithmic ? low * 0.95 : low >= 0 && low < (high - low) * 0.3 ? 0 : low - room;
  const last = xs.reduce((a, b) => Math.max(a, b), 0);
  frame.scaleX(0, last || 1);
  frame.scaleY(bottom, high + room, logarithmic);
  frame.axisY(logarithmic ? logTicks(bottom, high + room) : ticks(bottom, high + room, 6), (value) => logarithmic ? String(Number(value.toPrecision(2))) : trimmed(value));
  frame.axisX(axis === "time" ? timeTicks(0, last, frame.room) : ticks(0, last, frame.room).filter(Number.isInteger), axis === "time" ? timeText : countText);
  curves.forEach((curve) => drawCurve(frame, curve, { raw, smoothed, evaluated }));
  if (named) drawNames(frame, curves);
  frame.onHover((at) => describeLoss(curves, at, axis, evaluated));
  const most = curves.reduce((found, curve) => Math.max(found, curve.each), 1);
  control("loss-note").textContent = most > 1 ? `A point is the mean of up to ${most} logged steps.` : "";
}

function trimmed(value) { return String(Number(value.toPrecision(6))); }

function drawCurve(frame, curve, show) {
  const stroke = colour(curve.slot), style = { fill: "none", stroke, "stroke-linejoin": "round" };
  const points = (xs, ys) => xs.map((x, at) => [frame.x(x), ys[at] === null ? NaN : frame.y(ys[at])]);
  if (show.raw) frame.root.append(svg("path", { ...style, d: line(points(curve.x, curve.raw)), "stroke-width": 1, "stroke-opacity": show.smoothed ? 0.28 : 0.9, class: "curve" }));
  if (show.smoothed) frame.root.append(svg("path", { ...style, d: line(points(curve.x, curve.smoothed)), "stroke-width": 2, "stroke-dasharray": dash(curve.slot), class: "curve" }));
  if (!show.evaluated) return;
  const rings = points(curve.evalX, curve.evaluated).filter(([, y]) => Number.isFinite(y));
  frame.root.append(svg("path", { ...style, d: line(rings), "stroke-width": 1.2, "stroke-dasharray": "1 4", "stroke-linecap": "round" }));
  if (rings.length * slots.size <= 600) rings.forEach(([x, y]) => frame.root.append(svg("circle", { cx: x, cy: y, r: 3.2, fill: "var(--card)", stroke, "stroke-width": 1.6 })));
}

// Names at the right, pushed apart where they would overlap, tied to the ends of their lines.
function drawNames(frame, curves) {
  const ends = curves.map((curve) => {
    const at = curve.smoothed.findLastIndex((value) => value !== null);
    const evaluatedAt = curve.evaluated.findLastIndex((value) => value !== null);
    if (at >= 0) return { curve, x: frame.x(curve.x[at]), y: frame.y(curve.smoothed[at]) };
    return evaluatedAt < 0 ? null : { curve, x: frame.x(curve.evalX[evaluatedAt]), y: frame.y(curve.evaluated[evaluatedAt]) };
  }).filter(Boolean).sort((one, other) => one.y - other.y);
  const gap = 15;
  ends.forEach((end, at) => { end.at = Math.max(end.y, at ? ends[at - 1].at + gap : frame.top + 4); });
  for (let at = ends.length - 1, floor = frame.height - frame.bottom; at >= 0; at--, floor = ends[at + 1].at - gap) ends[at].at = Math.min(ends[at].at, floor);
  for (const { curve, x, y, at } of ends) {
    const edge = frame.width - frame.right;
    frame.root.append(
      svg("path", { d: `M${x + 4} ${y}H${Math.max(x + 4, edge - 16)}L${edge + 6} ${at}`, stroke: colour(curve.slot), class: "leader" }),
      svg("text", { x: edge + 10, y: at + 4, class: "name", style: `fill:${colour(curve.slot)}` }, shorten(curve.name, 16)));
  }
}

function shorten(text, most) { return text.length > most ? text.slice(0, most - 1) + "…" : text; }

function describeLoss(curves, wanted, axis, evaluated) {
  const reached = curves.filter((curve) => curve.x.length);
  if (!reached.length) return null;
  const close = reached.map((curve) => ({ curve, at: nearest(curve.x, wanted) }));
  const best = close.reduce((one, other) =>
    Math.abs(other.curve.x[other.at] - wanted) < Math.abs(one.curve.x[one.at] - wanted) ? other : one);
  const at = best.curve.x[best.at];
  const rows = close.filter(({ curve }) => curve.x.at(-1) >= at * 0.999).map(({ curve }) => {
    const value = lossText(curve.raw[nearest(curve.x, at)]);
    const held = evaluated ? curve.evalX.findLastIndex((x) => x <= at) : -1;
    return [swatch(curve.slot), shorten(curve.name, 24), value, held < 0 ? "" : `held-out ${lossText(curve.evaluated[held])}`];
  });
  const more = rows.length > 12 ? [[null, `and ${rows.length - 12} more`, ""]] : [];
  const title = { step: `step ${at.toLocaleString("en")}`, tokens: `${at.toLocaleString("en")} tokens`, time: timeText(at) }[axis];
  return { at, title, rows: [...rows.slice(0, 12), ...more] };
}

function startLoss() {
  for (const id of ["show-raw", "show-smooth", "smoothing", "show-eval", "log-scale", "loss-x"]) control(id).addEventListener("input", drawLoss);
  onChoice(drawLoss);
}
