// Samples to browse: a list with filters, and the group of the chosen one.
const key_of = (one) => `${one.step}-${one.group}-${one.index}`;
const address = () => new URLSearchParams(location.hash.slice(1));
let browser = null;

function samples() {
  section("samples", "Samples", data.samples.length);
  if (!data.samples.length) return;
  browser ??= make_browser();
  browser.update();
}

function make_browser() {
  const field = (label, ...inputs) => { const box = el("label", {}, label, inputs.length > 1 ? el("div", { class: "two" }, ...inputs) : inputs[0]); $("filters").append(box); return inputs; };
  const number = (label) => el("input", { type: "number", step: "any", "aria-label": label });
  const pick = (...options) => el("select", {}, ...options.map(([value, name]) => el("option", { value }, name)));
  const [step] = field("Step", pick(["", "all"]));
  const [low, high] = field("Reward", number("lowest reward"), number("highest reward"));
  const [brief, long] = field("Length", number("shortest"), number("longest"));
  const [text] = field("Contains", el("input", { type: "search" }));
  const [sort] = field("Order", pick(["step", "by step"], ["best", "highest reward"], ["worst", "lowest reward"], ["long", "longest"], ["short", "shortest"]));
  const orders = { step: (a, b) => b.step - a.step || a.group - b.group || a.index - b.index, best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity), worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity), long: (a, b) => b.length - a.length, short: (a, b) => a.length - b.length };
  let found = [], chosen = null, followed = "";

  // The chosen sample among its group, each with its reward by part.
  const open = (one) => {
    chosen = one ? key_of(one) : null;
    [...$("list").querySelectorAll("button")].forEach((row) => row.setAttribute("aria-selected", row.dataset.key === chosen));
    if (!one) return $("sample").replaceChildren();
    const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
    const group = data.samples.filter((other) => other.step === one.step && other.group === one.group);
    const link = address();
    link.set("sample", chosen);
    const facts = el("dl", {}, fact("step", one.step), fact("group", `${one.group}, ${group.length} samples`));
    if (one.answer !== null) facts.append(fact("truth", one.answer));
    facts.append(el("a", { href: `#${link}` }, `link to sample ${one.index}`));
    const cards = group.map((other) => {
      const parts = el("dl", {}, fact("reward", short(other.reward)), ...Object.entries(other.parts ?? {}).map(([name, value]) => fact(name, short(value))), fact("advantage", short(other.advantage)), fact("tokens", other.length), fact("ended", other.status));
      const head = el("button", { type: "button", "aria-pressed": other === one }, `Sample ${other.index}`);
      head.addEventListener("click", () => open(other));
      return el("section", { class: other === one ? "completion chosen" : "completion" }, head, parts, el("pre", {}, other.response));
    });
    $("sample").replaceChildren(facts, el("h3", {}, "Prompt"), el("pre", {}, one.prompt), el("h3", {}, "Completions of the group"), el("div", { class: "group" }, ...cards));
    // Only the sample's own box scrolls.
    const card = cards[group.indexOf(one)], box = $("sample");
    if (card.offsetTop + card.offsetHeight > box.clientHeight) box.scrollTop = card.offsetTop - 30;
  };
  const filter = () => {
    const within = (value, low, high) => (low.value === "" || value >= +low.value) && (high.value === "" || value <= +high.value);
    const words = text.value.toLowerCase(), all = data.samples;
    found = all.filter((one) => (step.value === "" || one.step === +step.value) && (low.value === "" && high.value === "" || Number.isFinite(one.reward) && within(one.reward, low, high)) && within(one.length, brief, long) && (!words || (one.prompt + "\n" + one.response).toLowerCase().includes(words)));
    found.sort(orders[sort.value]);
    const shown = found.slice(0, 300).map((one) => {
      const row = el("button", { type: "button", role: "option", "data-key": key_of(one) }, el("span", { class: "what" }, one.response.trim() || "(empty)"), el("b", {}, short(one.reward)), el("small", {}, `step ${one.step} · ${one.length} tokens`));
      row.addEventListener("click", () => open(one));
      return row;
    });
    const note = found.length > shown.length ? `${found.length} fit; the first ${shown.length} are listed` : `${found.length} of ${all.length} samples${data.samples_left_out ? ` (${data.samples_left_out} more in rollouts.jsonl)` : ""}`;
    const down = $("list").scrollTop;
    $("list").replaceChildren(...shown, el("div", { class: "note" }, note));
    $("list").scrollTop = down;
    open(found.find((one) => key_of(one) === chosen) ?? found[0]);
  };
  // A link to a sample shows it, whatever the filters were.
  const follow = () => {
    const asked = address().get("sample"), one = location.hash !== followed && data?.samples.find((one) => key_of(one) === asked);
    if (!one) return;
    followed = location.hash;
    [step, low, high, brief, long, text].forEach((input) => { input.value = ""; });
    chosen = asked;
    filter();
    open(one);
    $("samples").scrollIntoView();
  };
  [step, low, high, brief, long, text, sort].forEach((input) => input.addEventListener("input", filter));
  $("list").addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(found.findIndex((one) => key_of(one) === chosen) + move, found.length - 1));
    open(found[at]);
    $("list").children[at].scrollIntoView({ block: "nearest" });
  });
  addEventListener("hashchange", follow);
  const update = () => {
    const steps = [...new Set(data.samples.map((one) => one.step))], before = step.value;
    step.replaceChildren(el("option", { value: "" }, "all"), ...steps.map((one) => el("option", { value: one }, one)));
    step.value = steps.includes(+before) && before !== "" ? before : "";
    const rewards = data.samples.map((one) => one.reward).filter(Number.isFinite), lengths = data.samples.map((one) => one.length);
    const ends = (of, low, high) => { low.placeholder = of.length ? short(Math.min(...of)) : ""; high.placeholder = of.length ? short(Math.max(...of)) : ""; };
    ends(rewards, low, high); ends(lengths, brief, long);
    filter();
    follow();
  };
  return { update };
}
