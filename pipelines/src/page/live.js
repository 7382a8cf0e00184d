
// The page of a server: a list of runs, one run as it happens, and runs compared. The address after `#` names what
// is shown: `runs`, `start` (or `start=RECIPE`), `run=NAME` (with `sample=STEP-GROUP-INDEX` or `STEP-GROUP-INDEX-PART`), or `compare=NAME&compare=NAME`.
edge_room = 84;

// Parts that only a live page has.
const place = (id, title, before, ...children) => $(before).before(el("section", { id, hidden: "" }, el("h2", { tabindex: -1 }, title), ...children));
place("runs", "Runs", "tiles", el("div", { class: "card scroll" }, el("table", { id: "runs-table" })), el("button", { id: "compare-chosen", type: "button", class: "action" }, "Compare the chosen runs"), " ", el("a", { id: "new-run", class: "action", href: "#start=", hidden: "" }, "New run"));
place_start();
place("comparison", "Comparison", "tiles", el("label", { class: "pick" }, "Metric ", el("select", { id: "compared-metric" })), el("div", { class: "card", id: "compared" }), el("div", { class: "grid", id: "compared-charts" }), el("h3", {}, "Recipe keys that differ"), el("div", { class: "card scroll" }, el("table", { id: "differences" })));
place("token", "This page asks for a token", "tiles", el("form", { class: "card pick" }, el("label", {}, "Token ", el("input", { type: "password", id: "secret", autocomplete: "off" })), el("button", { class: "action" }, "Show the runs")));
place("ledger", "Ledger", "learning", el("div", { class: "grid wide", id: "ledgers" }));
place("engines", "Engines", "learning", el("div", { class: "card scroll" }, el("table", { id: "fleet" })));
place("steer", "Steer", "learning", el("div", { class: "card pick", id: "orders" }));
$("ledger").before($("graph"));
$("graph-drawing").before(el("p", { id: "limit", class: "say" }));
document.querySelector(".name").prepend(el("div", { id: "home" }, el("a", { href: "#runs" }, "All runs"), el("span", { id: "folder" })));
document.querySelector(".name").append(el("span", { id: "connection", class: "chip", role: "status" }));

const kept = sessionStorage;
const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const path_of = (name) => `/api/runs/${encodeURIComponent(name)}`;
let shown = new AbortController();

async function ask(path, signal, method = "GET", body = undefined) {
  const token = kept.getItem("token");
  const answer = await fetch(path, { method, body, signal, headers: token ? { authorization: `Bearer ${token}` } : {} });
  if (answer.status === 401) { only("token"); head("Runs", ""); $("secret").focus(); }
  if (answer.status === 401) throw new Error(token ? "The token is wrong." : "This page asks for a token.");
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer;
}
const ask_json = async (path, signal) => (await ask(path, signal)).json();

$("token").querySelector("form").addEventListener("submit", (event) => { event.preventDefault(); kept.setItem("token", $("secret").value.trim()); route(); });

// Shows one kind of page: runs, comparison, token or run.
function only(what) {
  $("folder").textContent = "";
  document.body.className = what;
  for (const id of ["runs", "comparison", "token", "start"]) $(id).hidden = id !== what;
}
function head(title, outcome) {
  document.title = `${title} – rollflow`;
  $("name").textContent = title; $("outcome").textContent = outcome;
}
function failed(error) {
  if (error.name !== "AbortError") $("outcome").textContent = `${error.message}`;
}

function route() {
  shown.abort();
  shown = new AbortController();
  const at = address(), { signal } = shown;
  $("connection").textContent = "";
  if (at.has("run")) return show_run(at.get("run"), signal);
  if (at.has("start")) return show_start(at.get("start"), signal);
  if (at.has("compare")) return show_comparison(at.getAll("compare"), signal);
  return show_runs(signal, location.hash === "");
}

function sparkline(values) {
  const W = 110, H = 26, low = Math.min(...values), high = Math.max(...values), root = svg("svg", { viewBox: `0 0 ${W} ${H}`, width: W, height: H, "aria-hidden": "true" });
  const points = values.map((value, i) => `${(3 + (i / Math.max(1, values.length - 1)) * (W - 6)).toFixed(1)} ${(H - 4 - ((value - low) / (high - low || 1)) * (H - 8)).toFixed(1)}`);
  if (points.length) root.append(svg("path", { d: `M${points.join("L")}`, fill: "none", stroke: "var(--accent)", "stroke-width": 1.7, "stroke-linejoin": "round", "stroke-linecap": "round" }));
  return root;
}

const fetch_recipes = (signal) => ask_json("/api/recipes", signal).then((recipes) => { $("new-run").hidden = !recipes.length; }, () => {});

