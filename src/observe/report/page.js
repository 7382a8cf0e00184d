"use strict";
// What a wide chart measures: letters are as large on a phone as on a desk.
const WIDE = Math.max(300, Math.min(560, document.documentElement.clientWidth - 64));
const data = JSON.parse(document.getElementById("data").textContent);
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

function ticks(low, high, about) {
  const rough = (high - low) / about || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.7);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

// Series: {name, points: [[x, mean, low, high]], dots}. The band is where most values around a point lie.
function chart(title, series, { help = "", height = 210, wide = Math.min(400, WIDE), from_zero = false } = {}) {
  series = series.filter((one) => one && one.points.length);
  const box = el("div", { class: "card chart" }, el("h3", { title: help }, title));
  if (!series.length) { box.append(el("p", { class: "say" }, "no data")); return box; }
  const W = wide, H = height, L = 52, R = 10, T = 10, B = 26;
  const values = series.flatMap((one) => one.points.flatMap((p) => [p[1], p[2] ?? p[1], p[3] ?? p[1]])), xs = series.flatMap((one) => one.points.map((p) => p[0]));
  let low = Math.min(...values, from_zero ? 0 : Infinity), high = Math.max(...values);
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  low = from_zero && low >= 0 ? 0 : low - room; high += room;
  const left = Math.min(...xs), right = Math.max(...xs) === left ? left + 1 : Math.max(...xs);
  const X = (x) => L + ((x - left) / (right - left)) * (W - L - R), Y = (y) => H - B - ((y - low) / (high - low)) * (H - T - B);
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  for (const at of ticks(low, high, 5)) {
    root.append(svg("line", { x1: L, x2: W - R, y1: Y(at), y2: Y(at), stroke: "var(--grid)" }), svg("text", { x: L - 6, y: Y(at) + 4, "text-anchor": "end" }, short(at)));
  }
  for (const at of ticks(left, right, W < 340 ? 4 : 5)) if (Number.isInteger(at)) root.append(svg("text", { x: X(at), y: H - 8, "text-anchor": "middle" }, short(at)));
  series.forEach((one, n) => {
    const colour = `var(--c${n % 5})`, path = (points) => points.map((p, i) => `${i ? "L" : "M"}${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
    if (one.points.some((p) => p.length > 3)) {
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
    hint.textContent = `step ${near[0][0]}: ` + near.map((p, n) => (series.length > 1 ? `${series[n].name} ` : "") + short(p[1])).join(" · ");
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

const curve = (name, as) => data.curves[name] && { name: as ?? name, points: data.curves[name].points };
const help_of = (name) => data.curves[name]?.help ?? "";
const has = (...names) => names.some((name) => data.curves[name]);
const drawn = [];
function show(into, condition, draw) { if (condition) $(into).append(draw()); }
function section(id, label, there) { $(id).hidden = !there; if (there) drawn.push([id, label]); }

function header() {
  document.title = `${data.name} – rollflow`;
  $("name").textContent = data.name;
  $("state").textContent = data.state; $("state").classList.add(data.state);
  $("outcome").textContent = data.outcome;
  for (const [label, value] of data.tiles) $("tiles").append(el("div", { class: "tile" }, el("b", {}, value), el("span", {}, label)));
}

function learning() {
  const evals = (name) => data.evaluations.filter((row) => Number.isFinite(row[name])).map((row) => [row.eval_step ?? row.step, row[name]]);
  show("learning-charts", has("reward_mean"), () => chart("Mean reward of a step", [curve("reward_mean")], { help: help_of("reward_mean"), height: 260, wide: WIDE }));
  const known = [["eval_greedy_accuracy_ratio", "greedy"], ["eval_accuracy_ratio", "sampled"], ...data.pass_at.map((k) => [`eval_pass_at_${k}`, `pass@${k}`])];
  const series = known.filter(([name]) => name !== "eval_pass_at_1").map(([name, as]) => ({ name: as, points: evals(name), dots: true }));
  show("learning-charts", data.evaluations.length, () => chart("Evaluation: share that is right", series, { height: 260, wide: WIDE, help: "Prompts of their own, asked of one version of the weights." }));
  show("learning-charts", has("loss"), () => chart("Loss", [curve("loss")], { help: help_of("loss"), height: 260, wide: WIDE }));
  const rewards = data.samples.filter((one) => Number.isFinite(one.reward));
  const edges = bins(rewards, (one) => one.reward);
  show("learning-charts", edges, () => {
    const steps = rewards.map((one) => one.step), middle = (Math.min(...steps) + Math.max(...steps)) / 2;
    const bars = edges.names.map((name) => [name, 0, 0]);
    rewards.forEach((one) => { bars[edges.at(one.reward)][one.step <= middle ? 1 : 2] += 1; });
    const both = bars.some((bar) => bar[2]) && bars.some((bar) => bar[1]);
    return histogram("Rewards of the samples below", both ? bars : bars.map((bar) => [bar[0], bar[1] + bar[2]]), both ? ["first half of the run", "second half"] : [""], { height: 260, wide: WIDE });
  });
  show("learning-charts", has("curriculum_prompts_0"), () => {
    const ranges = ["0", "0_20", "20_40", "40_60", "60_80", "80_100", "100", "retired"].map((range) => [range.replace("_", "–"), curve(`curriculum_prompts_${range}`).points]);
    const bars = ranges.map(([range, points]) => [range, points[points.length >> 1][1], points[points.length - 1][1]]);
    return histogram("Prompts by pass rate, in percent", bars, ["middle of the run", "end"], { height: 260, wide: WIDE });
  });
  section("learning", "Learning", $("learning-charts").children.length);
}

function health() {
  for (const [name, title] of [["entropy_nats", "Entropy"], ["grad_norm", "Gradient norm"], ["log_prob_gap_mean_nats", "Gap of log-probabilities, generator to trainer"], ["approx_kl_nats", "Step's divergence (KL)"],
    ["kl_loss_mean_nats", "Divergence from the reference"], ["clip_ratio", "Clipped tokens"], ["importance_effective_sample_ratio", "Effective sample size"], ["group_pass_ratio", "Groups with a success"], ["critic_explained_variance_ratio", "What the critic foresees"],
    ["pair_accuracy_ratio", "Pairs told apart"], ["learning_rate", "Learning rate"]])
    show("health-charts", has(name), () => chart(title, [curve(name)], { help: help_of(name) }));
  section("health", "Health", $("health-charts").children.length);
}

function lengths() {
  // Three lines with a band each would be a fog.
  const line = (name, as) => curve(name) && { name: as, points: curve(name).points.map((p) => p.slice(0, 2)) };
  const three = (kind) => [line(`length_${kind}_mean_tokens`, "mean"), line(`length_${kind}_median_tokens`, "median"), line(`length_${kind}_upper_decile_tokens`, "nine in ten below")];
  show("length-charts", has("length_finished_mean_tokens"), () => chart("Finished answers, in tokens", three("finished"), { from_zero: true }));
  show("length-charts", has("length_trained_mean_tokens"), () => chart("Trained answers, in tokens", three("trained"), { from_zero: true }));
  const edges = bins(data.samples, (one) => one.length);
  show("length-charts", edges, () => {
    const bars = edges.names.map((name) => [name, 0]);
    data.samples.forEach((one) => { bars[edges.at(one.length)][1] += 1; });
    return histogram("Lengths of the samples below", bars);
  });
  section("lengths", "Lengths", $("length-charts").children.length);
}

function stages() {
  const states = ["busy", "starved", "blocked", "credit", "weights"], words = { starved: "starved: waits for input", blocked: "blocked: waits for room", credit: "credit: waits to be admitted", weights: "weights: waits for new ones" };
  section("time", "Time", data.stages.length);
  if (!data.stages.length) return;
  $("bottleneck").textContent = data.bottleneck;
  const bars = el("div", { class: "bars" });
  for (const stage of data.stages) {
    const bar = el("div", { class: "bar", role: "img", "aria-label": states.map((state) => `${state} ${(100 * stage[state]).toFixed(1)}%`).join(", ") });
    bar.title = bar.getAttribute("aria-label");
    for (const state of states) if (stage[state] > 0) bar.append(el("i", { style: `width:${100 * stage[state]}%;background:var(--${state})` }));
    bars.append(el("div", { class: "stage" }, el("span", {}, stage.name + (stage.workers > 1 ? ` × ${stage.workers}` : "")), bar, el("span", { class: "of" }, `busy ${(100 * stage.busy).toFixed(0)}%`)));
  }
  $("stages").append(legend(states.map((state) => [words[state] ?? state, `var(--${state})`])), bars);
}

function staleness() {
  show("staleness-charts", data.staleness.length, () => histogram("Trained samples by how many versions their oldest token lagged", data.staleness.map(([lag, count]) => [String(lag), count])));
  show("staleness-charts", has("token_lag_mean_versions"), () => chart("Mean lag of a token, in versions", [curve("token_lag_mean_versions")], { from_zero: true, help: help_of("token_lag_mean_versions") }));
  show("staleness-charts", has("sample_staleness_max_versions"), () => chart("Oldest sample of a step, in versions", [curve("sample_staleness_max_versions")], { from_zero: true, help: help_of("sample_staleness_max_versions") }));
  section("staleness", "Staleness", $("staleness-charts").children.length);
}

// Stages in the order of the data, in rows as wide as the page, the weights dashed.
function graph() {
  const of = data.graph;
  section("graph", "Graph", of && of.nodes.length);
  if (!of || !of.nodes.length) return;
  const wide = Math.min($("graph-drawing").clientWidth || 900, 1100), w = 128, h = 46, gap = 40, line = 108, per = Math.max(1, Math.floor((wide + gap) / (w + gap)));
  // The longest way from a source is a node's place; those of equal length share a column in a row of their own.
  const rank = of.nodes.map(() => 0);
  for (let round = 0; round < of.nodes.length; round++) of.edges.forEach((edge) => { if (edge.to !== null) rank[edge.to] = Math.max(rank[edge.to], rank[edge.from] + 1); });
  const seen = {}, order = of.nodes.map((_, i) => i).sort((a, b) => rank[a] - rank[b] || a - b), place = {};
  order.forEach((node, at) => { const row = Math.floor(at / per), col = at % per; place[node] = [(row % 2 ? per - 1 - col : col) * (w + gap) + 8, row * line + 44]; seen[row] = true; });
  // Weights between two stages of one column go around what stands between them.
  const around = (edge) => place[edge.from][0] === place[edge.to][0] && place[edge.from][1] !== place[edge.to][1];
  const rows = Object.keys(seen).length, H = rows * line + 20;
  const W = Math.min(per, order.length) * (w + gap) - gap + 16 + (of.weights.some(around) ? gap : 0);
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", "aria-label": "The run's graph" });
  const defs = svg("defs"), marker = svg("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" });
  marker.append(svg("path", { d: "M0 0L8 4L0 8z", fill: "var(--soft)" })); defs.append(marker); root.append(defs);
  const middle = (node) => [place[node][0] + w / 2, place[node][1] + h / 2];
  for (const edge of of.edges) {
    if (edge.to === null) continue;
    const [x1, y1] = middle(edge.from), [x2, y2] = middle(edge.to), level = Math.abs(y1 - y2) < 1, right = x2 > x1;
    const d = level ? `M${x1 + (right ? w / 2 : -w / 2)} ${y1}L${x2 + (right ? -w / 2 : w / 2) + (right ? -2 : 2)} ${y2}` : `M${x1} ${y1 + h / 2}L${x2} ${y2 - h / 2 - 2}`;
    const path = svg("path", { d, fill: "none", stroke: "var(--soft)", "stroke-width": 1.5, "marker-end": "url(#tip)" });
    path.append(svg("title", {}, `${edge.carries}: ${edge.capacity.items} items, ${edge.capacity.tokens ?? "any number of"} tokens`));
    root.append(path);
  }
  // The way of weights: over their row, around their column, or through the room below the row that they go to.
  const back = (edge) => {
    const [x1, y1] = middle(edge.from), [x2, y2] = middle(edge.to), left = x2 < x1 ? -1 : 1, below = y2 + line / 2, into = x2 - (left * w) / 4;
    if (y1 <= y2) { const top = Math.min(y1, y2) - h / 2 - 26; return `M${x1} ${y1 - h / 2}C${x1} ${top} ${x2} ${top} ${x2} ${y2 - h / 2 - 2}`; }
    if (around(edge)) { const side = x1 + w / 2 + gap; return `M${x1 + w / 2} ${y1}C${side} ${y1} ${side} ${y2} ${x2 + w / 2 + 2} ${y2}`; }
    const up = y1 - y2 < line * 1.5 ? `M${x1 + (left * w) / 4} ${y1 - h / 2}` : `M${x1 + (left * w) / 2} ${y1}H${x1 + (left * (w + gap)) / 2}`;
    return `${up}V${below}H${into}V${y2 + h / 2 + 2}`;
  };
  for (const edge of of.weights) {
    root.append(svg("path", { d: back(edge), fill: "none", stroke: "var(--weights)", "stroke-width": 2, "stroke-dasharray": "5 4", "marker-end": "url(#tip)" }));
  }
  of.nodes.forEach((node, i) => {
    const [x, y] = place[i], busy = data.stages.find((stage) => stage.name === node.name);
    root.append(svg("rect", { x, y, width: w, height: h, rx: 8, fill: "var(--page)", stroke: "var(--line)" }));
    if (busy) root.append(svg("rect", { x: x + 10, y: y + h - 7, width: Math.max(2, (w - 20) * busy.busy), height: 3, rx: 1.5, fill: "var(--busy)" }));
    root.append(svg("text", { x: x + w / 2, y: y + 20, "text-anchor": "middle" }, node.name), svg("text", { x: x + w / 2, y: y + 34, "text-anchor": "middle", class: "soft" }, busy ? `busy ${(100 * busy.busy).toFixed(0)}%` : node.kind));
  });
  $("graph-drawing").append(root, legend([["weights: the newest wins, nobody waits", "var(--weights)"]]));
}

function samples() {
  section("samples", "Samples", data.samples.length);
  if (!data.samples.length) return;
  const all = data.samples, rewards = all.map((one) => one.reward).filter(Number.isFinite), lengths = all.map((one) => one.length);
  const steps = [...new Set(all.map((one) => one.step))];
  const field = (label, ...inputs) => { const box = el("label", {}, label, inputs.length > 1 ? el("div", { class: "two" }, ...inputs) : inputs[0]); $("filters").append(box); return inputs; };
  const number = (hint, label) => el("input", { type: "number", step: "any", placeholder: hint, "aria-label": label });
  const pick = (...options) => el("select", {}, ...options.map(([value, name]) => el("option", { value }, name)));
  const [step] = field("Step", pick(["", "all"], ...steps.map((one) => [one, one])));
  const [low, high] = field("Reward", number(rewards.length ? short(Math.min(...rewards)) : "", "lowest reward"), number(rewards.length ? short(Math.max(...rewards)) : "", "highest reward"));
  const [brief, long] = field("Length", number(Math.min(...lengths), "shortest"), number(Math.max(...lengths), "longest"));
  const [text] = field("Contains", el("input", { type: "search" }));
  const [sort] = field("Order", pick(["step", "by step"], ["best", "highest reward"], ["worst", "lowest reward"], ["long", "longest"], ["short", "shortest"]));
  const orders = { step: (a, b) => b.step - a.step || a.group - b.group || a.index - b.index, best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity), worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity), long: (a, b) => b.length - a.length, short: (a, b) => a.length - b.length };
  let found = [], at = 0;
  const open = (n) => {
    at = Math.max(0, Math.min(n, found.length - 1));
    [...$("list").querySelectorAll("button")].forEach((row, i) => row.setAttribute("aria-selected", i === at));
    const one = found[at];
    $("sample").replaceChildren();
    if (!one) return;
    const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
    const facts = el("dl", {}, fact("step", one.step), fact("group", `${one.group}, sample ${one.index}`), fact("reward", short(one.reward)), fact("advantage", short(one.advantage)), fact("tokens", one.length), fact("ended", one.status));
    for (const [name, value] of Object.entries(one.parts ?? {})) facts.append(fact(name, short(value)));
    if (one.answer !== null) facts.append(fact("truth", one.answer));
    $("sample").append(facts, el("h3", {}, "Prompt"), el("pre", {}, one.prompt), el("h3", {}, "Answer"), el("pre", {}, one.response));
  };
  const filter = () => {
    const within = (value, low, high) => (low.value === "" || value >= +low.value) && (high.value === "" || value <= +high.value);
    const words = text.value.toLowerCase();
    found = all.filter((one) => (step.value === "" || one.step === +step.value) && (low.value === "" && high.value === "" || Number.isFinite(one.reward) && within(one.reward, low, high)) && within(one.length, brief, long) && (!words || (one.prompt + "\n" + one.response).toLowerCase().includes(words)));
    found.sort(orders[sort.value]);
    const shown = found.slice(0, 300).map((one, n) => {
      const row = el("button", { type: "button", role: "option" }, el("span", { class: "what" }, one.response.trim() || "(empty)"), el("b", {}, short(one.reward)), el("small", {}, `step ${one.step} · ${one.length} tokens`));
      row.addEventListener("click", () => open(n));
      return row;
    });
    const note = found.length > shown.length ? `${found.length} fit; the first ${shown.length} are listed` : `${found.length} of ${all.length} samples${data.samples_left_out ? ` (${data.samples_left_out} more in rollouts.jsonl)` : ""}`;
    $("list").replaceChildren(...shown, el("div", { class: "note" }, note));
    open(0);
  };
  [step, low, high, brief, long, text, sort].forEach((input) => input.addEventListener("input", filter));
  $("list").addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (move) { event.preventDefault(); open(at + move); $("list").children[at].scrollIntoView({ block: "nearest" }); }
  });
  filter();
}

function everything() {
  const names = Object.keys(data.curves);
  section("all", "All metrics", names.length);
  if (!names.length) return;
  $("metric").append(...names.map((name) => el("option", { value: name }, name)));
  const draw = () => { $("metric-help").textContent = help_of($("metric").value); const drawn = chart($("metric").value, [curve($("metric").value)], { height: 260, wide: Math.max(340, $("any").clientWidth) }); drawn.classList.remove("card"); $("any").replaceChildren(drawn); };
  $("metric").addEventListener("change", draw);
  draw();
}

function about() {
  section("about", "About", true);
  for (const [name, value] of data.facts) $("facts").append(el("tr", {}, el("td", {}, name), el("td", {}, value)));
  $("recipe").textContent = data.recipe;
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const set = () => { const is = chosen ?? dark.matches; document.documentElement.classList.toggle("dark", is); document.documentElement.style.colorScheme = is ? "dark" : "light"; $("theme").textContent = is ? "☀" : "☾"; };
  dark.addEventListener("change", set);
  $("theme").addEventListener("click", () => { chosen = !(chosen ?? dark.matches); set(); });
  set();
}

theme(); header(); learning(); health(); lengths(); stages(); staleness(); graph(); samples(); everything(); about();
$("nav").append(...drawn.map(([id, label]) => el("a", { href: `#${id}` }, label)));
