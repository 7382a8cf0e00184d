const STATES = ["busy", "starved", "blocked", "credit", "weights"];
const STATE_WORDS = { starved: "starved: waits for input", blocked: "blocked: waits for room", credit: "credit: waits to be admitted", weights: "weights: waits for new ones" };
const states_legend = (...more) => legend([...STATES.map((state) => [STATE_WORDS[state] ?? state, `var(--${state})`]), ...more]);

// The parts of the drawn graph, by index of the data: {key, root, nodes, edges, weights}. A live page moves them.
let plotted = null;
// Room between two stages for the numbers of an edge.
let edge_room = 40;

// Stages in the order of the data, in rows as wide as the page, the weights dashed.
function graph() {
  const of = data.graph;
  section("graph", "Graph", of && of.nodes.length);
  if (!of || !of.nodes.length) return;
  const wide = Math.min($("graph-drawing").clientWidth - 34 || 900, 1120), key = JSON.stringify([of, wide, edge_room]);
  if (plotted?.key !== key) plot(of, wide, key);
  if (!plotted.moving) data.stages.forEach((stage) => show_shares(stage));
}

function plot(of, wide, key) {
  const w = 124, h = 56, gap = edge_room, line = 124, per = Math.max(1, Math.floor((wide - 16 + gap) / (w + gap)));
  // The longest way from a source is a node's place; those of equal length share a column in a row of their own.
  const rank = of.nodes.map(() => 0);
  for (let round = 0; round < of.nodes.length; round++) of.edges.forEach((edge) => { if (edge.to !== null) rank[edge.to] = Math.max(rank[edge.to], rank[edge.from] + 1); });
  const seen = {}, order = of.nodes.map((_, i) => i).sort((a, b) => rank[a] - rank[b] || a - b), place = {};
  order.forEach((node, at) => { const row = Math.floor(at / per), col = at % per; place[node] = [(row % 2 ? per - 1 - col : col) * (w + gap) + 8, row * line + 44]; seen[row] = true; });
  // Weights between two stages of one column go around what stands between them.
  const around = (edge) => place[edge.from][0] === place[edge.to][0] && place[edge.from][1] !== place[edge.to][1];
  const rows = Object.keys(seen).length, H = rows * line + 20;
  const W = Math.min(per, order.length) * (w + gap) - gap + 16 + (of.weights.some(around) ? 44 : rows > 1 && edge_room > 40 ? 56 : 0);
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", "aria-label": "The run's graph" });
  const defs = svg("defs"), marker = svg("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" });
  marker.append(svg("path", { d: "M0 0L8 4L0 8z", fill: "var(--soft)" })); defs.append(marker); root.append(defs);
  plotted = { key, root, moving: false, nodes: {}, edges: [], weights: [] };
  const middle = (node) => [place[node][0] + w / 2, place[node][1] + h / 2];
  of.edges.forEach((edge, at) => {
    if (edge.to === null) return;
    const [x1, y1] = middle(edge.from), [x2, y2] = middle(edge.to), level = Math.abs(y1 - y2) < 1, right = x2 > x1;
    const d = level ? `M${x1 + (right ? w / 2 : -w / 2)} ${y1}L${x2 + (right ? -w / 2 : w / 2) + (right ? -2 : 2)} ${y2}` : `M${x1} ${y1 + h / 2}L${x2} ${y2 - h / 2 - 2}`;
    const path = svg("path", { d, fill: "none", stroke: "var(--soft)", "stroke-width": 1.5, "marker-end": "url(#tip)", class: "edge" });
    const title = svg("title", {}, `${edge.carries}: ${edge.capacity.items} items, ${edge.capacity.tokens ?? "any number of"} tokens`);
    path.append(title);
    const flow = svg("path", { d, class: "flow", visibility: "hidden" });
    const [x, y] = [(x1 + x2) / 2 + (level ? 0 : 10), (y1 + y2) / 2], anchor = level ? "middle" : "start";
    const fill = svg("text", { x, y: level ? y - 9 : y - 3, "text-anchor": anchor, class: "soft" }), rate = svg("text", { x, y: level ? y + 19 : y + 12, "text-anchor": anchor, class: "soft" });
    root.append(path, flow, fill, rate);
    plotted.edges[at] = { path, flow, fill, rate, title };
  });
  // The way of weights: over their row, around their column, or through the room below the row that they go to.
  const back = (edge) => {
    const [x1, y1] = middle(edge.from), [x2, y2] = middle(edge.to), left = x2 < x1 ? -1 : 1, below = y2 + line / 2, into = x2 - (left * w) / 4;
    if (y1 <= y2) { const top = Math.min(y1, y2) - h / 2 - 26; return `M${x1} ${y1 - h / 2}C${x1} ${top} ${x2} ${top} ${x2} ${y2 - h / 2 - 2}`; }
    if (around(edge)) { const side = x1 + w / 2 + 40; return `M${x1 + w / 2} ${y1}C${side} ${y1} ${side} ${y2} ${x2 + w / 2 + 2} ${y2}`; }
    const up = y1 - y2 < line * 1.5 ? `M${x1 + (left * w) / 4} ${y1 - h / 2}` : `M${x1 + (left * w) / 2} ${y1}H${x1 + (left * (w + gap)) / 2}`;
    return `${up}V${below}H${into}V${y2 + h / 2 + 2}`;
  };
  for (const edge of of.weights) {
    const path = svg("path", { d: back(edge), fill: "none", stroke: "var(--weights)", "stroke-width": 2, "stroke-dasharray": "5 4", "marker-end": "url(#tip)" });
    root.append(path);
    plotted.weights.push(path);
  }
  of.nodes.forEach((node, i) => {
    // Weights leave a stage at its left, where it has room for its version at its right.
    const publishes = of.weights.some((edge) => edge.from === i);
    const [x, y] = place[i], tint = svg("rect", { x, y, width: w, height: h, rx: 9, "fill-opacity": 0, "stroke-width": 1.5, stroke: "var(--line)", class: "tint" });
    const kind = svg("text", { x: x + w / 2, y: y + 36, "text-anchor": "middle", class: "soft" }, node.kind), version = svg("text", { x: publishes ? x + w - 3 : x + 3, y: y - 6, "text-anchor": publishes ? "end" : "start", class: "version" });
    const bars = Object.fromEntries(STATES.map((state) => [state, svg("rect", { x: x + 10, y: y + h - 11, width: 0, height: 4, fill: `var(--${state})` })]));
    root.append(svg("rect", { x, y, width: w, height: h, rx: 9, fill: "var(--page)" }), tint, ...Object.values(bars), svg("text", { x: x + w / 2, y: y + 21, "text-anchor": "middle" }, node.name), kind, version);
    plotted.nodes[node.name] = { tint, kind, version, bars, left: x + 10, room: w - 20 };
  });
  $("graph-drawing").replaceChildren(root, states_legend(...(of.weights.length ? [["dashed: weights, of which the newest version wins", "var(--weights)"]] : [])));
}

// A stage's colour is the state that it is most in.
function show_shares(stage) {
  const node = plotted.nodes[stage.name];
  if (!node) return;
  const most = STATES.reduce((a, b) => (stage[b] > stage[a] ? b : a));
  node.tint.setAttribute("stroke", `var(--${most})`); node.tint.setAttribute("fill", `var(--${most})`); node.tint.setAttribute("fill-opacity", 0.16);
  node.kind.textContent = `${most} ${(100 * stage[most]).toFixed(0)}%`;
  let left = node.left;
  for (const state of STATES) {
    const width = node.room * stage[state];
    node.bars[state].setAttribute("x", left); node.bars[state].setAttribute("width", width);
    left += width;
  }
}