async function show_runs(signal, first) {
  fetch_recipes(signal);
  while (!signal.aborted) {
    if (!document.hidden) {
      try {
        const runs = await ask_json("/api/runs", signal), live = runs.find((run) => run.live && run.state === "running");
        // The page of a run begins with the run.
        if (first && live) return location.replace(`#${new URLSearchParams({ run: live.name })}`);
        first = false;
        only("runs");
        const going = runs.filter((run) => run.state === "running").length;
        head("Runs", `${runs.length} ${runs.length === 1 ? "run" : "runs"}, ${going} running`);
        list(runs);
      } catch (error) { failed(error); if (document.body.className === "token") return; }
    }
    await wait(3000);
  }
}

function list(runs) {
  const chosen = new Set([...$("runs-table").querySelectorAll("input:checked")].map((box) => box.value));
  const header = el("tr", {}, ...["", "run", "state", "step", "last", "curve", "started", "time"].map((name) => el("th", { scope: "col" }, name)));
  const rows = runs.map((run) => {
    const box = el("input", { type: "checkbox", value: run.name, "aria-label": `choose ${run.name}` });
    box.checked = chosen.has(run.name);
    const state = el("div", {}, el("span", { class: `chip ${run.state}`, title: run.error ?? "" }, run.state));
    // The process of a run draws its graph in motion.
    if (run.page && !run.live) state.append(" ", el("a", { href: run.page }, "graph"));
    const done = run.planned ? Math.min(100, (100 * run.step) / run.planned) : 0;
    const steps = el("div", {}, `${run.step}${run.planned ? ` / ${run.planned}` : ""}`, el("div", { class: "done" }, el("i", { style: `width:${done}%` })));
    const cells = [box, el("a", { href: `#${new URLSearchParams({ run: run.name })}` }, run.name), state, steps, run.metric ? `${run.metric.replace("_mean", "")} ${short(run.last)}` : "–", sparkline(run.curve), run.started.replace("T", " ").replace("Z", ""), lasted(run.seconds)];
    return el("tr", {}, ...cells.map((cell) => el("td", {}, cell)));
  });
  const focused = document.activeElement?.value, down = $("runs-table").contains(document.activeElement);
  $("runs-table").replaceChildren(header, ...rows);
  if (down) [...$("runs-table").querySelectorAll("input")].find((box) => box.value === focused)?.focus();
  $("compare-chosen").hidden = runs.length < 2;
}
$("compare-chosen").addEventListener("click", () => {
  const names = [...$("runs-table").querySelectorAll("input:checked")].map((box) => box.value);
  if (names.length < 2) $("outcome").textContent = "Choose two runs or more.";
  else location.hash = new URLSearchParams(names.map((name) => ["compare", name]));
});

async function show_run(name, signal) {
  plotted = null;
  try {
    source = remote_samples(name, signal);
    browser?.reset();
    const report = await ask_json(path_of(name), signal);
    only("run");
    for (const id of ["ledger", "engines", "steer"]) $(id).hidden = true;
    orders(name);
    $("limit").textContent = "";
    $("folder").textContent = ` › ${name}`;
    redraw = () => draw(data, PARTS.filter(([part]) => part !== samples));
    draw(report);
    sketch(signal).catch(failed);
  } catch (error) { return failed(error); }
  refresh(name, signal).catch(failed);
}

// Fetches a few numbers of the samples, and lists them. The server may have to read a large file first.
async function sketch(signal) {
  const { sketch } = await source.sketch();
  if (signal.aborted) return;
  const { rows, ...extent } = sketch;
  draw({ ...data, samples: rows.map(([step, reward, length]) => ({ step, reward, length })), extent }, PARTS.filter(([part]) => [learning, lengths, samples].includes(part)));
}

// Follows a run: moves its graph, and fetches its data when its files grew, at a rate that suits their size.
async function refresh(name, signal) {
  let grown = new Set(), busy = false;
  const fetch_again = async () => {
    if (busy) return;
    busy = true;
    while (grown.size && !signal.aborted) {
      const more = grown.has("rollouts.jsonl"), begun = performance.now();
      grown = new Set();
      const next = await ask_json(path_of(name), signal).catch(failed), { samples: rows, extent } = data;
      if (next && !signal.aborted) {
        await draw({ ...next, samples: rows, extent }, PARTS.filter(([part]) => part !== samples));
        if (more) await sketch(signal).catch(failed);
        if (data.state !== "running") $("connection").textContent = "";
      }
      await wait(Math.max(2000, 10 * (performance.now() - begun)));
    }
    busy = false;
  };
  const take = (event, body) => {
    if (event === "live") return move(body);
    body.files.forEach((file) => grown.add(file));
    fetch_again();
  };
  for (let lost = false; !signal.aborted; lost = true) {
    try {
      const answer = await ask(`${path_of(name)}/events`, signal);
      $("connection").textContent = data.state === "running" ? "live" : "";
      // What was missed meanwhile.
      if (lost) take("changed", { files: ["rollouts.jsonl"] });
      await read_events(answer.body, take);
    } catch (error) { if (signal.aborted) return; }
    $("connection").textContent = "not connected";
    await wait(2000);
  }
}

