// The page of a manyheads server. All texts are set by textContent, so that neither models nor users can write markup.
"use strict";

const get = (id) => document.getElementById(id);
const state = { models: [], key: "", translation: null, written: null };

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

// ---- requests

class RequestError extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function request(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (state.key) headers.authorization = `Bearer ${state.key}`;
  const options = body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers, signal };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server does not answer. Is it still running?", 0, 0);
  }
  if (answer.ok) return answer;
  let message = `The server answered ${answer.status}.`;
  try {
    message = (await answer.json()).error.message;
  } catch { /* not our error format */ }
  get("key-form").hidden = answer.status !== 401;
  throw new RequestError(message, answer.status, Number(answer.headers.get("retry-after")) || 0);
}

// Show an error beside the input. A full server (429) is asked again after a countdown.
function showError(place, error, again) {
  clearInterval(place.timer);
  if (!error) {
    place.textContent = "";
    return;
  }
  if (error.status !== 429) {
    place.textContent = error.message;
    return;
  }
  let left = Math.max(1, error.retryAfter);
  const tell = () => { place.textContent = `The server is busy; trying again in ${left} s.`; };
  tell();
  place.timer = setInterval(() => {
    left -= 1;
    if (left > 0) return tell();
    clearInterval(place.timer);
    again();
  }, 1000);
}

function asPrograms(prefix, path, body) {
  const text = JSON.stringify(body, null, 2);
  const quoted = text.replaceAll("'", "'\\''");
  const key = state.key ? " \\\n  -H 'authorization: Bearer KEY'" : "";
  get(`${prefix}-curl`).textContent =
    `curl ${location.origin}${path} -H 'content-type: application/json'${key} \\\n  -d '${quoted}'`;
  get(`${prefix}-python`).textContent =
    `import json, urllib.request\n\nbody = json.loads(r"""${text.replaceAll('"""', '""\\u0022')}""")\n` +
    `request = urllib.request.Request(\n    "${location.origin}${path}",\n    json.dumps(body).encode(),\n` +
    `    {"content-type": "application/json"${state.key ? ', "authorization": "Bearer KEY"' : ""}},\n)\n` +
    "print(json.load(urllib.request.urlopen(request)))";
}

