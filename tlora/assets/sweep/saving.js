"use strict";
// What early exit saved in tokens, and, where rates were measured, what it and fusing saved in time.
function drawSaving() {
  const { spent, full, by_fate: byFate, others, times } = DATA.saving;
  const rows = [["every trial to its end", [["rest", full]], countText(full)],
    ["with early exit", byFate, countText(spent)]];
  const height = 40 + rows.length * 44 + (times ? 40 + 3 * 44 : 0);
  const host = document.getElementById("saving");
  const frame = new Frame(host, { height, right: 120, label: "Tokens and time, with and without early exit and fusing" });
  frame.left = 200;
  let y = 24;
  y = bars(frame, y, "trained tokens", full, rows);
  const note = document.getElementById("saving-note");
  if (!times) {
    note.textContent = "Colours: what became of the trials that the tokens went to. What fusing saved was not measured: tlora tune --measure-fusion does.";
    return;
  }
  bars(frame, y + 12, "training time at the measured rates", times.alone_full, [
    ["one at a time, to the end", [["rest", times.alone_full]], timeText(times.alone_full)],
    ["one at a time, early exit", [["completed", times.alone]], timeText(times.alone)],
    ["together, early exit", [["winner", times.together]], timeText(times.together)]]);
  const percent = (part) => `${Math.round(100 * part)}%`;
  note.textContent = `${others ? "Trials that were given up, failed or were stopped" : "Early exit"} saved ${percent(1 - times.alone / times.alone_full)} of the time, fusing ${percent(1 - times.together / times.alone)} of what was left, `
    + `both ${percent(1 - times.together / times.alone_full)}. Rates without evaluation, measured on some of the trials after the sweep.`;
}

function bars(frame, y, title, most, rows) {
  frame.root.append(svg("text", { x: frame.left, y: y - 6, class: "caption" }, title));
  const width = (value) => Math.max(1, (value / (most || 1)) * frame.innerWidth);
  for (const [name, parts, total] of rows) {
    let x = frame.left;
    for (const [fate, value] of parts) {
      const bar = svg("rect", { x, y, width: width(value), height: 26, fill: fate === "rest" ? "var(--other)" : fateColour(fate) });
      bar.append(svg("title", {}, fate === "rest" ? total : `${fate}: ${countText(value)}`));
      frame.root.append(bar);
      x += width(value);
    }
    frame.root.append(svg("text", { x: frame.left - 10, y: y + 18, "text-anchor": "end" }, name),
      svg("text", { x: x + 8, y: y + 18, class: "share" }, total));
    y += 44;
  }
  return y + 28;
}
