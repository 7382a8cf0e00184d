// A run from a form: a recipe, other values for its keys, and what `rollflow check` says of them meanwhile.
const place_start = () => place("start", "New run", "tiles",
  el("form", { class: "card", id: "start-form" },
    el("div", { class: "pick" }, el("label", {}, "Recipe ", el("select", { id: "start-recipe" })), el("label", {}, "Name of its folder ", el("input", { id: "start-name", required: "", pattern: "[A-Za-z0-9_\\-][A-Za-z0-9._\\-]*", maxlength: 100, autocomplete: "off" })), el("button", { class: "action", id: "start-run" }, "Start the run")),
    el("p", { id: "start-outcome", role: "status" })),
  el("div", { class: "grid wide" },
    el("div", { class: "card" }, el("div", { class: "pick" }, el("label", {}, "Keys with ", el("input", { id: "start-find", type: "search", placeholder: "lr, staleness, …" })), el("label", {}, "Another key ", el("input", { id: "start-more", placeholder: "filter=[]", size: 24, spellcheck: "false" }))), el("div", { id: "start-keys" })),
    el("div", { class: "card" }, el("h3", {}, "What follows"), el("div", { id: "start-check" }))));

// The description of a key in the recipe's schema, and the values that it may have.
function key_help(schema, key) {
  let nodes = [schema];
  for (const part of key.replace(/\[\d+\]/g, "").split(".")) nodes = nodes.flatMap((node) => [node, ...(node.oneOf ?? []), ...(node.items ? [node.items, ...(node.items.oneOf ?? [])] : [])]).map((node) => node.properties?.[part]).filter(Boolean);
  const words = nodes.flatMap((node) => node.oneOf ?? [node]).map((node) => node.const).filter((word) => word !== undefined);
  return { help: nodes.map((node) => node.description).find(Boolean) ?? "", words: [...new Set(words)] };
}

async function show_start(chosen, signal) {
  const set = new Map();
  let schema, checking = 0;
  try {
    const recipes = await ask_json("/api/recipes", signal);
    if (!recipes.length) throw new Error("Runs are started from a dashboard with --start RECIPES and a token.");
    schema = await ask_json("/api/schema", signal);
    only("start");
    head("New run", "");
    $("start-recipe").replaceChildren(...recipes.map((name) => el("option", { value: name }, name)));
    if (recipes.includes(chosen)) $("start-recipe").value = chosen;
  } catch (error) { return failed(error); }
  const lines = () => [...[...set].map(([key, value]) => `${key}=${value}`), ...($("start-more").value.trim() ? [$("start-more").value.trim()] : [])];
  const wanted = (more) => JSON.stringify({ recipe: $("start-recipe").value, set: lines(), ...more });

  // The newest check decides; an older one that comes late is left out.
  const check = async () => {
    const mine = ++checking;
    $("start-check").replaceChildren("checking …");
    try {
      const found = await (await ask("/api/check", signal, "POST", wanted())).json();
      if (mine !== checking) return;
      $("start-check").replaceChildren(...(found.ok ? follows(found) : wrong(found.errors)));
      $("start-run").disabled = !found.ok;
      keys(found.keys, found.ok ? [] : found.errors);
    } catch (error) { if (error.name !== "AbortError") $("start-check").replaceChildren(error.message); }
  };

  // A field per key, in its section. A change is checked at once; a field stays while its key does, with what is being
  // typed.
  const rows = new Map(), sections = new Map();
  const row_of = (key) => {
    const { help, words } = key_help(schema, key);
    const input = el("input", { "data-key": key, "aria-label": key, spellcheck: "false", autocomplete: "off", list: words.length ? `words-${key}` : "" });
    // A list is set as a whole, as another key.
    input.readOnly = key.includes("[");
    input.addEventListener("change", () => { set.set(key, input.value.trim()); check(); });
    const note = el("small", {}), datalist = words.length ? el("datalist", { id: `words-${key}` }, ...words.map((word) => el("option", { value: word }))) : "";
    return { input, note, help, root: el("div", { class: "key", "data-text": `${key} ${help}`.toLowerCase() }, el("label", {}, el("b", {}, key), input, datalist), note) };
  };
  const keys = (values, errors) => {
    // With errors only the keys of the recipe's file are known.
    for (const [key, { root }] of rows) if (!errors.length && !(key in values)) { root.remove(); rows.delete(key); }
    // Keys without a section come first.
    const ordered = Object.entries(values).sort(([a], [b]) => a.includes(".") - b.includes("."));
    for (const [key, value] of ordered) {
      const name = key.includes(".") ? key.split(".")[0].replace(/\[\d+\]/, "") : "", error = errors.find((error) => error.key === key);
      if (!sections.has(name)) sections.set(name, el("details", {}, el("summary", {}, name ? `[${name}]` : "the run")));
      if (!rows.has(key)) { rows.set(key, row_of(key)); sections.get(name).append(rows.get(key).root); }
      const { root, input, note, help } = rows.get(key);
      if (document.activeElement !== input) input.value = set.get(key) ?? value;
      root.classList.toggle("set", set.has(key));
      note.textContent = error?.message ?? help;
      note.classList.toggle("wrong", !!error);
      if (error) sections.get(name).open = true;
    }
    for (const section of sections.values()) if (!section.isConnected) $("start-keys").append(section);
    find();
  };
  const find = () => {
    const words = $("start-find").value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const details of $("start-keys").querySelectorAll("details")) {
      let shown = 0;
      for (const key of details.querySelectorAll(".key")) shown += !(key.hidden = !words.every((word) => key.dataset.text.includes(word)));
      details.hidden = !shown;
      if (words.length) details.open = shown > 0;
    }
  };
  const facts = (pairs) => el("dl", { class: "facts" }, ...pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  const follows = (found) => [...found.warnings.map((warning) => el("p", { class: "wrong" }, warning)), facts(Object.entries(found.facts)), el("h3", {}, "Left out, and derived"), facts(found.derived.map(({ key, value, reason }) => [`${key} = ${value}`, reason]))];
  const wrong = (errors) => errors.map((error) => el("p", { class: "wrong" }, `${error.at} ${error.message}`, el("small", {}, error.help ? ` ${error.help}` : "")));

  $("start-recipe").onchange = () => { set.clear(); rows.clear(); sections.clear(); $("start-keys").replaceChildren(); check(); };
  $("start-more").onchange = check;
  $("start-find").oninput = find;
  $("start-form").onsubmit = async (event) => {
    event.preventDefault();
    const name = $("start-name").value.trim();
    $("start-outcome").textContent = "starting …";
    $("start-run").disabled = true;
    try {
      await ask("/api/runs", signal, "POST", wanted({ name }));
      $("start-outcome").textContent = "";
      location.hash = new URLSearchParams({ run: name });
    } catch (error) { if (error.name !== "AbortError") { $("start-outcome").textContent = error.message; $("start-run").disabled = false; } }
  };
  check();
}
