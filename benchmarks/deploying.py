"""One translation model in every format: time and memory of the export, size, speed and BLEU; the table of
docs/deploying.md.

    python benchmarks/deploying.py runs/demo --json FILE --markdown FILE [--runtime web-runtime] [--rounds 5]

The test sentences of the embedded corpus (English to German) are translated greedily, in batches of 32 of similar
length, with the same number of threads everywhere. All sides are loaded, warm up, and then translate everything in
turn, round by round; other work on the machine makes the figures worthless. `manyheads export` runs as a user starts
it, with its check. The page of the format web runs the graphs of onnx in a browser; only its export is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from machine import machine_class

from manyheads import Translator
from manyheads.data.corpora import load_tatoeba
from manyheads.errors import ManyHeadsError
from manyheads.evaluation.bleu import corpus_bleu
from manyheads.extras.exports.onnx import Decoder
from manyheads.text.of_folder import load_tokenizer

ROWS, MOST_TOKENS = 32, 100
Texts = Sequence[str]
Translate = Callable[[Texts], list[str]]
EXPORTS = {
    "transformers": ["--to", "transformers"],
    "ctranslate2": ["--to", "ctranslate2"],
    "ctranslate2 int8": ["--to", "ctranslate2", "--quantization", "int8"],
    "onnx": ["--to", "onnx"],
    "onnx int8": ["--to", "onnx", "--quantization", "int8"],
    "web": ["--to", "web"],
    "web int8": ["--to", "web", "--quantization", "int8"],
}


def export(model: Path, target: Path, options: list[str]) -> dict[str, Any]:
    """Run the command. Returns: seconds, highest resident set and size of the folder in bytes, and its comparison."""
    command = [sys.executable, "-m", "manyheads", "export", str(model), "--output", str(target), "--json", *options]
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complaint:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=said, stderr=complaint)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        complaint.seek(0)
        if process.returncode:
            return {"refused": complaint.read().decode().strip()}
        answer = json.load(said)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "num_bytes": answer["num_bytes"],
        "check": answer["check"],
        "export_seconds": seconds,
        "export_peak_bytes": peak,
    }


def ours(model: Path) -> Translate:
    translator = Translator.from_pretrained(model, device="cpu")

    def translate(texts: Texts) -> list[str]:
        found = translator.translate(
            list(texts), num_beams=1, max_new_tokens=MOST_TOKENS, max_tokens=ROWS * MOST_TOKENS
        )
        return list(found)

    return translate


def with_ctranslate2(folder: Path, model: Path, threads: int) -> Translate:
    import ctranslate2

    tokenizer = load_tokenizer(model)
    names = "source_vocabulary.json", "target_vocabulary.json"
    shared = folder / "shared_vocabulary.json"
    reader, writer = (json.loads((shared if shared.exists() else folder / name).read_text("utf-8")) for name in names)
    ids = {piece: index for index, piece in enumerate(writer)}
    translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=threads)

    def translate(texts: Texts) -> list[str]:
        found = translator.translate_batch(
            [[reader[index] for index in tokenizer.source.encode(text)] for text in texts],
            beam_size=1,
            max_decoding_length=MOST_TOKENS,
            min_decoding_length=0,
        )
        return tokenizer.target.decode_batch([[ids[piece] for piece in one.hypotheses[0]] for one in found])

    return translate


def with_transformers(folder: Path) -> Translate:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()

    @torch.inference_mode()
    def translate(texts: Texts) -> list[str]:
        batch = tokenizer(list(texts), return_tensors="pt", padding=True)
        found = model.generate(**batch, num_beams=1, do_sample=False, max_new_tokens=MOST_TOKENS)
        return list(tokenizer.batch_decode(found, skip_special_tokens=True))

    return translate


def with_onnxruntime(folder: Path, model: Path, suffix: str, threads: int) -> Translate:
    tokenizer = load_tokenizer(model)
    decoder, reader, writer = Decoder(folder, suffix, threads), tokenizer.source, tokenizer.target
    banned = sorted({writer.pad_id, writer.bos_id})

    def translate(texts: Texts) -> list[str]:
        inputs = decoder.start([[*reader.encode(text), reader.eos_id] for text in texts], writer.pad_id)
        ids = np.full((len(texts), 1), writer.bos_id, np.int64)
        has_ended = np.zeros(len(texts), bool)
        while ids.shape[1] <= MOST_TOKENS and not has_ended.all():
            logits, inputs = decoder.step(ids[:, -1:], inputs)
            logits[:, -1, banned] = -np.inf
            chosen = np.where(has_ended, writer.pad_id, logits[:, -1].argmax(axis=-1))
            has_ended |= chosen == writer.eos_id
            ids = np.concatenate([ids, chosen[:, None]], axis=1)
        plain = [[index for index in row if index not in (*banned, writer.eos_id)] for row in ids.tolist()]
        return writer.decode_batch(plain)

    return translate


def whole(translate: Translate, texts: Texts) -> list[str]:
    """Translate in batches of similar length; the results are in the order of the texts."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found = [""] * len(texts)
    for first in range(0, len(order), ROWS):
        some = order[first : first + ROWS]
        for index, text in zip(some, translate([texts[index] for index in some]), strict=True):
            found[index] = text.strip()
    return found