async function copy(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copying is not permitted";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

// ---- tokens

const readable = (token) => token.replaceAll("\u2581", " ").replaceAll("</s>", "end");
const named = (text) => (text === "\n" ? "line break" : text === " " ? "space" : text === "" ? "end" : text.trim() || "blank");
const doubt = (logProb) => (logProb > -0.35 ? "" : logProb > -1.2 ? " doubt-1" : logProb > -2.5 ? " doubt-2" : " doubt-3");
const percent = (logProb) => `${(100 * Math.exp(logProb)).toPrecision(2)} %`;

function choose(title, alternatives, take) {
  const list = get("choices-list");
  list.replaceChildren();
  get("choices-title").textContent = title;
  for (const one of alternatives) {
    const item = make("li");
    const button = make("button", `${named(one.text ?? readable(one.token))}  (${percent(one.log_prob)})`);
    button.type = "button";
    button.addEventListener("click", () => { get("choices").close(); take(one); });
    item.append(button);
    list.append(item);
  }
  get("choices").showModal();
}

// ---- translation

const translating = { controller: null, timer: 0 };

function languagesOf(model) {
  return model.languages[0] || null;
}

function chosenModel() { // the model, and for one of several languages the language
  const { value, dataset } = get("t-model").selectedOptions[0];
  return { model: value, ...(dataset.target && { target_lang: dataset.target }) };
}

function translatorBody(text) {
  return {
    ...chosenModel(), text, num_beams: Number(get("t-beams").value) || 1,
    num_return_sequences: Math.min(Number(get("t-count").value) || 1, Number(get("t-beams").value) || 1),
    alignments: true, top_log_probs: 5,
  };
}

// The lines of the field for terms, as the server reads them: source, tab, target.
function termLines() {
  return get("t-terms").value.split("\n").filter((line) => line.trim())
    .map((line) => line.includes("\t") ? line : line.replace(/\s*(=|\u2192)\s*/, "\t")).join("\n");
}

async function translate() {
  clearTimeout(translating.timer);
  if (translating.controller) translating.controller.abort();
  const text = get("t-source").value;
  const target = get("t-target");
  showError(get("t-message"), null);
  const terms = termLines();
  asPrograms("t", "/v1/translate", { ...chosenModel(), text, ...(terms && { terms }) });
  if (!text.trim()) {
    state.translation = null;
    target.classList.remove("busy");
    return showTranslation();
  }
  const controller = new AbortController();
  translating.controller = controller;
  target.classList.add("busy");
  try {
    const body = { ...translatorBody(text), ...(terms && { terms }) };
    const answer = await request("/v1/translate", body, controller.signal);
    const [found] = (await answer.json()).translations;
    state.translation = { text, sentences: found.sentences, chosen: found.sentences.map(() => 0) };
    showTranslation();
  } catch (error) {
    if (error.name === "AbortError") return;
    showError(get("t-message"), error, translate);
  }
  if (translating.controller === controller) target.classList.remove("busy");
}

function translatedText() {
  const found = state.translation;
  if (!found) return "";
  let text = "", place = 0;
  found.sentences.forEach((sentence, number) => {
    const points = Array.from(found.text);  // the server counts characters, JavaScript counts UTF-16 units
    text += points.slice(place, sentence.start).join("") + sentence.candidates[found.chosen[number]].text;
    place = sentence.end;
  });
  return text + Array.from(found.text).slice(place).join("");
}

function showTranslation() {
  const found = state.translation;
  get("t-target").textContent = translatedText();
  get("t-copy").disabled = !found;
  get("t-sentences").replaceChildren(...(found ? found.sentences.map(sentenceView) : []));
}

// A sentence: the tokens of both sides, which show what attends to what, and the list of translations.
function sentenceView(sentence, number) {
  const box = make("div", undefined, "sentence");
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `Sentence ${number + 1}`);
  const chosen = state.translation.chosen[number];
  const best = sentence.candidates[chosen];
  const weights = chosen === 0 ? sentence.alignment : null;
  const sources = sentence.source_tokens.map((token) => tokenButton(readable(token)));
  const targets = best.tokens.map((token, place) => {
    const button = tokenButton(readable(token), best.token_log_probs[place]);
    button.addEventListener("click", () => offer(number, place));
    return button;
  });
  const clear = () => [...sources, ...targets].forEach((one) => one.style.removeProperty("background-color"));
  const light = (buttons, values) => {
    const most = Math.max(...values, 1e-9);
    buttons.forEach((one, place) => {
      one.style.setProperty("background-color", `rgba(var(--mark), ${(0.45 * values[place]) / most})`);
    });
  };
  const watch = (button, show) => {
    for (const name of ["mouseenter", "focus"]) button.addEventListener(name, () => { clear(); show(); });
    for (const name of ["mouseleave", "blur"]) button.addEventListener(name, clear);
  };
  if (weights) {
    targets.forEach((one, row) => watch(one, () => light(sources, weights[row])));
    sources.forEach((one, column) => watch(one, () => light(targets, weights.map((row) => row[column]))));
  }
  box.append(make("div", "Text", "label"), tokenList(sources), make("div", "Translation", "label"), tokenList(targets));
  if (sentence.candidates.length > 1) box.append(make("div", "Alternatives", "label"), candidateList(sentence, number));
  return box;
}

function tokenButton(text, logProb) {
  const button = make("button", text, `token${logProb === undefined ? "" : doubt(logProb)}`);
  button.type = "button";
  if (logProb !== undefined) button.title = `probability ${percent(logProb)}`;
  return button;
}

function tokenList(buttons) {
  const list = make("ul", undefined, "tokens");
  for (const button of buttons) {
    const item = make("li");
    item.append(button);
    list.append(item);
  }
  return list;
}

function candidateList(sentence, number) {
  const list = make("ol", undefined, "candidates");
  sentence.candidates.forEach((candidate, place) => {
    const item = make("li");
    const button = make("button", `${candidate.text} `);
    button.type = "button";
    button.setAttribute("aria-pressed", String(place === state.translation.chosen[number]));
    const score = candidate.score === null ? "" : candidate.score.toFixed(3);
    button.append(make("span", `(${score})`, "score"));
    if (place === state.translation.chosen[number]) button.lastChild.className = "";
    button.addEventListener("click", () => {
      state.translation.chosen[number] = place;
      showTranslation();
    });
    item.append(button);
    list.append(item);
  });
  return list;
}

