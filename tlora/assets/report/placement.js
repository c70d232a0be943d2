"use strict";
// Device by device, a bar for every stay of a job. Chosen jobs have their colours.
const LANE = 15, BETWEEN_DEVICES = 10;

function drawPlacement() {
  const devices = DATA.placement, host = document.getElementById("placement");
  if (!devices || !host) return;
  const lanes = devices.reduce((sum, each) => sum + each.lanes, 0);
  const frame = new Frame(host, {
    height: 40 + lanes * LANE + (devices.length - 1) * BETWEEN_DEVICES,
    label: "Which job trained on which device over time",
  });
  const last = Math.max(1e-6, ...devices.flatMap((each) => each.stays.map((stay) => stay[3])));
  frame.scaleX(0, last);
  let top = frame.top;
  for (const { name: place, lanes, stays } of devices) {
    frame.root.append(svg("text", { x: frame.left - 8, y: top + (lanes * LANE) / 2 + 4, "text-anchor": "end" }, place));
    for (const [job, lane, began, ended] of stays) {
      const x = frame.x(began), wide = Math.max(1, frame.x(ended) - x - 1), y = top + lane * LANE;
      const bar = svg("rect", { x, y, width: wide, height: LANE - 2, rx: 2, fill: colour(slotOf(job)) });
      bar.append(svg("title", {}, `${DATA.jobs[job].name} on ${place}, ${timeText(began)} to ${timeText(ended)}`));
      frame.root.append(bar);
      const name = shorten(DATA.jobs[job].name, Math.floor(wide / 7));
      if (wide > 24) frame.root.append(svg("text", { x: x + 4, y: y + LANE - 5, class: "on-bar" }, name));
    }
    top += lanes * LANE + BETWEEN_DEVICES;
  }
  frame.axisX(timeTicks(0, last, frame.room), timeText);
  document.getElementById("placement-note").textContent =
    slots.size < DATA.jobs.length ? "Grey: jobs that are not chosen above." : "";
}

function startPlacement() { onChoice(drawPlacement); drawPlacement(); }
