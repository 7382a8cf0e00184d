const curve = (name, as) => data.curves[name] && { name: as ?? name, points: points_of(data, data.curves[name].points) };
const help_of = (name) => data.curves[name]?.help ?? "";
const has = (...names) => names.some((name) => data.curves[name]);
// Parts that are there, and their titles.
const drawn = new Map();
function show(into, condition, draw) { if (condition) $(into).append(draw()); }
function section(id, label, there) { $(id).hidden = !there; if (there) drawn.set(id, label); else drawn.delete(id); }

function header() {
  document.title = `${data.name} – rollflow`;
  $("name").textContent = data.name;
  $("state").textContent = data.state; $("state").className = `chip ${data.state}`;
  $("outcome").textContent = data.outcome;
  for (const [label, value] of data.tiles) $("tiles").append(el("div", { class: "tile" }, el("b", {}, value), el("span", {}, label)));
}

function learning() {
  const evals = (name) => data.evaluations.filter((row) => Number.isFinite(row[name])).map((row) => [row.eval_step ?? row.step, row[name]]);
  const dots = (name, as) => ({ name: as, points: points_of(data, evals(name)), dots: true });
  show("learning-charts", has("reward_mean"), () => chart("Mean reward of a step", [curve("reward_mean")], { help: help_of("reward_mean"), height: 260, wide: WIDE }));
  const known = [["eval_greedy_accuracy_ratio", "greedy"], ["eval_accuracy_ratio", "sampled"], ["eval_pair_accuracy_ratio", "pairs"], ...data.pass_at.map((k) => [`eval_pass_at_${k}`, `pass@${k}`])];
  const series = known.filter(([name]) => name !== "eval_pass_at_1").map(([name, as]) => dots(name, as));
  show("learning-charts", series.some((one) => one.points.length), () => chart("Evaluation: share that is right", series, { height: 260, wide: WIDE, help: "Prompts of their own, asked of one version of the weights." }));
  show("learning-charts", evals("eval_loss").length, () => chart("Evaluation: loss", [dots("eval_loss", "loss")], { height: 260, wide: WIDE }));
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
  const line = (name, as) => curve(name) && { name: as, points: curve(name).points.map((p) => (view.smooth ? [p[0], p[1], , , , p[5]] : p)) };
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
  section("time", "Time", data.stages.length);
  if (!data.stages.length) return;
  $("bottleneck").textContent = data.bottleneck;
  const bars = el("div", { class: "bars" });
  for (const stage of data.stages) {
    const bar = el("div", { class: "bar", role: "img", "aria-label": STATES.map((state) => `${state} ${(100 * stage[state]).toFixed(1)}%`).join(", ") });
    bar.title = bar.getAttribute("aria-label");
    for (const state of STATES) if (stage[state] > 0) bar.append(el("i", { style: `width:${100 * stage[state]}%;background:var(--${state})` }));
    bars.append(el("div", { class: "stage" }, el("span", {}, stage.name + (stage.workers > 1 ? ` × ${stage.workers}` : "")), bar, el("span", { class: "of" }, `busy ${(100 * stage.busy).toFixed(0)}%`)));
  }
  $("stages").append(states_legend(), bars);
}

function staleness() {
  show("staleness-charts", data.staleness.length, () => histogram("Trained samples by how many versions their oldest token lagged", data.staleness.map(([lag, count]) => [String(lag), count])));
  show("staleness-charts", has("token_lag_mean_versions"), () => chart("Mean lag of a token, in versions", [curve("token_lag_mean_versions")], { from_zero: true, help: help_of("token_lag_mean_versions") }));
  show("staleness-charts", has("sample_staleness_max_versions"), () => chart("Oldest sample of a step, in versions", [curve("sample_staleness_max_versions")], { from_zero: true, help: help_of("sample_staleness_max_versions") }));
  section("staleness", "Staleness", $("staleness-charts").children.length);
}

function everything() {
  const names = Object.keys(data.curves), before = $("metric").value;
  section("all", "All metrics", names.length);
  if (!names.length) return;
  if (names.length !== $("metric").options.length) $("metric").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  if (has(before)) $("metric").value = before;
  const draw = () => { $("metric-help").textContent = help_of($("metric").value); const drawn = chart($("metric").value, [curve($("metric").value)], { height: 260, wide: Math.max(300, $("all").clientWidth - 34) }); drawn.classList.remove("card"); $("any").replaceChildren(drawn); };
  $("metric").onchange = draw;
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

// Parts of the page, with the boxes that each fills.
const PARTS = [[header, "tiles"], [learning, "learning-charts"], [health, "health-charts"], [lengths, "length-charts"], [stages, "stages"], [staleness, "staleness-charts"], [graph], [samples], [everything], [about, "facts"]];
// The browser draws between two parts, so that none of them delays a frame for long.
const breath = () => new Promise((resolve) => setTimeout(resolve));
const pending = new Set();
let drawing = null;

// The axis that the reader chose, or that of steps if no drawn run wrote down its times.
function choose_axis(timed) {
  $("axis").disabled = !timed;
  view.axis = timed ? $("axis").value : "step";
}

// Draws a run, also again with newer data: what the reader chose or scrolled to stays.
function draw(next, parts = PARTS) {
  data = next;
  choose_axis(data.axes.steps.length);
  parts.forEach((part) => pending.add(part));
  return (drawing ??= draw_pending().finally(() => { drawing = null; }));
}

async function draw_pending() {
  for (let part; (part = PARTS.find((part) => pending.has(part))); await breath()) {
    const [make, box] = part;
    pending.delete(part);
    if (box) $(box).replaceChildren();
    make();
  }
  const links = [...drawn].sort(([a], [b]) => ($(a).compareDocumentPosition($(b)) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1)).map(([id, label]) => {
    const link = el("a", { href: `#${id}` }, label);
    // The rest of the address may name a run.
    link.addEventListener("click", (event) => { event.preventDefault(); $(id).scrollIntoView(); $(id).querySelector("h2").focus(); });
    return link;
  });
  if (links.map((link) => link.textContent).join() !== [...$("nav").querySelectorAll("a")].map((link) => link.textContent).join()) $("nav").replaceChildren(...links);
}

$("axis").addEventListener("change", () => redraw());
for (const id of ["smooth", "log"]) $(id).addEventListener("change", () => { view[id] = $(id).checked; redraw(); });
let redraw = () => draw(data);
theme();
if (data) draw(data);