// Orders to a run of the server's process, which a reader with the token may give.
function orders(name) {
  const sure = { drain: "Finish what is in flight, save and end the run?", stop: "Save and end the run now?" };
  const give = async (order) => {
    if (sure[order] && !confirm(sure[order])) return;
    try {
      await ask(`${path_of(name)}/orders/${order}`, shown.signal, "POST");
      $("ordered").textContent = `${order}: given`;
    } catch (error) { if (error.name !== "AbortError") $("ordered").textContent = error.message; }
  };
  const button = (order, title) => el("button", { type: "button", class: "action", id: `order-${order}` }, title);
  const all = [["pause", "Pause"], ["resume", "Resume"], ["checkpoint", "Checkpoint now"], ["drain", "Drain"], ["stop", "Stop"]];
  $("orders").replaceChildren(...all.map(([order, title]) => { const made = button(order, title); made.addEventListener("click", () => give(order)); return made; }), el("span", { id: "ordered", role: "status" }));
  changes(name, shown.signal);
}

async function read_events(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const lines of events) {
      const field = (name) => lines.split("\n").find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      if (field("data")) take(field("event"), JSON.parse(field("data")));
    }
  }
}

async function show_comparison(names, signal) {
  try {
    const query = new URLSearchParams(names.map((name) => ["run", name]));
    const [reports, keys] = await Promise.all([Promise.all(names.map((name) => ask_json(path_of(name), signal))), ask_json(`/api/differences?${query}`, signal)]);
    only("comparison");
    head("Comparison", names.join(" · "));
    compare(names, reports, keys);
  } catch (error) { failed(error); }
}

const TELLING = ["reward_mean", "eval_greedy_accuracy_ratio", "loss", "entropy_nats", "grad_norm", "length_finished_mean_tokens", "log_prob_gap_mean_nats", "token_lag_mean_versions"];

// Runs in one chart per metric, and what differs in their recipes.
function compare(names, reports, keys) {
  const metrics = [...new Set(reports.flatMap((report) => Object.keys(report.curves)))].sort(), telling = TELLING.filter((name) => metrics.includes(name));
  const before = $("compared-metric").value;
  $("compared-metric").replaceChildren(...metrics.map((name) => el("option", { value: name }, name)));
  $("compared-metric").value = metrics.includes(before) ? before : telling[0] ?? metrics[0] ?? "";
  // Bands of several runs would hide each other.
  const series = (metric) => reports.map((report, at) => ({ name: names[at], points: points_of(report, report.curves[metric]?.points ?? []).map(([x, mean, , , value, step]) => [x, view.smooth ? mean : value, , , , step]) }));
  const help = (metric) => reports.map((report) => report.curves[metric]?.help).find(Boolean) ?? "";
  redraw = () => {
    choose_axis(reports.some((report) => report.axes.steps.length));
    const metric = $("compared-metric").value, drawn = chart(metric, series(metric), { help: help(metric), height: 320, wide: Math.max(300, $("compared").clientWidth - 34) });
    drawn.classList.remove("card");
    $("compared").replaceChildren(drawn);
    $("compared-charts").replaceChildren(...telling.filter((name) => name !== metric).map((name) => chart(name, series(name), { help: help(name) })));
  };
  $("compared-metric").onchange = redraw;
  redraw();
  const header = el("tr", {}, ...["key", ...names].map((name) => el("th", { scope: "col" }, name)));
  const rows = Object.entries(keys).map(([key, values]) => el("tr", {}, ...[key, ...values].map((value) => el("td", {}, value ?? "–"))));
  $("differences").replaceChildren(...(rows.length ? [header, ...rows] : [el("tr", {}, el("td", {}, "none"))]));
}

addEventListener("hashchange", (() => {
  const of = () => { const at = address(); return JSON.stringify([at.get("run"), at.getAll("compare")]); };
  let before = of();
  // A link to a sample of the shown run stays on its page.
  return () => { if (before !== of() || !address().has("run")) { before = of(); route(); } };
})());
route();