// Offer other words at a place of a translation; the one that is taken is forced, and the rest is searched again.
function offer(number, place) {
  const sentence = state.translation.sentences[number];
  const candidate = sentence.candidates[state.translation.chosen[number]];
  const top = candidate.top_log_probs ? candidate.top_log_probs[place] : null;
  if (!top) return force(number, candidate.token_ids.slice(0, place + 1));
  choose(`Instead of “${readable(candidate.tokens[place]).trim()}”`, top.filter((one) => one.token !== "</s>"), (one) => {
    force(number, [...candidate.token_ids.slice(0, place), one.token_id]);
  });
}

async function force(number, ids) {
  const found = state.translation;
  const sentence = found.sentences[number];
  const text = Array.from(found.text).slice(sentence.start, sentence.end).join("");
  try {
    const body = { ...translatorBody(text), split_sentences: false, forced_prefix_ids: ids };
    const answer = await request("/v1/translate", body);
    const [again] = (await answer.json()).translations;
    if (state.translation !== found) return;
    found.sentences[number] = { ...again.sentences[0], start: sentence.start, end: sentence.end };
    found.chosen[number] = 0;
    showTranslation();
    showError(get("t-message"), null);
  } catch (error) {
    showError(get("t-message"), error, () => force(number, ids));
  }
}

function reverseOf(model) {
  const own = languagesOf(model);
  return own && state.models.find((other) => {
    const languages = other.task === "translation" && languagesOf(other);
    return languages && languages.source === own.target && languages.target === own.source;
  });
}

function changeTranslator() {
  const model = state.models.find((one) => one.id === get("t-model").value);
  get("t-swap").hidden = !reverseOf(model);
  const languages = languagesOf(model);
  if (languages) {
    get("t-source").lang = languages.source;
    get("t-target").lang = languages.target;
  }
  translate();
}

function swap() {
  const model = state.models.find((one) => one.id === get("t-model").value);
  get("t-source").value = translatedText() || get("t-source").value;
  get("t-model").value = reverseOf(model).id;
  changeTranslator();
}

// ---- documents

const waiting = { controller: null };

