"use strict";
// What a wide chart measures: letters are as large on a phone as on a desk.
const WIDE = Math.max(300, Math.min(560, document.documentElement.clientWidth - 64));
// The run that is drawn: an HtmlReport. A live page begins without one.
let data = JSON.parse(document.getElementById("data").textContent);
// How all curves are drawn.
const view = { smooth: true, log: false, axis: "step" };
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// Text is always set as text: what a model wrote is never taken for markup.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) key === "style" ? (node.style.cssText = value) : node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function svg(tag, attributes = {}, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}
function lasted(seconds) {
  const whole = Math.round(seconds), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60, s = whole % 60;
  return h ? `${h}h ${m}m` : m ? `${m}m ${s}s` : `${seconds < 10 ? seconds.toFixed(1) : s}s`;
}

function count(value) {
  if (!Number.isFinite(value)) return "–";
  const [unit, suffix] = value >= 999_500_000 ? [1e9, "G"] : value >= 999_500 ? [1e6, "M"] : value >= 10_000 ? [1e3, "k"] : [1, ""];
  return `${unit === 1 ? Math.round(value) : Number((value / unit).toPrecision(3))}${suffix}`;
}

// The place of a step on the chosen axis, between the times that the run wrote down; NaN if it wrote none.
function placed(report, step) {
  if (view.axis === "step") return step;
  const { steps, [view.axis]: values } = report.axes;
  if (!steps.length) return NaN;
  let low = 0, high = steps.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
  const share = steps[high] === steps[low] ? 0 : (step - steps[low]) / (steps[high] - steps[low]);
  return values[low] + Math.max(0, Math.min(1, share)) * (values[high] - values[low]);
}
// Points of a series: [x, mean, low, high, value, step].
const points_of = (report, points) => points.map(([step, ...rest]) => { const point = [placed(report, step), ...rest]; point[5] = step; return point; }).filter(([x]) => Number.isFinite(x));
// What numbers of the axis are divided by, and their unit.
function unit_of(range) {
  if (view.axis !== "seconds") return [1, ""];
  return range > 7200 ? [3600, " h"] : range > 120 ? [60, " min"] : [1, " s"];
}

function ticks(low, high, about) {
  const rough = (high - low) / about || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.7);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

function log_ticks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) for (const n of [1, 2, 5]) found.push([n, n * 10 ** power]);
  const within = found.filter(([, at]) => at >= low && at <= high), decades = within.filter(([n]) => n === 1);
  if (within.length < 3) return ticks(low, high, 5).filter((at) => at > 0);
  const kept = within.length > 8 ? decades.filter((_, at) => at % Math.ceil(decades.length / 6) === 0) : within;
  return kept.map(([, at]) => at);
}

