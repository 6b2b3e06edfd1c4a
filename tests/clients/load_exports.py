"""Exports in runtimes that others wrote, which is all that this program imports.

    python tests/clients/load_exports.py transformers|ctranslate2|onnxruntime|optimum FOLDER ...

A folder is one of `exports_to_check.py`. Prints a line for each model; exits with 1 after a failure.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Of a log-probability in float32, relative where it is beyond -1; two tokens nearer than _TIE may change places.
_LIMIT, _TIE = 1e-5, 1e-4
_ROWS = 8


class Expected:
    """What the model itself computed. folder: of the model and its exports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values: dict[str, Any] = json.loads((folder / "expected.json").read_text("utf-8"))
        arrays = np.load(folder / "expected.npz")
        self.rows = [arrays[f"row{index}"] for index in range(len(arrays.files))]

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def count(self, found: Sequence[list[int]], *, exact: bool = True) -> str:
        """Return how many greedy outputs are equal. Raises: AssertionError: one differs, and not by a tie."""
        differ = 0
        for ids, wanted, margins in zip(found, self.greedy, self.margins, strict=True):
            if ids == wanted:
                continue
            differ += 1
            place = next((i for i, pair in enumerate(zip(ids, wanted, strict=False)) if pair[0] != pair[1]), 0)
            assert not exact or margins[place] < _TIE, f"{ids} instead of {wanted}"
        return f"greedy {len(found) - differ} of {len(found)} equal"


def check_transformers(one: Expected) -> str:
    """Greedy search, four beams, log-probabilities; the tokenizer; and the model is saved again by transformers."""
    import torch
    import transformers

    source = one.folder / "transformers"
    if one.kind != "translator":
        return _check_reformer(one)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    assert [tokenizer(text).input_ids for text in one.texts] == one.sources
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(source).eval()
    greedy, counted = _generate(model, one)
    largest = 0.0
    for row, ids, output in zip(one.rows, one.sources, one.greedy, strict=False):
        start = torch.tensor([[one.bos_id, *output[:-1]]])
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), decoder_input_ids=start).logits[0]
        largest = max(largest, _deviation(logits.log_softmax(dim=-1).numpy(), row))
    assert largest < _LIMIT, f"log-probabilities deviate by {largest:.1e}"
    if not one.has_tables:  # Marian leaves its table of positions out when it is saved
        saved = one.folder / f"transformers-{transformers.__version__}"
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
    return f"{one.count(greedy)}, {counted}, log-probabilities {largest:.1e}"


