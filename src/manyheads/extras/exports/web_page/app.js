// The page, and the worker in which the model runs: the same file, so that the page answers while the model computes.
// All files come from the folder of this one; after they are loaded, nothing is requested.

const here = new URL(".", import.meta.url);

// In the worker

async function serve() {
  const { env, AutoModelForSeq2SeqLM, AutoTokenizer } = await import("./runtime/transformers.min.js");
  env.allowRemoteModels = false;
  env.allowLocalModels = true;
  env.localModelPath = here.pathname; // an address would count as remote
  env.useBrowserCache = false;
  env.useWasmCache = false;
  env.backends.onnx.wasm.wasmPaths = new URL("runtime/", here).href;
  env.backends.onnx.wasm.numThreads = 1;
  env.backends.onnx.wasm.proxy = false;
  const settings = await (await fetch(new URL("page.json", here))).json();
  const tokenizer = await AutoTokenizer.from_pretrained("model");
  const model = await AutoModelForSeq2SeqLM.from_pretrained("model", {
    dtype: settings.dtype,
    device: "wasm",
    progress_callback: (event) => {
      if (event.status === "progress_total") postMessage({ kind: "progress", share: event.progress });
    },
  });

  async function translate(line) {
    const inputs = await tokenizer(line);
    const length = inputs.input_ids.dims[1];
    if (length > settings.max_len) {
      throw new Error(`A line has ${length} tokens, but the model reads at most ${settings.max_len}. Shorten the line.`);
    }
    const limit = Math.min(length + settings.max_len_offset, settings.max_len - 1);
    const output = await model.generate({ ...inputs, num_beams: 1, do_sample: false, max_new_tokens: limit });
    return tokenizer.decode(output.tolist()[0].map(Number), { skip_special_tokens: true }).trim();
  }

  onmessage = async ({ data }) => {
    try {
      postMessage({ kind: "line", job: data.job, index: data.index, text: await translate(data.line) });
    } catch (error) {
      postMessage({ kind: "failed", job: data.job, text: error.message });
    }
  };
  postMessage({ kind: "ready" });
}

// In the page

function show() {
  const find = (id) => document.getElementById(id);
  const [status, message, form, source, target] = ["status", "message", "form", "source", "target"].map(find);
  const [button, stop, copy] = ["translate", "stop", "copy"].map(find);
  let job = 0;
  let lines = [];
  let done = [];
  let isReady = false;
  const worker = new Worker(import.meta.url, { type: "module" });

  const rest = (text) => {
    status.textContent = text;
    button.disabled = !isReady;
    stop.disabled = true;
    copy.disabled = !target.textContent;
  };

  const next = () => {
    while (done.length < lines.length && !lines[done.length].trim()) done.push("");
    target.textContent = done.join("\n");
    if (done.length === lines.length) return rest("Ready.");
    status.textContent = `Translating line ${done.length + 1} of ${lines.length}.`;
    worker.postMessage({ job, index: done.length, line: lines[done.length].trim() });
  };

  worker.onmessage = ({ data }) => {
    if (data.kind === "progress") {
      status.textContent = `Loading the model: ${Math.round(data.share)} %. Nothing that you type leaves this computer.`;
    } else if (data.kind === "ready") {
      isReady = true;
      rest("Ready. The page works without a network now.");
    } else if (data.kind === "broken") {
      message.textContent = `The model cannot run here: ${data.text}`;
      status.textContent = "";
    } else if (data.job === job && data.kind === "line") {
      done.push(data.text);
      next();
    } else if (data.job === job) {
      message.textContent = data.text;
      rest("Ready.");
    }
  };
  worker.onerror = (event) => {
    event.preventDefault();
    message.textContent = `The model cannot run here: ${event.message || "its program could not be loaded"}.`;
    status.textContent = "";
  };

  form.onsubmit = (event) => {
    event.preventDefault();
    if (button.disabled) return;
    message.textContent = "";
    job += 1;
    [lines, done] = [source.value.split("\n"), []];
    if (!source.value.trim()) {
      target.textContent = "";
      message.textContent = "Enter a text.";
      return rest("Ready.");
    }
    [button.disabled, stop.disabled, copy.disabled] = [true, false, true];
    next();
  };
  stop.onclick = () => {
    job += 1;
    rest("Stopped.");
  };
  copy.onclick = async () => {
    try {
      await navigator.clipboard.writeText(target.textContent);
      status.textContent = "Copied.";
    } catch {
      message.textContent = "The browser does not allow copying; select the text instead.";
    }
  };
  source.onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  };
}

if (typeof document === "undefined") {
  serve().catch((error) => postMessage({ kind: "broken", text: error.message }));
} else {
  show();
}
