"use strict";
// A frame with axes, and a tip that follows the pointer. Charts are drawn as wide as they are
// shown, so that text keeps its size.
class Frame {
  constructor(host, { height, right = 16, label }) {
    this.host = host;
    this.width = Math.max(320, host.clientWidth || 1100);
    this.height = height;
    this.left = 60;
    this.right = right;
    this.top = 10;
    this.bottom = 26;
    this.root = svg("svg", {
      viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": label,
    });
    host.replaceChildren(this.root);
  }

  get innerWidth() { return this.width - this.left - this.right; }
  // So many labels have room on the x axis.
  get room() { return Math.max(2, Math.min(9, Math.floor(this.innerWidth / 80))); }
  get innerHeight() { return this.height - this.top - this.bottom; }

  scaleX(low, high) {
    this.x = (value) => this.left + ((value - low) / (high - low || 1)) * this.innerWidth;
    this.unx = (pixel) => low + ((pixel - this.left) / this.innerWidth) * (high - low);
  }

  scaleY(low, high, logarithmic = false) {
    const place = logarithmic ? Math.log10 : (value) => value;
    const [from, to] = [place(low), place(high)];
    this.y = (value) => this.top + (1 - (place(value) - from) / (to - from || 1)) * this.innerHeight;
  }

  axisX(positions, text) {
    const base = this.height - this.bottom;
    for (const at of positions) {
      const x = this.x(at);
      this.root.append(svg("line", { x1: x, x2: x, y1: base, y2: base + 4, class: "axis" }),
        svg("text", { x, y: base + 17, "text-anchor": "middle" }, text(at)));
    }
    this.root.append(svg("line", { x1: this.left, x2: this.width - this.right, y1: base, y2: base, class: "axis" }));
  }

  axisY(positions, text) {
    for (const at of positions) {
      const y = this.y(at);
      this.root.append(svg("line", { x1: this.left, x2: this.width - this.right, y1: y, y2: y, class: "grid" }),
        svg("text", { x: this.left - 8, y: y + 4, "text-anchor": "end" }, text(at)));
    }
  }

  empty(message) {
    this.root.append(svg("text", {
      x: this.width / 2, y: this.height / 2, "text-anchor": "middle", class: "empty",
    }, message));
  }

  // `describe` takes a position on the x axis; it returns where the guide goes and what to say.
  onHover(describe) {
    const guide = svg("line", { y1: this.top, y2: this.height - this.bottom, class: "guide", visibility: "hidden" });
    this.root.append(guide);
    this.root.addEventListener("pointermove", (event) => {
      const box = this.root.getBoundingClientRect();
      const pixel = ((event.clientX - box.left) / box.width) * this.width;
      const inside = pixel >= this.left - 4 && pixel <= this.width - this.right + 4;
      const said = inside ? describe(this.unx(pixel)) : null;
      if (!said) { guide.setAttribute("visibility", "hidden"); hideTip(); return; }
      guide.setAttribute("x1", this.x(said.at));
      guide.setAttribute("x2", this.x(said.at));
      guide.setAttribute("visibility", "visible");
      showTip(event, said.title, said.rows);
    });
    this.root.addEventListener("pointerleave", () => { guide.setAttribute("visibility", "hidden"); hideTip(); });
  }
}

function line(points) {
  let path = "", pen = "M";
  for (const [x, y] of points) {
    if (!Number.isFinite(y)) { pen = "M"; continue; }
    path += pen + x.toFixed(1) + " " + y.toFixed(1);
    pen = "L";
  }
  return path;
}

function swatch(slot, { width = 18, block = false } = {}) {
  const mark = block
    ? svg("rect", { x: 2, y: 1, width: width - 4, height: 10, rx: 2, fill: colour(slot) })
    : svg("line", { x1: 0, x2: width, y1: 6, y2: 6, stroke: colour(slot), "stroke-width": 3, "stroke-dasharray": dash(slot) });
  return svg("svg", { width, height: 12, viewBox: `0 0 ${width} 12`, "aria-hidden": "true" }, mark);
}

function colour(slot) { return slot === null ? "var(--other)" : `var(--c${slot % COLOURS})`; }
function dash(slot) { return slot === null ? "" : DASHES[Math.floor(slot / COLOURS) % DASHES.length]; }

const tip = document.getElementById("tip");

// Rows are [swatch or null, name, value, ...].
function showTip(event, title, rows) {
  const table = html("table");
  for (const [mark, name, ...values] of rows) {
    table.append(html("tr", {}, html("td", {}, ...(mark ? [mark] : []), name), ...values.map((value) => html("td", {}, value))));
  }
  tip.replaceChildren(html("b", {}, title), table);
  tip.hidden = false;
  const left = event.pageX + 16 + tip.offsetWidth > document.documentElement.clientWidth
    ? event.pageX - 16 - tip.offsetWidth : event.pageX + 16;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = event.pageY - Math.min(event.clientY - 4, tip.offsetHeight / 2) + "px";
}

function hideTip() { tip.hidden = true; }
