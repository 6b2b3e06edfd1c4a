"use strict";
// Shows the comparison that the data element holds. Texts are set as text, never as markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const STEP = 50; // examples that are drawn at once
  const state = { order: "all", text: "", shown: STEP };

  function made(tag, text = "", kind = "") {
    const element = document.createElement(tag);
    element.textContent = text;
    if (kind) element.className = kind;
    return element;
  }

  // ---- light and dark ------------------------------------------------------------------------------------------
  const root = document.documentElement;
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const otherTheme = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; };

  // ---- scores --------------------------------------------------------------------------------------------------
  function drawScores() {
    $("title").textContent = data.title;
    for (const [place, letter] of data.letters.entries()) {
      const item = made("li");
      item.append(made("span", letter, "letter"), made("bdi", data.models[place]));
      $("models").append(item);
    }
    const head = made("tr");
    for (const name of data.head) {
      const cell = made("th", name);
      cell.scope = "col";
      head.append(cell);
    }
    $("scores").append(head);
    for (const row of data.rows) {
      const line = made("tr");
      for (const cell of row) line.append(made("td", cell));
      $("scores").append(line);
    }
    for (const note of data.notes) $("notes").append(made("li", note));
    $("protocol").textContent = data.protocol.join("\n");
  }

  // ---- examples ------------------------------------------------------------------------------------------------
  const best = (scores) => (data.smaller ? Math.min(...scores) : Math.max(...scores));
  const gain = (scores, place) => {
    const others = scores.filter((_, other) => other !== place);
    return data.smaller ? Math.min(...others) - scores[place] : scores[place] - Math.max(...others);
  };

  function chosen() {
    const text = state.text.toLocaleLowerCase();
    const all = data.examples.filter((one) =>
      !text || [one.source, one.reference, ...one.outputs].some((part) => part.toLocaleLowerCase().includes(text)));
    if (state.order === "all") return all;
    const place = Number(state.order);
    return all.filter((one) => gain(one.scores, place) > 0)
      .sort((one, other) => gain(other.scores, place) - gain(one.scores, place));
  }

  // The words of a translation; those that the reference does not have are marked.
  function marked(text, reference) {
    const known = new Map();
    for (const word of reference.split(" ")) known.set(word, (known.get(word) ?? 0) + 1);
    const element = made("dd", "", "text");
    element.dir = "auto";
    for (const [number, word] of text.split(" ").entries()) {
      if (number) element.append(" ");
      const left = known.get(word) ?? 0;
      known.set(word, left - 1);
      element.append(left > 0 ? word : made("mark", word));
    }
    return element;
  }

  function plain(list, label, text) {
    const element = made("dd", text, "text");
    element.dir = "auto";
    list.append(made("dt", label, "label"), element);
  }

  function article(one) {
    const box = made("article"), list = made("dl");
    box.append(made("span", one.place, "place"), list);
    if (one.source) plain(list, "source", one.source);
    plain(list, one.outputs.length ? "reference" : "text", one.reference);
    for (const [place, letter] of data.letters.entries()) {
      const name = made("dt"), value = one.scores[place];
      name.append(made("span", letter, "letter"));
      list.append(name, made("dd", value.toFixed(2), value === best(one.scores) ? "score best" : "score"));
      if (one.outputs.length) list.append(marked(one.outputs[place], one.reference));
    }
    return box;
  }

  function draw() {
    const found = chosen(), some = found.slice(0, state.shown);
    $("examples").replaceChildren(...some.map(article));
    $("status").textContent = `${some.length} of ${found.length} shown; underlined: not in the reference`;
    if (!data.examples.some((one) => one.outputs.length)) $("status").textContent = `${some.length} of ${found.length} shown`;
    $("more").hidden = some.length === found.length;
  }

  // ---- controls ------------------------------------------------------------------------------------------------
  function change(changes) {
    Object.assign(state, { shown: STEP }, changes);
    draw();
  }

  drawScores();
  $("heading").textContent = `Where they differ most (${data.score})`;
  for (const [value, name] of [["all", "largest difference"], ...data.letters.map((letter, place) => [String(place), `${letter} is best`])]) {
    const choice = made("option", name);
    choice.value = value;
    $("order").append(choice);
  }
  $("order").addEventListener("change", () => change({ order: $("order").value }));
  $("search").addEventListener("input", () => change({ text: $("search").value }));
  $("more").addEventListener("click", () => change({ shown: state.shown + STEP }));
  $("theme").addEventListener("click", otherTheme);
  addEventListener("keydown", (event) => {
    if (event.key === "t" && event.target !== $("search") && !event.ctrlKey && !event.metaKey) otherTheme();
  });
  draw();
})();
