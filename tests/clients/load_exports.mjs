// Exports in transformers.js, with onnxruntime-node.
//
//     node tests/clients/load_exports.mjs MODULES FOLDER ...
//
// MODULES: the folder into which npm installed @huggingface/transformers. FOLDER: of exports_to_check.py.

import { readFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, ...folders] = process.argv.slice(2);
const home = join(resolve(modules), "node_modules", "@huggingface", "transformers");
const { AutoModelForSeq2SeqLM, AutoTokenizer, env } = await import(
  pathToFileURL(join(home, "dist", "transformers.node.mjs")).href
);
const { version } = JSON.parse(readFileSync(join(home, "package.json"), "utf8"));
env.allowRemoteModels = false;
env.allowLocalModels = true;

const same = (left, right) => left.length === right.length && left.every((id, place) => id === right[place]);
let failed = 0;

for (const folder of folders) {
  const expected = JSON.parse(readFileSync(join(folder, "expected.json"), "utf8"));
  env.localModelPath = `${dirname(folder)}/`;
  const name = `${folder.split("/").pop()}/onnx`;
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  const model = await AutoModelForSeq2SeqLM.from_pretrained(name, { dtype: "fp32" });
  let equal = 0;
  const wrong = [];
  for (const [index, text] of expected.texts.entries()) {
    const inputs = await tokenizer(text);
    const ids = inputs.input_ids.tolist()[0].map(Number);
    const output = await model.generate({
      ...inputs, num_beams: 1, do_sample: false, max_new_tokens: expected.limit,
    });
    const found = output.tolist()[0].map(Number).slice(1);
    const wanted = expected.greedy[index];
    const place = found.findIndex((id, at) => id !== wanted[at]);
    const isTie = place >= 0 && expected.margins[index][place] < 1e-4;
    if (same(ids, expected.sources[index]) && same(found, wanted)) equal += 1;
    else if (!isTie || !same(ids, expected.sources[index])) wrong.push(`${text}: ${found} instead of ${wanted}`);
  }
  if (wrong.length) failed += 1;
  const said = wrong.length ? `FAILED: ${wrong[0]}` : `greedy ${equal} of ${expected.texts.length} equal`;
  console.log(`transformers.js ${version}, ${folder.split("/").pop()}: ${said}`);
}
process.exit(failed ? 1 : 0);