async function ask(path, body, signal) {
  const headers = state.key ? { authorization: `Bearer ${state.key}` } : {};
  let answer;
  try {
    answer = await fetch(path, { method: "POST", headers, body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server does not answer. Is it still running?", 0, 0);
  }
  if (answer.ok) return answer;
  let message = `The server answered ${answer.status}.`;
  try {
    const told = await answer.json();
    message = told.message ?? told.error.message;
  } catch { /* not our error format */ }
  throw new RequestError(message, answer.status, 0);
}

const pause = (seconds) => new Promise((resolve) => { setTimeout(resolve, 1000 * seconds); });

// Upload a document, wait until it is translated, and offer the translation for download.
async function translateFile(file) {
  if (waiting.controller) waiting.controller.abort();
  const controller = new AbortController();
  waiting.controller = controller;
  const told = get("t-file-message");
  const form = new FormData();
  const { model, target_lang: target } = chosenModel();
  const fields = { model, target_lang: target, terms: termLines(), column: get("t-columns").value.split(/\s*,\s*/).join("\n") };
  for (const [name, value] of Object.entries(fields)) if (value) form.append(name, value);
  form.append("file", file);
  get("t-more").open = true;
  get("t-cancel").hidden = false;
  told.replaceChildren(`${file.name} is being sent.`);
  try {
    const handle = await (await ask("/v2/document", form, controller.signal)).json();
    const place = `/v2/document/${handle.document_id}`;
    const key = () => new URLSearchParams({ document_key: handle.document_key });
    for (let found = {}; found.status !== "done";) {
      await pause(0.5);
      if (controller.signal.aborted) return;
      found = await (await ask(place, key(), controller.signal)).json();
      if (found.status === "error") throw new RequestError(found.error_message, 400, 0);
      const left = found.seconds_remaining ? `, about ${found.seconds_remaining} s left` : "";
      told.replaceChildren(`${file.name} is being translated${left}.`);
    }
    const link = make("a", `Save the translation of ${file.name}`);
    link.href = URL.createObjectURL(await (await ask(`${place}/result`, key(), controller.signal)).blob());
    link.download = file.name.replace(/(\.[^.]*)?$/, (ending) => `.${target || "translated"}${ending}`);
    told.replaceChildren(link);
    link.focus();
  } catch (error) {
    if (error.name !== "AbortError") told.replaceChildren(error.message);
  }
  if (waiting.controller === controller) get("t-cancel").hidden = true;
}

function stopWaiting() {
  if (waiting.controller) waiting.controller.abort();
  get("t-file-message").replaceChildren();
  get("t-cancel").hidden = true;
}

function takeDrop(event) {
  const { files } = event.dataTransfer;
  if (!files.length) return;
  event.preventDefault();
  if (event.type !== "drop") return;
  if (files.length === 1) {
    translateFile(files[0]);
  } else {
    get("t-more").open = true;
    get("t-file-message").replaceChildren(`Drop one document at a time; of these ${files.length} none was sent.`);
  }
}

// ---- writing

const writing = { controller: null };

function writerBody(prompt) {
  const temperature = Number(get("w-temperature").value);
  const sampling = temperature > 0
    ? { do_sample: true, temperature, top_p: Number(get("w-top-p").value) || 1 } : { do_sample: false };
  return {
    model: get("w-model").value, prompt, max_new_tokens: Number(get("w-tokens").value) || 1,
    seed: Number(get("w-seed").value) || 0, num_return_sequences: 1, ...sampling,
  };
}

async function* serverEvents(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      const name = /^event: (.*)$/m.exec(block);
      const data = /^data: (.*)$/m.exec(block);
      if (data) yield [name ? name[1] : "", JSON.parse(data[1])];
    }
  }
}

// Continue the prompt; kept: tokens after it that are continued as they are.
async function write(kept = []) {
  if (writing.controller) writing.controller.abort();
  const controller = new AbortController();
  writing.controller = controller;
  const prompt = get("w-prompt").value;
  const output = get("w-output");
  state.written = { prompt, tokens: [] };
  output.replaceChildren();
  kept.forEach(addToken);
  showError(get("w-message"), null);
  asPrograms("w", "/v1/generate", writerBody(prompt + writtenText()));
  setWriting(true);
  try {
    const body = { ...writerBody(prompt), stream: true, top_log_probs: 5 };
    if (kept.length) {
      const tokens = await request("/tokenize", { model: body.model, prompt }, controller.signal);
      delete body.prompt;
      body.prompt_ids = [...(await tokens.json()).tokens, ...kept.map((token) => token.token_id)];
    }
    const answer = await request("/v1/generate", body, controller.signal);
    for await (const [name, data] of serverEvents(answer)) {
      if (name === "token") addToken(data);
      if (name === "error") throw new RequestError(data.error.message, 500, 0);
      if (name === "done") showMemory(data.usage);
    }
  } catch (error) {
    if (error.name !== "AbortError") showError(get("w-message"), error, () => write(kept));
  }
  if (writing.controller === controller) setWriting(false);
}

function addToken(token) {
  const tokens = state.written.tokens;
  const place = tokens.push(token) - 1;
  if (!token.text) return;
  const span = make("span", token.text, `piece${doubt(token.log_prob)}`);
  span.setAttribute("role", "button");
  span.title = `probability ${percent(token.log_prob)}`;
  span.tabIndex = get("w-output").childElementCount ? -1 : 0;  // one stop of Tab; arrow keys move on from there
  if (token.top_log_probs) {
    span.addEventListener("click", () => {
      choose(`Instead of “${named(token.text)}”`, token.top_log_probs, (one) => {
        write([...tokens.slice(0, place), { ...one, top_log_probs: token.top_log_probs }]);
      });
    });
  }
  get("w-output").append(span);
}

