"use strict";
// Tokens per second of the whole group over its running time, and how many jobs there were.
function drawThroughput() {
  const { time, useful, rows, jobs, each, of } = DATA.throughput;
  const frame = new Frame(document.getElementById("throughput"), {
    height: 250, label: "Tokens per second over time, and the number of running jobs",
  });
  if (!time.length) { frame.empty("no nano-batch has run"); return; }
  const strip = 34, last = time.at(-1);
  const high = Math.max(...rows) * 1.06 || 1;
  frame.bottom += strip;
  frame.scaleX(0, last);
  frame.scaleY(0, high);
  frame.axisY(ticks(0, high, 5), countText);
  const base = frame.y(0);
  const steps = (values, place) => {
    let path = `M${frame.x(0).toFixed(1)} ${place(values[0]).toFixed(1)}`;
    values.forEach((value, at) => { path += `V${place(value).toFixed(1)}H${frame.x(time[at]).toFixed(1)}`; });
    return path;
  };
  frame.root.append(
    svg("path", { d: `${steps(useful, frame.y)}V${base}H${frame.x(0)}Z`, class: "area" }),
    svg("path", { d: steps(rows, frame.y), class: "rows" }),
    svg("path", { d: steps(useful, frame.y), class: "useful" }));

  const most = Math.max(1, ...jobs), floor = base + strip - 6;
  const height = (count) => floor - (count / most) * (strip - 14);
  frame.root.append(svg("path", { d: `${steps(jobs, height)}V${floor}H${frame.x(0)}Z`, class: "running" }),
    svg("text", { x: frame.left - 8, y: floor - 4, "text-anchor": "end" }, most === 1 ? "1 job" : `${most} jobs`));
  for (const at of DATA.resumed) {
    frame.root.append(svg("line", { x1: frame.x(at), x2: frame.x(at), y1: frame.top, y2: floor, class: "resumed" }),
      // On the other side of a line that the plot ends with.
      frame.x(at) > frame.width - frame.right - 60
        ? svg("text", { x: frame.x(at) - 4, y: frame.top + 10, "text-anchor": "end" }, "resumed")
        : svg("text", { x: frame.x(at) + 4, y: frame.top + 10 }, "resumed"));
  }
  frame.bottom -= strip;
  frame.axisX(timeTicks(0, last, frame.room), timeText);
  frame.onHover((wanted) => {
    let at = time.findIndex((end) => end >= wanted);
    if (at < 0) at = time.length - 1;
    const rowsHere = [[null, "useful", `${countText(useful[at])} tokens/s`], [null, "with padding", `${countText(rows[at])} rows/s`],
      [null, "jobs running", String(jobs[at])], [null, "mean of", `${each} ${of}${each === 1 ? "" : of === "turn" ? "s" : "es"}`]];
    return { at: time[at], title: timeText(time[at]), rows: rowsHere };
  });
}
