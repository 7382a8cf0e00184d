
// Samples of a server's run, and the tokens of a completion with their numbers.
function remote_samples(name, signal) {
  const path = `${path_of(name)}/samples`;
  let search = new AbortController();
  return {
    conditions: true,
    find(query, from) {
      search.abort();
      search = new AbortController();
      return ask_json(`${path}?${new URLSearchParams({ ...query, from })}`, AbortSignal.any([signal, search.signal]));
    },
    group: (key) => ask_json(`${path}/${key}`, signal),
    tokens: (one, from) => ask_json(`${path}/${key_of(one)}/tokens?${new URLSearchParams(from === undefined ? {} : { from })}`, signal),
    sketch: () => ask_json(`${path}?sketch=true`, signal),
  };
}

// Colours of tokens: a number of each, and where the scale changes colour. `s` runs one way, `d` both ways from 0.
const SCALES = {
  version: { title: "versions older than the newest here", cuts: [1, 2, 3, 4, 8], kind: "s", column: "versions", of: (tokens, i) => tokens.newest - tokens.versions[i] },
  gap: { title: "trainer − generator, nats", cuts: [-0.5, -0.1, -0.02, 0.02, 0.1, 0.5], kind: "d", column: "trainer", of: (tokens, i) => tokens.trainer[i] - tokens.generator[i] },
  entropy: { title: "entropy, nats", cuts: [0.1, 0.3, 0.7, 1.5, 3], kind: "s", column: "entropy", of: (tokens, i) => tokens.entropy[i] },
  advantage: { title: "advantage", cuts: [-1, -0.5, -0.1, 0.1, 0.5, 1], kind: "d", column: "advantage", of: (tokens) => tokens.advantage },
};
const token_colour = el("select", { id: "colour" }, ...[["", "nothing"], ["version", "policy version"], ["gap", "log-probability gap"], ["entropy", "entropy"], ["advantage", "advantage"]].map(([value, name]) => el("option", { value }, name)));
const token_bar = el("div", { id: "token-bar" }, el("label", { class: "pick" }, "Colour tokens by ", token_colour), el("div", { id: "scale" }), el("p", { id: "numbers", role: "status" }));
// Cards whose tokens are still to be drawn, in order. Another group ends what was begun.
let token_queue = Promise.resolve(), token_turn = 0;

const show_plain = show_group, plain_body = body_of;
show_group = (group, chosen, open) => {
  token_turn++;
  $("scale")?.replaceChildren();
  show_plain(group, chosen, open);
  $("completions").after(token_bar);
  show_scale();
};
body_of = (one, group) => (token_colour.value ? token_box(one, group) : plain_body(one));
token_colour.addEventListener("change", () => browser.again());

function show_scale() {
  const scale = SCALES[token_colour.value];
  $("numbers").textContent = scale ? "Point at a token, or move among a completion's tokens by the arrow keys." : "";
  if (!scale) return;
  const { cuts, kind } = scale, name = (n) => (n === 0 ? `below ${cuts[0]}` : n === cuts.length ? `from ${cuts[n - 1]}` : `${cuts[n - 1]} to ${cuts[n]}`);
  const boxes = Array.from({ length: cuts.length + 1 }, (_, n) => el("span", {}, el("i", { class: `${kind}${n}` }), name(n)));
  $("scale").replaceChildren(el("div", { class: "legend" }, el("span", {}, `${scale.title}:`), ...boxes, el("span", { class: "given" }, "grey: not sampled, or masked")));
}

function token_box(one, group) {
  const box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `Tokens of sample ${one.index}; the arrow keys move among them` }), turn = token_turn;
  const newest = Math.max(...group.samples.map((other) => other.versions[1] ?? -Infinity));
  box.say = (span) => { box.now?.classList.remove("now"); box.now = span; span.classList.add("now"); $("numbers").textContent = token_numbers(span.of, span.n); };
  box.addEventListener("pointerover", (event) => event.target.of && box.say(event.target));
  box.addEventListener("keydown", (event) => {
    const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key], spans = box.querySelectorAll("span");
    const to = event.key === "Home" ? spans[0] : event.key === "End" ? spans[spans.length - 1] : next && (box.now ? box.now[next] : spans[0]);
    if (!to?.of) return;
    event.preventDefault();
    box.say(to);
    to.scrollIntoView({ block: "nearest" });
  });
  token_queue = token_queue.then(() => turn === token_turn && fill(box, one, newest, turn)).catch((error) => box.append(el("p", { class: "say", role: "alert" }, error.message)));
  return box;
}

// A few hundred tokens between two frames.
async function fill(box, one, newest, turn, from) {
  const tokens = { ...(await source.tokens(one, from)), newest }, scale = SCALES[token_colour.value];
  if (turn !== token_turn || !scale) return;
  const known = tokens[scale.column] !== null && (scale.column !== "trainer" || tokens.generator !== null);
  if (!known) box.before(el("p", { class: "say" }, "Not recorded for this completion."));
  for (let start = 0; start < tokens.texts.length; start += 300) {
    const spans = tokens.texts.slice(start, start + 300).map((text, at) => {
      const span = document.createElement("span"), i = start + at, value = known ? scale.of(tokens, i) : NaN;
      const learned = tokens.versions[i] !== null && !tokens.masked?.[i], missing = scale.column === "trainer" && tokens.trainer?.[i] === null || scale.column === "entropy" && tokens.entropy?.[i] === null;
      span.className = !learned ? "given" : missing || !Number.isFinite(value) ? "" : `${scale.kind}${scale.cuts.filter((cut) => value >= cut).length}`;
      span.textContent = visible(text);
      [span.of, span.n] = [tokens, i];
      return span;
    });
    box.append(...spans);
    await breath();
    if (turn !== token_turn) return;
  }
  const end = tokens.from + tokens.texts.length;
  if (end < tokens.total) {
    const more = el("button", { type: "button", class: "small" }, `More of ${tokens.total - end} tokens`);
    more.addEventListener("click", () => { more.remove(); fill(box, one, newest, turn, end).catch((error) => ($("numbers").textContent = error.message)); });
    box.append(more);
  }
}

// A token's numbers in words. What was not recorded is absent.
function token_numbers(tokens, i) {
  const of = (name) => tokens[name]?.[i] ?? null, [generator, trainer, entropy, version] = ["generator", "trainer", "entropy", "versions"].map(of);
  const parts = [`“${visible(tokens.texts[i]).replaceAll("\n", "⏎")}”`, `id ${tokens.ids[i]}`, `token ${tokens.from + i}`];
  if (version === null) parts.push("not sampled");
  else {
    parts.push(`version ${version}`);
    if (generator !== null) parts.push(`log-probability ${short(generator)}${trainer !== null ? `, trainer ${short(trainer)}, gap ${short(trainer - generator)}` : ""}`);
    if (entropy !== null) parts.push(`entropy ${short(entropy)}`);
    if (tokens.advantage !== null) parts.push(`advantage ${short(tokens.advantage)}`);
    if (tokens.masked?.[i]) parts.push("masked in the loss");
  }
  return parts.join(" · ");
}