function moveInOutput(event) {
  const from = event.target.closest(".piece");
  if (!from) return;
  const next = { ArrowRight: from.nextElementSibling, ArrowLeft: from.previousElementSibling }[event.key];
  if (next) {
    from.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  } else if (event.key === "Enter" || event.key === " ") {
    from.click();
  } else return;
  event.preventDefault();
}

function writtenText() {
  return state.written ? state.written.tokens.map((token) => token.text).join("") : "";
}

function setWriting(isOn) {
  get("w-start").disabled = isOn;
  get("w-stop").disabled = !isOn;
  get("w-keep").disabled = isOn || !writtenText();
  get("w-copy").disabled = isOn || !writtenText();
  get("w-output").classList.toggle("busy", isOn);
}

function showMemory(usage) {
  const model = state.models.find((one) => one.id === get("w-model").value);
  const total = usage.prompt_tokens + usage.completion_tokens;
  const memory = model.memory_len;
  get("w-memory").textContent = `${total} tokens were read and written.` + (memory
    ? ` The model's memory holds ${Math.min(total, memory)} of at most ${memory} tokens per layer.` : "");
}

function keep() {
  get("w-prompt").value += writtenText();
  state.written = null;
  get("w-output").replaceChildren();
  setWriting(false);
  get("w-prompt").focus();
}

// ---- start

function show(mode) {
  for (const one of ["translate", "write"]) {
    get(one).hidden = one !== mode;
    get(`show-${one}`).setAttribute("aria-pressed", String(one === mode));
  }
}

function fill(select, models) {
  const options = models.flatMap((model) => (model.languages.length ? model.languages : [null]).map((languages) => {
    const option = make("option", languages ? `${model.id} (${languages.source} → ${languages.target})` : model.id);
    option.value = model.id;
    if (model.languages.length > 1) option.dataset.target = languages.target;
    return option;
  }));
  select.replaceChildren(...options);
}

async function load() {
  try {
    state.models = (await (await request("/v1/models")).json()).data;
    get("status").textContent = "";
  } catch (error) {
    get("status").textContent = error.message;
    if (error.status === 503) setTimeout(load, 1000 * Math.max(1, error.retryAfter)); // the models are being loaded
    return;
  }
  const translators = state.models.filter((model) => model.task === "translation");
  const writers = state.models.filter((model) => model.task !== "translation");
  fill(get("t-model"), translators);
  fill(get("w-model"), writers);
  get("show-translate").hidden = !translators.length;
  get("show-write").hidden = !writers.length;
  show(translators.length ? "translate" : "write");
  if (translators.length) changeTranslator();
}

function listen() {
  get("show-translate").addEventListener("click", () => show("translate"));
  get("show-write").addEventListener("click", () => show("write"));
  get("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    state.key = get("key").value;
    get("key-form").hidden = true;
    load();
  });
  get("t-source").addEventListener("input", () => {
    clearTimeout(translating.timer);
    translating.timer = setTimeout(translate, 300);
  });
  get("t-source").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) translate();
  });
  get("t-terms").addEventListener("input", () => {
    clearTimeout(translating.timer);
    translating.timer = setTimeout(translate, 1000);
  });
  get("t-file").addEventListener("change", () => {
    if (get("t-file").files.length) translateFile(get("t-file").files[0]);
    get("t-file").value = "";
  });
  get("t-cancel").addEventListener("click", stopWaiting);
  for (const name of ["dragover", "drop"]) get("translate").addEventListener(name, takeDrop);
  for (const id of ["t-beams", "t-count"]) get(id).addEventListener("change", translate);
  get("t-model").addEventListener("change", changeTranslator);
  get("t-swap").addEventListener("click", swap);
  get("t-copy").addEventListener("click", () => copy(get("t-copy"), translatedText()));
  get("w-start").addEventListener("click", () => write());
  get("w-prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) write();
  });
  get("w-stop").addEventListener("click", () => { if (writing.controller) writing.controller.abort(); });
  get("w-output").addEventListener("keydown", moveInOutput);
  get("w-keep").addEventListener("click", keep);
  get("w-copy").addEventListener("click", () => copy(get("w-copy"), writtenText()));
  get("choices-close").addEventListener("click", () => get("choices").close());
}

listen();
load();
