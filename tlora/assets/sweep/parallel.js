"use strict";
// Parallel coordinates: an axis for each setting that differs, the last one for what came of it.
function axisPlace(axis, top, bottom) {
  const share = (value) => {
    if (axis.kind === "words") return axis.words.length < 2 ? 0.5 : axis.words.indexOf(words(value)) / (axis.words.length - 1);
    const place = axis.kind === "log" ? Math.log : (each) => each;
    return axis.high === axis.low ? 0.5 : (place(value) - place(axis.low)) / (place(axis.high) - place(axis.low));
  };
  return (value) => bottom - share(value) * (bottom - top);
}

function words(value) { return Array.isArray(value) ? value.join(", ") : String(value); }

function axisTicks(axis, used) {
  if (axis.kind === "words") return axis.words;
  const values = [...new Set(used)].sort((a, b) => a - b);
  if (values.length <= 8) return values;
  return axis.kind === "log" ? logTicks(axis.low, axis.high) : ticks(axis.low, axis.high, 6);
}

function valueAxis(trials) {
  const values = known(trials.map((trial) => trial.value)).sort((a, b) => a - b);
  // What ran away lies at the bottom, on the edge.
  const high = Math.min(values.at(-1), values[Math.floor(values.length * 0.95)] * 1.5), low = values[0];
  const least = DATA.mode === "min";
  return { low: least ? high : values[0], high: least ? low : values.at(-1), clip: (value) => least ? Math.min(value, high) : value };
}

function drawParallel() {
  const trials = shownTrials().filter((trial) => trial.value !== null);
  const frame = new Frame(document.getElementById("parallel"), { height: 380, right: 90, label: "Settings of every trial and what came of them" });
  if (!trials.length) { frame.empty("no trial has a value"); return; }
  frame.left = 90;
  const top = 50, bottom = frame.height - 30, axes = DATA.axes, count = axes.length;
  const x = (at) => frame.left + (at / Math.max(1, count)) * frame.innerWidth;
  const places = axes.map((axis) => axisPlace(axis, top, bottom));
  const last = valueAxis(trials), lastPlace = axisPlace({ kind: "linear", ...last }, top, bottom);
  const group = svg("g");
  frame.root.append(group);
  // Lines through the same values lie beside each other, not on one another.
  const spread = (at) => trials.length < 2 ? 0 : (at / (trials.length - 1) - 0.5) * 14;
  trials.forEach((trial, number) => {
    const points = axes.map((axis, at) => {
      const value = trial.params[axis.name];
      // A field that took no part in this trial is passed by below the axis.
      return [x(at), (value === undefined ? bottom + 14 : places[at](value)) + spread(number)];
    });
    points.push([x(count), lastPlace(last.clip(trial.value))]);
    const path = svg("path", { d: line(points), stroke: fateColour(trial.fate), "stroke-dasharray": FATE_DASHES[trial.fate] ?? "", class: `curve ${trial.fate}` });
    const wide = svg("path", { d: line(points), stroke: "transparent", "stroke-width": 9, fill: "none" });
    wide.addEventListener("pointermove", (event) => {
      for (const each of group.querySelectorAll(".curve")) each.classList.toggle("faint", each !== path);
      showTip(event, `${trial.name}: ${trial.fate}`, [
        ...axes.filter((axis) => trial.params[axis.name] !== undefined).map((axis) => [null, axis.name, words(trial.params[axis.name])]),
        [null, DATA.metric, lossText(trial.value)]]);
    });
    wide.addEventListener("pointerleave", () => {
      for (const each of group.querySelectorAll(".curve")) each.classList.remove("faint");
      hideTip();
    });
    group.append(path, wide);
  });
  const drawAxis = (at, name, positions, place, text) => {
    const last = at === count;
    frame.root.append(svg("line", { x1: x(at), x2: x(at), y1: top, y2: bottom, class: "axis" }),
      svg("text", { x: x(at), y: 20, "text-anchor": "middle", class: "axis-name" }, name));
    for (const value of positions) {
      frame.root.append(svg("line", { x1: x(at) - 4, x2: x(at) + 4, y1: place(value), y2: place(value), class: "axis" }),
        svg("text", { x: x(at) + (last ? 9 : -8), y: place(value) + 4, "text-anchor": last ? "start" : "end", class: "tick" }, text(value)));
    }
  };
  axes.forEach((axis, at) => drawAxis(at, axis.name.split(".").at(-1),
    axisTicks(axis, trials.map((trial) => trial.params[axis.name]).filter((value) => value !== undefined)), places[at],
    (value) => axis.kind === "words" ? words(value) : plain(value)));
  const [low, high] = [Math.min(last.low, last.high), Math.max(last.low, last.high)];
  drawAxis(count, DATA.metric, high > low ? ticks(low, high, 6) : [low], lastPlace, plain);
}
