"use strict";
// Numbers, elements and the theme: what every part of the report uses. Text from the run enters the
// page as text nodes only.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = document.querySelector("svg").namespaceURI;
const COLOURS = 8;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function known(values) {
  return values.filter((value) => value !== null && Number.isFinite(value));
}

function lossText(value) {
  if (value === null || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1000 || (size < 0.001 && size > 0)) return value.toExponential(1);
  return value.toFixed(size < 10 ? 3 : size < 100 ? 2 : 1);
}

function countText(value) {
  const size = Math.abs(value);
  if (size >= 999.95e6) return trim(value / 1e9) + "G";
  if (size >= 999.95e3) return trim(value / 1e6) + "M";
  if (size >= 1e4) return trim(value / 1e3) + "k";
  return Math.round(value).toLocaleString("en");
}

function trim(value) {
  return value.toFixed(1).replace(/\.0$/, "");
}

function timeText(seconds) {
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 3600) return Math.floor(whole / 60) + ":" + two(whole % 60);
  if (whole < 36 * 3600) {
    return Math.floor(whole / 3600) + ":" + two(Math.floor((whole % 3600) / 60)) + ":" + two(whole % 60);
  }
  return Math.floor(whole / 86400) + "d " + Math.floor((whole % 86400) / 3600) + "h";
}

// Round positions between two values, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-6; at++) found.push(at * step + 0);
  return found;
}

// Times on whole seconds, minutes or hours.
function timeTicks(low, high, count) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const step = steps.find((each) => (high - low) / each <= count) ?? Math.ceil((high - low) / count / 86400) * 86400;
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of [1, 2, 5]) {
      const value = factor * Math.pow(10, power);
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found.length > 1 ? found : ticks(low, high, 4);
}

// Index of the value nearest to `wanted` in a rising list.
function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle; else high = middle;
  }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

function startTheme() {
  const asked = new URLSearchParams(location.search).get("theme");
  let kept = null;
  try { kept = localStorage.getItem("tlora-theme"); } catch { /* not allowed for files in some browsers */ }
  const theme = asked ?? kept;
  if (theme === "dark" || theme === "light") setTheme(theme);
  document.getElementById("theme").addEventListener("click", () => {
    const chosen = document.documentElement.dataset.theme;
    const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    setTheme(dark ? "light" : "dark");
    try { localStorage.setItem("tlora-theme", dark ? "light" : "dark"); } catch { /* as above */ }
  });
}
