// Changes of a run's settings from the next step on, which a reader with the token may order.
async function changes(name, signal) {
  const path = `${path_of(name)}/change`, line = el("input", { id: "change-line", list: "change-keys", size: 34, placeholder: "train.lr=1e-4", autocomplete: "off", spellcheck: "false" });
  const keys = el("datalist", { id: "change-keys" }), outcome = el("output", { id: "changed", class: "outcome" });
  const form = el("form", { class: "pick" }, el("label", {}, "Change from the next step on ", line), keys, el("button", { class: "action" }, "Change"), outcome);
  // Values of now, each as the line that sets it.
  const fill = async () => keys.replaceChildren(...Object.entries(await ask_json(path, signal)).map(([key, value]) => el("option", { value: `${key}=${value}` })));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    outcome.textContent = "";
    try {
      const { at } = await (await ask(path, signal, "POST", JSON.stringify({ set: [line.value.trim()] }))).json();
      outcome.textContent = `from step ${at} on: ${line.value.trim()}`;
      line.value = "";
      await fill();
    } catch (error) { if (error.name !== "AbortError") outcome.textContent = error.message; }
  });
  $("orders").append(form);
  line.addEventListener("focus", () => fill().catch((error) => { outcome.textContent = error.message; }), { once: true });
}