def open_sides(model: Path, work: Path, threads: int) -> dict[str, Callable[[], Translate]]:
    return {
        "manyheads": lambda: ours(model),
        "transformers": lambda: with_transformers(work / "transformers"),
        "ctranslate2": lambda: with_ctranslate2(work / "ctranslate2", model, threads),
        "ctranslate2 int8": lambda: with_ctranslate2(work / "ctranslate2 int8", model, threads),
        "onnx": lambda: with_onnxruntime(work / "onnx", model, "", threads),
        "onnx int8": lambda: with_onnxruntime(work / "onnx int8", model, "_quantized", threads),
    }


def measure(model: Path, work: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return name -> figures of every format; `refused` holds the reason where there are none."""
    sides: dict[str, dict[str, Any]] = {"manyheads": {"num_bytes": (model / "model.safetensors").stat().st_size}}
    for name, asked in EXPORTS.items():
        if name.startswith("web"):
            asked = [*asked, "--runtime", options.runtime] if options.runtime else asked
        sides[name] = export(model, work / name, asked)
        print(name, sides[name], file=sys.stderr, flush=True)
    pairs = load_tatoeba("test")[: options.sentences]
    texts, references = [source for source, _ in pairs], [target for _, target in pairs]
    opened: dict[str, Translate] = {}
    for name, open_side in open_sides(model, work, torch.get_num_threads()).items():
        if "refused" in sides[name]:
            continue
        start = time.perf_counter()
        try:
            opened[name] = open_side()
        except ManyHeadsError as error:
            sides[name] = {"refused": str(error)}
            continue
        sides[name]["load_seconds"] = time.perf_counter() - start
        whole(opened[name], texts[: 2 * ROWS])
    outputs: dict[str, list[str]] = {}
    for number in range(options.rounds):
        for name, translate in opened.items():
            start = time.perf_counter()
            outputs[name] = whole(translate, texts)
            sides[name].setdefault("seconds", []).append(time.perf_counter() - start)
            print(f"round {number + 1}, {name}: {sides[name]['seconds'][-1]:.2f} s", file=sys.stderr, flush=True)
    for name, found in outputs.items():
        sides[name]["bleu"] = corpus_bleu(found, references).value
        sides[name]["num_equal"] = sum(a == b for a, b in zip(found, outputs["manyheads"], strict=True))
    return sides


def table(result: dict[str, Any]) -> str:
    """Return Markdown: a line for each format."""
    lines = [
        "| format | size (MB) | sentences/s | of ours | BLEU | equal | export (s) | export (MB) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = result["sides"]["manyheads"]["seconds"]
    for name, side in result["sides"].items():
        if "refused" in side:
            lines.append(f"| {name} | refused: {side['refused'].splitlines()[-1][:90]} | | | | | | |")
            continue
        cells = [f"{side['num_bytes'] / 1e6:.1f}", "", "", "", ""]
        if "seconds" in side:
            ratios = [own / theirs for own, theirs in zip(base, side["seconds"], strict=True)]
            cells[1:] = [
                f"{result['num_sentences'] / median(side['seconds']):.0f}",
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{side['bleu']:.2f}",
                f"{side['num_equal']}",
            ]
        made = (
            [f"{side['export_seconds']:.1f}", f"{side['export_peak_bytes'] / 1e6:.0f}"] if "check" in side else ["", ""]
        )
        lines.append(f"| {name} | {' | '.join([*cells, *made])} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder, or a run's folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--runtime", help="for the format web: the folder into which npm installed transformers.js")
    options = parser.parse_args()
    model = options.model / "model" if (options.model / "model").is_dir() else options.model
    with tempfile.TemporaryDirectory() as name:
        sides = measure(model, Path(name), options)
    result = {
        "model": str(options.model),
        "machine": {"class": machine_class(), "processor": platform.processor() or platform.machine()},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "num_sentences": min(options.sentences, len(load_tatoeba("test"))),
        "sides": sides,
    }
    text = table(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if options.markdown:
        options.markdown.write_text(text, "utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
