// Samples to browse: a list with filters, a page at a time, and the group of the chosen one.
// The name of a sample in an address. A rollout that had to start again has several parts.
const key_of = (one) => `${one.step}-${one.group}-${one.index}${one.part ? `-${one.part}` : ""}`;
const of_key = (key) => { const [step, group, index, part] = key.split("-").map(Number); return { step, group, index, part }; };
const address = () => new URLSearchParams(location.hash.slice(1));
// Characters that cannot be seen, or that turn the text around them, are written out.
const visible = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (mark) => `\\u{${mark.codePointAt(0).toString(16)}}`);
const LISTED = 100;

// Where samples are found: among those of this page. A live page asks its server instead.
let source = {
  conditions: false,
  async find(query, from) {
    const within = (value, low, high) => (low === undefined || value >= low) && (high === undefined || value <= high), words = query.text?.toLowerCase(), rewarded = (query.min_reward ?? query.max_reward) !== undefined;
    const fits = (one) => (query.step === undefined || one.step === query.step) && (!rewarded || Number.isFinite(one.reward)) && within(one.reward, query.min_reward, query.max_reward) && within(one.length, query.min_length, query.max_length) && (!query.status || one.status === query.status) && (!words || `${one.prompt}\n${one.response}`.toLowerCase().includes(words));
    const orders = { step: (a, b) => b.step - a.step || a.group - b.group || a.index - b.index || a.part - b.part, best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity), worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity), longest: (a, b) => b.length - a.length, shortest: (a, b) => a.length - b.length };
    const found = data.samples.filter(fits).sort(orders[query.order ?? "step"]), end = from + LISTED;
    return { rows: found.slice(from, end), found: found.length, next: end < found.length ? end : null, total: data.samples.length, left_out: data.samples_left_out };
  },
  async group(key) {
    const one = data.samples.find((one) => key_of(one) === key), samples = one ? data.samples.filter((other) => other.step === one.step && other.group === one.group) : [];
    return one && { ...one, size: samples.length, prompt: [{ role: "prompt", text: one.prompt, calls: [] }], samples };
  },
};
// What a completion's card shows: its text. A live page may show its tokens.
let body_of = (one) => (one.turns ? el("div", {}, ...one.turns.map(turn)) : el("pre", { tabindex: 0, "aria-label": `Completion ${one.index}` }, visible(one.response)));
let browser = null;

function samples() {
  section("samples", "Samples", data.samples.length);
  if (!data.samples.length) return;
  browser ??= make_browser();
  const of = (name) => ends(data.samples.map((one) => one[name]));
  browser.extent(data.extent ?? { step: of("step"), reward: of("reward"), length: of("length"), sources: [] });
  browser.update();
}
function ends(values) {
  const finite = values.filter(Number.isFinite);
  return finite.length ? [finite.reduce((a, b) => Math.min(a, b)), finite.reduce((a, b) => Math.max(a, b))] : null;
}

// A turn of a conversation. What the policy did not write is grey.
function turn({ role, text, calls }) {
  const box = el("div", { class: role === "assistant" ? "turn own" : "turn" }, ...(role === "prompt" ? [] : [el("span", { class: "role" }, visible(role))]));
  if (text) box.append(el("pre", { tabindex: 0, "aria-label": role }, visible(text)));
  for (const call of calls ?? []) box.append(el("pre", { class: "call", tabindex: 0, "aria-label": "tool call" }, visible(call)));
  return box;
}

const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));

