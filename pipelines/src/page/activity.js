
// The running flow, in motion: `live` events of the server move the graph that the page has drawn.
const still = matchMedia("(prefers-reduced-motion: reduce)");

function move({ flow, versions, tokens, prompts, engines, paused }) {
  $("steer").hidden = paused === null;
  if (paused !== null) {
    $("order-pause").disabled = paused; $("order-resume").disabled = !paused;
    $("connection").textContent = paused ? "paused" : "live";
  }
  if (!plotted) return;
  plotted.moving = true;
  flow.stages.forEach((stage) => show_shares(stage));
  flow.edges.forEach((edge, at) => plotted.edges[at] && move_edge(plotted.edges[at], edge));
  data.graph.weights.forEach((edge, at) => {
    show_version(data.graph.nodes[edge.from].name, versions.trainer);
    // A new version travels once along the way of the weights.
    if (show_version(data.graph.nodes[edge.to].name, versions.generator) && !still.matches)
      plotted.weights[at].animate([{ strokeWidth: "5px", strokeDashoffset: 0 }, { strokeWidth: "2px", strokeDashoffset: -36 }], { duration: 450 });
  });
  $("bottleneck").textContent = $("limit").textContent = flow.bottleneck;
  plotted.root.setAttribute("aria-label", `The run's graph. ${flow.stages.map((stage) => `${stage.name}: ${plotted.nodes[stage.name]?.kind.textContent}`).join("; ")}`);
  ledgers(tokens, prompts);
  fleet(engines);
}

// Writes the version over a stage; true if it is another than before.
function show_version(stage, version) {
  const node = plotted.nodes[stage];
  if (!node || version === undefined) return false;
  const before = node.version.textContent;
  node.version.textContent = `v${version}`;
  return before !== "" && before !== node.version.textContent;
}

// Thick where the edge is full; dots run where items pass.
function move_edge(parts, edge) {
  const full = Math.min(1, Math.max(edge.items / edge.capacity.items, edge.tokens / edge.capacity.tokens));
  parts.path.setAttribute("stroke-width", 1.5 + 6 * full);
  parts.path.setAttribute("stroke", full > 0.9 ? "var(--blocked)" : "var(--soft)");
  parts.fill.textContent = `${edge.items}/${edge.capacity.items}`;
  parts.rate.textContent = edge.tokens_per_second > 0 ? `${count(edge.tokens_per_second)} tok/s` : `${count(edge.items_per_second)} items/s`;
  parts.title.textContent = `${edge.from} to ${edge.to}: ${edge.items} of ${edge.capacity.items} items and ${edge.tokens} of ${edge.capacity.tokens} tokens wait; ${short(edge.items_per_second)} items/s`;
  const moves = edge.items_per_second > 0 && !still.matches;
  parts.flow.setAttribute("visibility", moves ? "visible" : "hidden");
  if (!moves) return parts.motion?.pause();
  parts.motion ??= parts.flow.animate([{ strokeDashoffset: 14 }, { strokeDashoffset: 0 }], { duration: 1000, iterations: Infinity });
  parts.motion.playbackRate = 0.3 + Math.log10(1 + edge.items_per_second) / 2;
  parts.motion.play();
}

const FATES = { trained: "var(--c2)", in_flight: "var(--c0)", open: "var(--c0)", filtered: "var(--c4)", stale: "var(--c1)", surplus: "var(--c3)" };
const fate_colour = (fate) => FATES[fate] ?? "var(--bad)";

function ledgers(tokens, prompts) {
  const books = [["Tokens", tokens, "generated"], ["Prompts", prompts, "entered"]].filter(([, book, sum]) => book[sum] > 0);
  $("ledger").hidden = !books.length;
  $("ledgers").replaceChildren(...books.map(([title, book, sum]) => {
    const parts = Object.entries(book).filter(([fate, value]) => fate !== sum && value > 0);
    const bar = el("div", { class: "bar", role: "img", "aria-label": parts.map(([fate, value]) => `${fate}: ${value}`).join(", ") });
    bar.append(...parts.map(([fate, value]) => el("i", { style: `width:${(100 * value) / book[sum]}%;background:${fate_colour(fate)}` })));
    const names = parts.map(([fate, value]) => [`${fate.replace("_", " ")} ${value.toLocaleString("en")}`, fate_colour(fate)]);
    return el("div", { class: "card bars book" }, el("h3", {}, `${title}: ${book[sum].toLocaleString("en")} ${sum}`), bar, legend(names));
  }));
}

function fleet(engines) {
  $("engines").hidden = !engines.length;
  const row = (...cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell ?? "–")));
  const head = el("tr", {}, ...["engine", "state", "version", "in flight", "tokens"].map((name) => el("th", { scope: "col" }, name)));
  $("fleet").replaceChildren(head, ...engines.map((one) => row(one.name, one.state, one.version === null ? null : `v${one.version}`, one.in_flight, one.tokens === null ? null : count(one.tokens))));
}