// Series: {name, points: [[x, mean, low, high, value, step]], dots}. The band is where most values around a point lie.
function chart(title, series, { help = "", height = 210, wide = Math.min(400, WIDE), from_zero = false } = {}) {
  series = series.filter((one) => one && one.points.length);
  if (!view.smooth) series = series.map((one) => ({ ...one, points: one.points.map((p) => [p[0], p[4] ?? p[1], , , , p[5]]) }));
  const box = el("div", { class: "card chart" }, el("h3", { title: help }, title));
  if (!series.length) { box.append(el("p", { class: "say" }, "no data")); return box; }
  const W = wide, H = height, L = 52, R = 10, T = 10, B = 26;
  const values = series.flatMap((one) => one.points.flatMap((p) => [p[1], p[2] ?? p[1], p[3] ?? p[1]])), xs = series.flatMap((one) => one.points.map((p) => p[0]));
  let low = Math.min(...values, from_zero ? 0 : Infinity), high = Math.max(...values);
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const log = view.log && values.every((value) => value > 0), scale = log ? Math.log10 : (y) => y;
  if (log) { low = Math.min(...values) / 1.1; high *= 1.1; } else { low = from_zero && low >= 0 ? 0 : low - room; high += room; }
  if (view.log && !log) box.append(el("p", { class: "hint" }, "The axis is linear: some values are 0 or less."));
  const left = Math.min(...xs), right = Math.max(...xs) === left ? left + 1 : Math.max(...xs);
  const X = (x) => L + ((x - left) / (right - left)) * (W - L - R), Y = (y) => H - B - ((scale(y) - scale(low)) / (scale(high) - scale(low))) * (H - T - B);
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  for (const at of log ? log_ticks(low, high) : ticks(low, high, 5)) {
    root.append(svg("line", { x1: L, x2: W - R, y1: Y(at), y2: Y(at), stroke: "var(--grid)" }), svg("text", { x: L - 6, y: Y(at) + 4, "text-anchor": "end" }, short(at)));
  }
  const [unit, suffix] = unit_of(right - left);
  for (const at of ticks(left / unit, right / unit, W < 340 ? 3 : 5)) {
    if (view.axis === "step" && !Number.isInteger(at)) continue;
    const x = X(at * unit);
    root.append(svg("text", { x: Math.min(x, W - 16), y: H - 8, "text-anchor": "middle" }, (view.axis === "tokens" ? count(at) : short(at)) + suffix));
  }
  series.forEach((one, n) => {
    const colour = `var(--c${n % 5})`, path = (points) => points.map((p, i) => `${i ? "L" : "M"}${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
    if (one.points.some((p) => p[3] !== undefined)) {
      const up = one.points.map((p) => [p[0], p[3]]), down = one.points.map((p) => [p[0], p[2]]).reverse();
      root.append(svg("path", { d: path(up) + path(down).replace("M", "L") + "Z", fill: colour, "fill-opacity": 0.16 }));
    }
    root.append(svg("path", { d: path(one.points), fill: "none", stroke: colour, "stroke-width": 2, "stroke-linejoin": "round" }));
    if (one.dots || one.points.length === 1) one.points.forEach((p) => root.append(svg("circle", { cx: X(p[0]), cy: Y(p[1]), r: 3.2, fill: colour })));
  });
  const cross = svg("line", { y1: T, y2: H - B, stroke: "var(--soft)", "stroke-dasharray": "3 3", visibility: "hidden" });
  root.append(cross);
  const hint = el("div", { class: "hint" }, "\u00a0");
  const look = (event) => {
    const place = root.getBoundingClientRect(), x = left + (((event.clientX - place.left) / place.width) * W - L) / (W - L - R) * (right - left);
    const near = series.map((one) => one.points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)));
    cross.setAttribute("x1", X(near[0][0])); cross.setAttribute("x2", X(near[0][0])); cross.setAttribute("visibility", "visible");
    const along = { step: "", seconds: ` (${lasted(near[0][0])})`, tokens: ` (${count(near[0][0])} tokens)` }[view.axis];
    hint.textContent = `step ${near[0][5] ?? near[0][0]}${along}: ` + near.map((p, n) => (series.length > 1 ? `${series[n].name} ` : "") + short(p[1])).join(" · ");
  };
  root.addEventListener("pointermove", look); root.addEventListener("pointerdown", look);
  root.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hint.textContent = "\u00a0"; });
  if (series.length > 1) box.append(legend(series.map((one, n) => [one.name, `var(--c${n % 5})`])));
  box.append(root, hint);
  return box;
}

function legend(names) {
  return el("div", { class: "legend" }, ...names.map(([name, colour]) => el("span", {}, el("i", { style: `background:${colour}` }), name)));
}

// Bars: [[label, counts…]], a colour each.
function histogram(title, bars, names = [""], { height = 210, wide = Math.min(400, WIDE) } = {}) {
  const box = el("div", { class: "card chart" }, el("h3", {}, title));
  const totals = names.map((_, n) => bars.reduce((sum, bar) => sum + bar[n + 1], 0) || 1);
  if (!bars.length) { box.append(el("p", { class: "say" }, "no data")); return box; }
  if (names.length > 1) box.append(legend(names.map((name, n) => [name, `var(--c${n})`])));
  const W = wide, H = height, L = 42, B = 26, T = 8, most = Math.max(...bars.flatMap((bar) => bar.slice(1).map((count, n) => count / totals[n])));
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title }), hint = el("div", { class: "hint" }, "\u00a0");
  const step = (W - L - 6) / bars.length, every = Math.ceil(bars.length / 8);
  for (const at of ticks(0, most, 3)) {
    const y = H - B - (at / most) * (H - B - T);
    root.append(svg("line", { x1: L, x2: W - 6, y1: y, y2: y, stroke: "var(--grid)" }), svg("text", { x: L - 6, y: y + 4, "text-anchor": "end" }, `${short(100 * at)}%`));
  }
  bars.forEach((bar, i) => {
    bar.slice(1).forEach((count, n) => {
      const share = count / totals[n], h = (share / most) * (H - B - T), w = (step * 0.82) / names.length;
      const rect = svg("rect", { x: L + i * step + step * 0.09 + n * w, y: H - B - h, width: Math.max(w - 0.5, 1), height: h, fill: `var(--c${n})`, rx: Math.min(2, w / 3) });
      rect.addEventListener("pointerenter", () => { hint.textContent = `${bar[0]}: ${count} (${(100 * share).toFixed(1)}%)`; });
      root.append(rect);
    });
    if (i % every === 0) root.append(svg("text", { x: L + (i + 0.5) * step, y: H - 8, "text-anchor": "middle" }, bar[0]));
  });
  box.append(root, hint);
  return box;
}

function bins(values, of = (value) => value) {
  const numbers = values.map(of).filter(Number.isFinite);
  if (!numbers.length) return null;
  const low = Math.min(...numbers), high = Math.max(...numbers), distinct = [...new Set(numbers)].sort((a, b) => a - b);
  if (distinct.length <= 12) return { names: distinct.map(short), at: (value) => distinct.indexOf(value) };
  const count = 16, wide = (high - low) / count;
  return { names: Array.from({ length: count }, (_, i) => short(low + i * wide)), at: (value) => Math.min(count - 1, Math.floor((value - low) / wide)) };
}