// The completions of a group, each with its reward by part.
function show_group(group, chosen, open) {
  const link = address();
  link.set("sample", chosen);
  const facts = el("dl", {}, fact("step", group.step), fact("group", `${group.group}, ${group.size} samples`));
  if (group.answer !== null && group.answer !== undefined) facts.append(fact("truth", visible(group.answer)));
  if (group.source) facts.append(fact("source", visible(group.source)));
  facts.append(fact("filter", group.spared ? "rejected, and kept because too few groups were left" : "kept"), el("a", { href: `#${link}` }, "link to this sample"));
  const cards = group.samples.map((one) => {
    const own = key_of(one) === chosen, more = Object.entries(one.parts ?? {}).map(([name, value]) => fact(visible(name), short(value)));
    const parts = el("dl", {}, fact("reward", short(one.reward)), ...more, fact("advantage", short(one.advantage)), fact("tokens", one.length), fact("ended", one.status), ...(one.facts ?? []).map(([name, value]) => fact(visible(name), visible(value))));
    const head = el("button", { type: "button", "aria-pressed": own }, `Sample ${one.index}${one.part ? `, part ${one.part}` : ""}`);
    head.addEventListener("click", () => open(one));
    return el("section", { class: own ? "completion chosen" : "completion", "data-key": key_of(one) }, head, parts, body_of(one, group));
  });
  $("sample").replaceChildren(facts, el("h3", {}, "Prompt"), ...group.prompt.map(turn), el("h3", { id: "completions" }, "Completions of the group"), el("div", { class: "group" }, ...cards));
  // Only the sample's own box scrolls.
  const card = cards[group.samples.findIndex((one) => key_of(one) === chosen)], box = $("sample");
  if (card && card.offsetTop + card.offsetHeight > box.clientHeight) box.scrollTop = card.offsetTop - 30;
}

