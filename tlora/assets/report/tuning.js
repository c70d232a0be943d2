"use strict";
// The size of nano-batches over time, with a sign where something was decided, and how fast they
// were. Only there if the size was tuned.
const SIGNS = {
  double: "▲", "step up": "△", halve: "▼", "step down": "▽", probe: "?", back: "↩", settle: "■",
  again: "⇄", hold: "=", restart: "↻", limit: "✕",
};

function drawTuning() {
  const host = document.getElementById("tuning");
  if (!host || !DATA.tuning) return;
  const { time, budget, rate, marks, left_out: leftOut } = DATA.tuning;
  const frame = new Frame(host, {
    height: 300, label: "Tokens a nano-batch may take over time, decisions, and tokens per second",
  });
  if (!time.length) { frame.empty("no nano-batch has run"); return; }
  const strip = 96, last = time.at(-1), bottom = frame.bottom;
  const sizes = [...budget, ...marks.map((mark) => mark.budget)];
  frame.top = 24;
  frame.bottom += strip;
  frame.scaleX(0, last);
  frame.scaleY(Math.min(...sizes) / 1.3, Math.max(...sizes) * 1.3, true);
  const powers = [];
  for (let size = 1; size <= Math.max(...sizes) * 1.3; size *= 2) if (size >= Math.min(...sizes) / 1.3) powers.push(size);
  frame.axisY(powers, (value) => value.toLocaleString("en"));
  const steps = (values, place) => {
    let path = "", from = 0, pen = "M";
    values.forEach((value, at) => {
      if (value === null) pen = "M";
      else {
        const y = place(value).toFixed(1);
        path += pen === "M" ? `M${frame.x(from).toFixed(1)} ${y}H${frame.x(time[at]).toFixed(1)}` : `V${y}H${frame.x(time[at]).toFixed(1)}`;
        pen = "V";
      }
      from = time[at];
    });
    return path;
  };
  frame.root.append(svg("path", { d: steps(budget, frame.y), class: "budget" }),
    svg("text", { x: frame.left, y: 12, class: "caption" }, "tokens per nano-batch"));
  let room = -Infinity, before = budget[0];
  for (const mark of marks) {
    // Beyond the corner that the line takes. Signs that would lie on each other are in the tip.
    const x = frame.x(Math.min(mark.time, last)), down = mark.budget < before;
    before = mark.budget;
    if (x < room) continue;
    room = x + 9;
    frame.root.append(svg("text", {
      x, y: frame.y(mark.budget) + (down ? 14 : -6), "text-anchor": "middle", class: "mark",
    }, SIGNS[mark.action] ?? "·"));
  }

  const floor = frame.height - bottom - 4, ceiling = floor - strip + 34;
  frame.root.append(svg("text", { x: frame.left, y: ceiling - 7, class: "caption" }, "tokens/s"));
  if (known(rate).length) {
    const high = Math.max(...known(rate), 1) * 1.05;
    const height = (value) => floor - (value / high) * (floor - ceiling);
    for (const at of ticks(0, high, 2)) {
      frame.root.append(svg("line", { x1: frame.left, x2: frame.width - frame.right, y1: height(at), y2: height(at), class: "grid" }),
        svg("text", { x: frame.left - 8, y: height(at) + 4, "text-anchor": "end" }, countText(at)));
    }
    frame.root.append(svg("path", { d: steps(rate, height), class: "useful" }));
  } else {
    frame.root.append(svg("text", { x: frame.left, y: (floor + ceiling) / 2, class: "caption" },
      "not measured: no nano-batch was full"));
  }
  for (const at of DATA.resumed) {
    frame.root.append(svg("line", { x1: frame.x(at), x2: frame.x(at), y1: frame.top, y2: floor, class: "resumed" }));
  }
  frame.bottom = bottom;
  frame.axisX(timeTicks(0, last, frame.room), timeText);
  frame.onHover((wanted) => describeTuning(wanted, frame));
  const used = [...new Set(marks.map((mark) => mark.action))].filter((action) => SIGNS[action]);
  document.getElementById("tuning-note").textContent = "Signs: " + used.map((action) => `${SIGNS[action]} ${action}`).join(", ") + "."
    + (leftOut ? ` ${leftOut} earlier decisions are in events.jsonl.` : "");
}

function describeTuning(wanted, frame) {
  const { time, budget, rate, marks } = DATA.tuning;
  let at = time.findIndex((end) => end >= wanted);
  if (at < 0) at = time.length - 1;
  const reach = Math.abs(frame.unx(6) - frame.unx(0));
  const near = marks.filter((mark) => Math.abs(mark.time - wanted) <= reach).slice(0, 4);
  return {
    at: near.length ? near[0].time : Math.min(wanted, time.at(-1)),
    title: timeText(wanted),
    rows: [[null, "size", `${budget[at].toLocaleString("en")} tokens`],
      ...(rate[at] === null ? [] : [[null, "speed", `${countText(rate[at])} tokens/s`]]),
      ...near.map((mark) => [null, `${SIGNS[mark.action] ?? ""} ${mark.action} to ${mark.budget.toLocaleString("en")}`, mark.why])],
  };
}