def _check_reformer(one: Expected) -> str:
    import torch
    import transformers

    kind = "ReformerModelWithLMHead" if one.causal else "ReformerForMaskedLM"
    model = getattr(transformers, kind).from_pretrained(one.folder / "transformers").eval()
    model.lm_head.decoder.bias = model.lm_head.bias  # docs/exporting.md: version 5 leaves it out
    largest = 0.0
    for row, ids in zip(one.rows, one.texts, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        largest = max(largest, _deviation(logits.log_softmax(dim=-1).numpy(), row))
    assert largest < _LIMIT, f"log-probabilities deviate by {largest:.1e}"
    if transformers.__version__ > "5":
        model.lm_head.decoder.bias = None  # as it was; two names of one weight are not saved
    model.save_pretrained(one.folder / f"transformers-{transformers.__version__}")
    return f"log-probabilities {largest:.1e}, texts of {len(one.texts)} lengths"


def check_ctranslate2(one: Expected) -> str:
    """Greedy search in float32 and int8, log-probabilities in float32."""
    import ctranslate2

    reader, writer = one.pieces
    numbers = {piece: index for index, piece in enumerate(writer)}
    sources = [[reader[index] for index in ids[:-1]] for ids in one.sources]  # CTranslate2 adds EOS
    said = []
    for name in ("ctranslate2", "ctranslate2-int8"):
        translator = ctranslate2.Translator(str(one.folder / name))
        asked = {"beam_size": 1, "max_decoding_length": one.limit, "min_decoding_length": 0}
        found = translator.translate_batch(sources, **asked)
        ids = [[numbers[piece] for piece in each.hypotheses[0]] for each in found]
        whole = [[*row, one.eos_id] if len(row) < one.limit else row for row in ids]
        is_exact = name == "ctranslate2"
        said.append(f"{'float32' if is_exact else 'int8'}: {one.count(whole, exact=is_exact)}")
        outputs = [[writer[index] for index in row if index != one.eos_id] for row in one.greedy]
        scored = translator.score_batch(sources[: len(one.rows)], outputs[: len(one.rows)])
        apart = np.concatenate(
            [
                np.abs(np.array(each.log_probs[: len(ids)]) - _of_tokens(rows, ids, one))
                for each, rows, ids in zip(scored, one.rows, one.greedy, strict=False)
            ]
        )
        # Rounding to 8 bits is coarse in a model of 32 features: a single token may be far off.
        assert apart.max() < 10 * _LIMIT if is_exact else apart.mean() < 0.3, f"log-probabilities: {apart.mean():.1e}"
        said.append(f"log-probabilities {apart.max():.1e}" if is_exact else f"{apart.mean():.1e} in the mean")
    return ", ".join(said)


def check_onnxruntime(one: Expected) -> str:
    """The graphs with onnxruntime alone: a search of 20 lines, or segments with memories."""
    if one.kind == "transformer-xl":
        session = _open(one.folder / "onnx" / "onnx" / "model.onnx")
        memories = [given for given in session.get_inputs() if given.name.startswith("mems.")]
        largest = 0.0
        for ids, row in zip(one.texts, one.rows, strict=True):
            given = {each.name: np.zeros((1, 0, each.shape[2]), np.float32) for each in memories}
            parts, found = [ids[: len(ids) // 2 + 1], ids[len(ids) // 2 + 1 :]], []
            for part in parts:
                logits, *after = session.run(None, {"input_ids": np.array([part], np.int64), **given})
                given = {each.name: new for each, new in zip(memories, after, strict=True)}
                found.append(_log_softmax(logits[0]))
            largest = max(largest, _deviation(np.concatenate(found), row))
        assert largest < 2 * _LIMIT, f"log-probabilities deviate by {largest:.1e}"
        return f"log-probabilities {largest:.1e}, two segments"
    if one.kind != "translator":
        return ""
    exact = [_greedy(one.folder / "onnx", "", one, ids) for ids in one.sources]
    small = [_greedy(one.folder / "onnx-int8", "_quantized", one, ids) for ids in one.sources[:_ROWS]]
    near = sum(ids == wanted for ids, wanted in zip(small, one.greedy, strict=False))
    return f"float32: {one.count(exact)}, int8: greedy {near} of {len(small)} equal"


def _greedy(folder: Path, suffix: str, one: Expected, source: list[int]) -> list[int]:
    encoder = _open(folder / "onnx" / f"encoder_model{suffix}.onnx")
    decoder = _open(folder / "onnx" / f"decoder_model_merged{suffix}.onnx")
    ids, mask = np.array([source], np.int64), np.ones((1, len(source)), np.int64)
    (hidden,) = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
    pasts = [given for given in decoder.get_inputs() if given.name.startswith("past_")]
    given = {each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32) for each in pasts}
    given |= {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}
    output, names = [one.bos_id], [each.name for each in decoder.get_outputs()]
    while len(output) <= one.limit and output[-1] != one.eos_id:
        asked = {"input_ids": np.array([output[-1:]], np.int64), "use_cache_branch": np.array([len(output) > 1])}
        found = dict(zip(names, decoder.run(None, {**given, **asked}), strict=True))
        found["logits"][0, -1, [one.pad_id, one.bos_id]] = -np.inf
        output.append(int(found["logits"][0, -1].argmax()))
        given |= {each.name: found[each.name.replace("past_key_values", "present")] for each in pasts}
    return output[1:]


_SESSIONS: dict[Path, Any] = {}


def _open(path: Path) -> Any:
    if path not in _SESSIONS:
        onnxruntime = importlib.import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        _SESSIONS[path] = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return _SESSIONS[path]


def check_optimum(one: Expected) -> str:
    """ORTModelForSeq2SeqLM: greedy search and four beams, in batches with padding."""
    if one.kind != "translator":
        return ""
    from optimum.onnxruntime import ORTModelForSeq2SeqLM

    model = ORTModelForSeq2SeqLM.from_pretrained(one.folder / "onnx")
    greedy, counted = _generate(model, one)
    return f"{one.count(greedy)}, {counted}"


def _generate(model: Any, one: Expected) -> tuple[list[list[int]], str]:
    """Return the greedy outputs of a model with the interface of transformers, and what its four beams are like."""
    import torch

    greedy, beams, scores = [], [], []
    for ids, mask in _batches(one):
        batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        asked: dict[str, Any] = {**batch, "max_new_tokens": one.limit, "do_sample": False}
        greedy += [_cut(row, one) for row in model.generate(**asked, num_beams=1).tolist()]
        found = model.generate(
            **asked,
            **{"num_beams": 4, "length_penalty": one.length_penalty, "early_stopping": False},
            **{"return_dict_in_generate": True, "output_scores": True},
        )
        beams += [_cut(row, one) for row in found.sequences.tolist()]
        scores += found.sequences_scores.tolist()
    return greedy, _count_beams(one, beams, scores)


def _batches(one: Expected) -> Iterator[tuple[Any, Any]]:
    """Ids and masks of several sources, padded on the right."""
    for first in range(0, len(one.sources), _ROWS):
        some = one.sources[first : first + _ROWS]
        longest = max(map(len, some))
        ids = [[*row, *[one.pad_id] * (longest - len(row))] for row in some]
        yield np.array(ids, np.int64), np.array([[1] * len(row) + [0] * (longest - len(row)) for row in some], np.int64)


def _cut(row: list[int], one: Expected) -> list[int]:
    """Leave out the start token, and the padding after EOS."""
    row = row[1:]
    return row[: row.index(one.eos_id) + 1] if one.eos_id in row else row


def _count_beams(one: Expected, found: list[list[int]], scores: list[float]) -> str:
    equal = 0
    for ids, score, wanted, ours in zip(found, scores, one.beams, one.scores, strict=True):
        equal += ids == wanted
        assert ids == wanted or abs(score - ours) < _TIE, f"{ids} ({score}) instead of {wanted} ({ours})"
    return f"4 beams {equal} of {len(found)} equal"


def _deviation(found: Any, wanted: Any) -> float:
    """Return the largest deviation of log-probabilities; those beyond -1 are compared relatively, as floats round."""
    return float((np.abs(found - wanted) / np.maximum(1, np.abs(wanted))).max())


def _log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _of_tokens(rows: Any, ids: list[int], one: Expected) -> Any:
    """Log-probabilities of the tokens of an output if padding and the start token cannot be produced."""
    rows = rows.copy()
    rows[:, [one.pad_id, one.bos_id]] = -np.inf
    return _log_softmax(rows)[np.arange(len(ids)), ids]


def main() -> int:
    checks: dict[str, tuple[Callable[[Expected], str], str]] = {
        "transformers": (check_transformers, "transformers"),
        "ctranslate2": (check_ctranslate2, "ctranslate2"),
        "onnxruntime": (check_onnxruntime, "onnx"),
        "optimum": (check_optimum, "onnx"),
    }
    check, needed = checks[sys.argv[1]]
    runtime = importlib.import_module("optimum.version" if sys.argv[1] == "optimum" else sys.argv[1])
    if sys.argv[1] in ("transformers", "optimum"):
        logs = importlib.import_module("transformers.utils.logging")
        logs.set_verbosity_error()
        logs.disable_progress_bar()
    failed = 0
    for folder in map(Path, sys.argv[2:]):
        if not (folder / needed).is_dir():
            continue
        try:
            said = check(Expected(folder))
        except AssertionError as error:
            failed += 1
            said = f"FAILED: {error}"
        if said:
            print(f"{sys.argv[1]} {runtime.__version__}, {folder.name}: {said}", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
