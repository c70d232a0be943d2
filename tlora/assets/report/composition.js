"use strict";
// Stacked bars: the tokens of each job in each nano-batch, or in the mean of several. Chosen jobs
// have their colours; the others share one.
let compositionView = Object.keys(DATA.composition)[0];

// A bar's parts from the bottom up: chosen jobs, the others (one by one where a bar is one
// nano-batch), padding.
function parts(view, bar) {
  const found = [], alone = [], entries = view.tokens[bar];
  let others = 0, otherJobs = 0, sum = 0;
  for (let at = 0; at < entries.length; at += 2) {
    const [job, tokens] = [entries[at], entries[at + 1]];
    sum += tokens;
    if (slots.has(job)) found.push({ job, slot: slotOf(job), tokens });
    else if (view.each === 1) alone.push({ job, slot: null, tokens });
    else { others += tokens; otherJobs++; }
  }
  found.push(...alone);
  if (others) found.push({ job: null, slot: null, tokens: others, count: otherJobs });
  return { found, sum, padding: Math.max(0, view.rows[bar] - sum) };
}

function drawComposition() {
  const view = DATA.composition[compositionView];
  const frame = new Frame(document.getElementById("composition"), {
    height: 300, label: "Tokens of each job in each nano-batch, stacked, with padding on top",
  });
  const bars = view.rows.length;
  if (!bars) { frame.empty("no nano-batch has run"); return; }
  const strip = 10;
  frame.bottom += strip;
  frame.scaleX(0, bars);
  const high = Math.max(...view.rows) * 1.03;
  frame.scaleY(0, high);
  frame.axisY(ticks(0, high, 5), countText);
  const wide = frame.innerWidth / bars, gap = wide > 5 ? 1 : 0;
  const byFill = new Map();
  const add = (fill, x, y, height) => {
    if (!byFill.has(fill)) byFill.set(fill, "");
    byFill.set(fill, byFill.get(fill) + `M${x.toFixed(1)} ${y.toFixed(1)}h${(wide - gap).toFixed(2)}v${height.toFixed(1)}h${(gap - wide).toFixed(2)}z`);
  };
  for (let bar = 0; bar < bars; bar++) {
    const { found, sum, padding } = parts(view, bar);
    let below = 0;
    for (const part of found) {
      const top = frame.y(below + part.tokens), bottom = frame.y(below);
      // A hair of ground between two parts, so that neighbours are told apart without colour.
      add(colour(part.slot), frame.x(bar), top, Math.max(0.3, bottom - top - (bottom - top > 4 ? 0.8 : 0)));
      below += part.tokens;
    }
    if (padding) add("padding", frame.x(bar), frame.y(sum + padding), frame.y(sum) - frame.y(sum + padding));
  }
  for (const [fill, path] of byFill) {
    frame.root.append(svg("path", fill === "padding" ? { d: path, class: "padding" } : { d: path, fill }));
  }
  const base = frame.height - frame.bottom;
  view.eval.forEach((share, bar) => {
    if (share) frame.root.append(svg("rect", { x: frame.x(bar), y: base + 3, width: Math.max(0.5, wide - gap), height: 5, class: "evaluation", "fill-opacity": 0.15 + 0.85 * share }));
  });
  frame.bottom -= strip;
  const number = (bar) => view.begin + bar * view.each + 1;
  const positions = ticks(number(0), view.begin + view.count, frame.room).filter((value) => Number.isInteger(value) && value >= 1);
  frame.axisX(positions.map((value) => (value - view.begin - 0.5) / view.each), (at) => countText(view.begin + at * view.each + 0.5));
  frame.onHover((wanted) => describeBar(view, Math.min(bars - 1, Math.max(0, Math.floor(wanted)))));
  const who = view.each === 1 ? "A bar is one nano-batch." : `A bar is the mean of ${view.each} nano-batches.`;
  document.getElementById("composition-note").textContent =
    who + (slots.size < DATA.jobs.length ? " Grey: jobs that are not chosen above." : "");
}

function describeBar(view, bar) {
  const { found, padding } = parts(view, bar);
  const first = view.begin + bar * view.each + 1;
  const last = Math.min(view.begin + view.count, first + view.each - 1);
  const rows = found.toReversed().map((part) => [
    swatch(part.slot, { block: true }),
    part.job === null ? `${part.count} other job${part.count === 1 ? "" : "s"}` : shorten(DATA.jobs[part.job].name, 24),
    `${part.tokens.toLocaleString("en")} tokens`]);
  const more = rows.length > 12 ? [[null, `and ${rows.length - 12} more`, ""]] : [];
  const share = view.rows[bar] ? Math.round((100 * padding) / view.rows[bar]) : 0;
  return {
    at: bar + 0.5,
    title: (first === last ? `nano-batch ${first.toLocaleString("en")}` : `nano-batches ${first.toLocaleString("en")} to ${last.toLocaleString("en")}`) + `, ${timeText(view.time[bar])}`,
    rows: [[null, "padding", `${padding.toLocaleString("en")} of ${view.rows[bar].toLocaleString("en")} (${share} %)`], ...rows.slice(0, 12), ...more,
      ...(view.eval[bar] ? [[null, "evaluation", view.each === 1 ? "yes" : `${Math.round(view.eval[bar] * 100)} %`]] : [])],
  };
}

function startComposition() {
  const names = Object.keys(DATA.composition), host = document.getElementById("views");
  if (names.length > 1) {
    names.forEach((name) => {
      const button = html("button", { type: "button", "aria-pressed": String(name === compositionView) }, name);
      button.addEventListener("click", () => {
        compositionView = name;
        [...host.children].forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
        drawComposition();
      });
      host.append(button, " ");
    });
  }
  onChoice(drawComposition);
}