function make_browser() {
  const field = (label, ...inputs) => { const box = el("label", {}, label, inputs.length > 1 ? el("div", { class: "two" }, ...inputs) : inputs[0]); $("filters").append(box); return inputs; };
  const number = (label) => el("input", { type: "number", step: "any", "aria-label": label });
  const pick = (...options) => el("select", {}, ...options.map(([value, name]) => el("option", { value }, name)));
  const [step] = field("Step", number("step"));
  const [low, high] = field("Reward", number("lowest reward"), number("highest reward"));
  const [brief, long] = field("Length", number("shortest"), number("longest"));
  const [status] = field("Ended", pick(["", "any"], ["completed", "completed"], ["truncated", "truncated"], ["aborted", "aborted"]));
  const [from_source] = field("Source", pick(["", "all"]));
  const [text] = field("Contains", el("input", { type: "search" }));
  const [where] = field("Condition", el("input", { type: "text", placeholder: "reward < 0.5 && length > 200", spellcheck: "false" }));
  const [order] = field("Order", pick(["step", "by step"], ["best", "highest reward"], ["worst", "lowest reward"], ["longest", "longest"], ["shortest", "shortest"]));
  where.closest("label").classList.add("condition");
  where.closest("label").hidden = !source.conditions;
  const filters = { step, min_reward: low, max_reward: high, min_length: brief, max_length: long, status, source: from_source, text, where, order };
  const query = () => Object.fromEntries(Object.entries(filters).filter(([, input]) => input.value !== "").map(([name, input]) => [name, input.type === "number" ? +input.value : input.value]));
  // Where the shown page and those before it begin.
  let trail = [0], rows = [], next = null, chosen = null, shown = null, followed = "", asked = 0, opening = 0;

  const mark = () => [...$("list").querySelectorAll("[role=option]")].forEach((row) => row.setAttribute("aria-selected", row.dataset.key === chosen));
  const open = async (one, { focus = false } = {}) => {
    chosen = one ? key_of(one) : null;
    mark();
    $("list").setAttribute("aria-activedescendant", chosen ? `row-${chosen}` : "");
    if (!one) { shown = null; return $("sample").replaceChildren(); }
    const mine = ++opening, group = await source.group(chosen).catch((error) => ({ error }));
    if (mine !== opening || !group || group.error?.name === "AbortError") return;
    if (group.error) return $("sample").replaceChildren(el("p", { class: "say", role: "alert" }, group.error.message));
    shown = chosen;
    show_group(group, chosen, open);
    if (focus) $("sample").querySelector(".completion.chosen button")?.focus();
  };
  const page = async () => {
    const mine = ++asked, from = trail[trail.length - 1], found = await source.find(query(), from).catch((error) => ({ error }));
    if (mine !== asked || found.error?.name === "AbortError") return;
    $("pager").hidden = false;
    if (found.error) return ($("found").textContent = found.error.message);
    ({ rows, next } = found);
    const options = rows.map((one) => {
      const row = el("div", { role: "option", id: `row-${key_of(one)}`, "data-key": key_of(one), "aria-selected": false }, el("span", { class: "what" }, visible(one.response.slice(0, 200).trim()) || "(empty)"), el("b", {}, short(one.reward)), el("small", {}, `step ${one.step} · ${one.length} tokens`));
      row.addEventListener("click", () => open(one));
      return row;
    });
    const down = $("list").scrollTop;
    $("list").replaceChildren(...options);
    $("list").scrollTop = down;
    const all = found.total.toLocaleString("en"), place = rows.length ? `${(from + 1).toLocaleString("en")}–${(from + rows.length).toLocaleString("en")}` : "none";
    $("found").textContent = (found.found !== null ? `${place} of ${found.found.toLocaleString("en")} that fit` : `${rows.length} that fit among ${found.searched.toLocaleString("en")} of ${found.of.toLocaleString("en")} searched`) + `; ${all} samples${found.left_out ? `, ${found.left_out} more in rollouts.jsonl` : ""}`;
    $("newer").disabled = trail.length < 2; $("older").disabled = next === null;
    const still = rows.find((one) => key_of(one) === chosen) ?? (shown && shown === chosen ? null : rows[0]);
    if (still && key_of(still) !== shown) open(still); else if (!rows.length) open(null); else mark();
  };
  const turn_page = (older) => { if (older) trail.push(next); else trail.pop(); $("list").scrollTop = 0; chosen = shown = null; return page(); };
  let pause = null;
  const filter = () => { clearTimeout(pause); pause = setTimeout(() => { trail = [0]; chosen = shown = null; page(); }, 150); };
  // A link to a sample shows it, whatever the filters were.
  const follow = () => {
    const key = address().get("sample");
    if (location.hash === followed || !/^\d+-\d+-\d+(-\d+)?$/.test(key ?? "")) return;
    followed = location.hash;
    open(of_key(key));
    $("samples").scrollIntoView();
  };
  Object.values(filters).forEach((input) => input.addEventListener("input", filter));
  $("older").addEventListener("click", () => turn_page(true));
  $("newer").addEventListener("click", () => turn_page(false));
  $("list").addEventListener("keydown", async (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key], at = rows.findIndex((one) => key_of(one) === chosen);
    if (event.key === "Enter" && rows[at]) return open(rows[at], { focus: true });
    if (!move || !rows.length) return;
    event.preventDefault();
    if (at + move >= rows.length && next !== null) return turn_page(true);
    const to = Math.max(0, Math.min(at + move, rows.length - 1));
    open(rows[to]);
    $("list").children[to].scrollIntoView({ block: "nearest" });
  });
  addEventListener("hashchange", follow);
  // Names of the data sets, and the smallest and largest numbers that a filter can mean.
  const extent = (of) => {
    const hint = ([low, high], range) => { low.placeholder = range ? short(range[0]) : ""; high.placeholder = range ? short(range[1]) : ""; };
    hint([low, high], of.reward); hint([brief, long], of.length);
    step.placeholder = of.step ? `${of.step[0]} to ${of.step[1]}` : "";
    const before = from_source.value;
    from_source.replaceChildren(el("option", { value: "" }, "all"), ...of.sources.map((name) => el("option", { value: name }, visible(name))));
    from_source.value = of.sources.includes(before) ? before : "";
    from_source.closest("label").hidden = of.sources.length < 2;
  };
  // Newer samples change what the first page lists, not a page that a reader turned to.
  const update = () => { follow(); if (trail.length === 1) page(); };
  const reset = () => { Object.values(filters).forEach((input) => { input.value = input === order ? "step" : ""; }); trail = [0]; chosen = shown = null; followed = ""; $("list").replaceChildren(); $("sample").replaceChildren(); $("pager").hidden = true; };
  return { update, reset, extent, again: () => shown && chosen && open(of_key(chosen)) };
}
