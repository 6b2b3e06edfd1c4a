"""Models, their exports, and what each export must compute: the input of `load_exports.py` and `load_exports.mjs`.

A folder for each model:

    model/          ours
    transformers/   ctranslate2/  ctranslate2-int8/  onnx/  onnx-int8/      where the format holds the model
    expected.json   sources and greedy and beam outputs as ids; special ids; texts
    expected.npz    log-probabilities of the first outputs, with teacher forcing; of a language model, of its texts
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from manyheads.catalogue import build_model
from manyheads.data.corpora import load_tatoeba
from manyheads.decoding.search import search_all
from manyheads.decoding.settings import DecodingSettings
from manyheads.extras.exports import ExportOptions
from manyheads.extras.exports.engine import export_model
from manyheads.models.composites import LanguageModel, Seq2Seq
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import load, save_pretrained
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.of_folder import load_tokenizer
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

__all__ = ["copy_given", "write_expected", "write_exports", "write_tiny"]

# Penalty and limit of both searches, and how many outputs have their log-probabilities compared.
_LENGTH_PENALTY, _MOST_TOKENS, _NUM_SCORED = 1.0, 40, 20
_NUM_STEPS, _NUM_ROWS = 300, 32
_SIZES: dict[str, Any] = {"d_model": 32, "num_heads": 2, "d_ff": 48, "num_encoder_layers": 2, "num_decoder_layers": 2}
_HASHED: dict[str, Any] = {
    **{"vocab_size": 60, "d_model": 24, "num_heads": 2, "d_ff": 40, "num_layers": 4, "layers": ("local", "lsh")},
    **{"max_len": 64, "num_buckets": (2, 4), "chunk_len": 4, "exact_len": 4, "local_chunk_len": 8, "local_wrap": True},
    **{"visible": "chunk", "look_across_rounds": True, "wrap": True, "norm_eps": 1e-12, "num_hashes": 1},
    **{"shared_rotations": True, "pad_to_chunks": True, "hash_seed": 5},
}
_LANGUAGE: dict[str, Any] = {
    "transformer-xl": TransformerXLConfig(vocab_size=60, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=7),
    "reformer": ReformerConfig(**_HASHED),
    "reformer-encoder": ReformerConfig(
        **{**_HASHED, "causal": False, "chunks_after": 1, "local_chunks_after": 1, "num_hashes": 2}
    ),
}
_TRANSLATORS: dict[str, dict[str, Any]] = {
    "post-norm": {"tie_embeddings": "all"},
    "pre-norm": {"norm_position": "pre", "num_decoder_heads": 4, "decoder_d_ff": 40},
    "learned": {"norm_position": "pre", "positions": "learned", "max_len": 128, "activation": "gelu"},
    "two-vocabularies": {"tie_embeddings": "decoder", "positions": "sinusoidal_halves"},
    "relative-bias": {"norm_position": "pre", "positions": "none", "relative_bias": 4},
}


def write_tiny(work: Path) -> list[Path]:
    """Write tiny translators after a few seconds of training, and random language models. Returns: their folders."""
    texts = [text for pair in load_tatoeba("train")[:200] for text in pair]
    own = Tokenizer.train(texts, TokenizerSettings(vocab_size=400))
    folders = []
    for name, changes in _TRANSLATORS.items():
        size = own.vocab_size
        config = TransformerConfig(source_vocab_size=size, target_vocab_size=size, **{**_SIZES, **changes})
        module = _random(config)
        _train(module, own)
        _save(module, work / name / "model", own)
        folders.append(work / name)
    for name, config in _LANGUAGE.items():
        _save(_random(config), work / name / "model", None)
        folders.append(work / name)
    return folders


def copy_given(work: Path, model: str) -> list[Path]:
    """Copy a model folder, or that of a run. Returns: one folder."""
    folder = resolve_model_path(model)
    _save(load(folder), work / "given" / "model", load_tokenizer(folder))
    return [work / "given"]


def write_exports(folder: Path) -> None:
    """Write the model in each format that holds it; each is compared by the export itself, too."""
    config: Any = load(folder / "model").config
    of_transformer = ["ctranslate2", "ctranslate2-int8", "onnx", "onnx-int8"]
    if not getattr(config, "relative_bias", 0):
        of_transformer.insert(0, "transformers")
    formats = {"transformer": of_transformer, "reformer": ["transformers"]}.get(config.architecture, ["onnx"])
    for name in formats:
        to, _, quantization = name.partition("-")
        export_model(folder / "model", folder / name, ExportOptions(to=to, quantization=quantization or None))


@torch.inference_mode()
def write_expected(folder: Path, num_sentences: int) -> None:
    """Write what the model itself computes."""
    module: Any = load(folder / "model").eval()
    if isinstance(module, LanguageModel):
        expected, arrays = _of_language_model(module)
    else:
        expected, arrays = _of_translator(module, folder / "model", num_sentences)
    (folder / "expected.json").write_text(json.dumps(expected), "utf-8")
    np.savez(folder / "expected.npz", **arrays)


def _random(config: Any) -> Any:
    torch.manual_seed(7)
    module = build_model(config).eval()
    with torch.no_grad():
        for parameter in {id(one): one for one in module.parameters()}.values():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return module


def _train(module: Any, own: Tokenizer) -> None:
    """So that outputs end at different lengths, which is what searches differ in."""
    pairs = load_tatoeba("train")[: _NUM_STEPS * _NUM_ROWS]
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    module.train()
    for first in range(0, len(pairs), _NUM_ROWS):
        rows = pairs[first : first + _NUM_ROWS]
        sources = [torch.tensor([*own.encode(source), own.eos_id]) for source, _ in rows]
        targets = [torch.tensor([own.bos_id, *own.encode(target), own.eos_id]) for _, target in rows]
        ids = pad_sequence(targets, batch_first=True, padding_value=own.pad_id)
        lengths = torch.tensor([len(one) for one in sources])
        found = module.log_probs(pad_sequence(sources, batch_first=True), lengths, ids[:, :-1])
        optimizer.zero_grad()
        torch.nn.functional.nll_loss(found.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=own.pad_id).backward()
        optimizer.step()
    module.eval()


def _save(module: Any, folder: Path, own: Any) -> None:
    settings = DecodingSettings(length_penalty=_LENGTH_PENALTY, length_penalty_kind="power", rules="marian-5")
    if isinstance(module, Seq2Seq):
        save_pretrained(module, folder, tokenizer=own, generation=settings)
    else:
        save_pretrained(module, folder)


def _of_translator(
    module: Seq2Seq, model: Path, num_sentences: int
) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    tokenizer: Any = load_tokenizer(model)
    reader, writer = tokenizer.source, tokenizer.target
    texts = [source for source, _ in load_tatoeba("test")[:num_sentences]]
    sources = [[*reader.encode(text), reader.eos_id] for text in texts]
    special = {"pad_id": writer.pad_id, "bos_id": writer.bos_id, "eos_id": writer.eos_id}
    plain = DecodingSettings(
        num_beams=1, max_new_tokens=_MOST_TOKENS, length_penalty=_LENGTH_PENALTY, length_penalty_kind="power"
    )
    beams = replace(plain, num_beams=4, rules="marian-5")
    greedy = [_ids(one[0], writer.eos_id) for one in search_all(module, sources, plain, **special)]
    found = [one[0] for one in search_all(module, sources, beams, **special)]
    rows, best = [], []
    for source, ids in zip(sources, greedy, strict=True):
        start = torch.tensor([[writer.bos_id, *ids[:-1]]])
        found_rows = module.log_probs(torch.tensor([source]), torch.tensor([len(source)]), start)[0].float()
        best.append(found_rows.topk(2, dim=-1).values)
        if len(rows) < _NUM_SCORED:
            rows.append(found_rows)
    return {
        **{"kind": "translator", "texts": texts, "sources": sources, "greedy": greedy, "limit": _MOST_TOKENS},
        **special,
        "margins": [(two[:, 0] - two[:, 1]).tolist() for two in best],
        "beams": [_ids(one, writer.eos_id) for one in found],
        "scores": [one.score for one in found],
        "length_penalty": _LENGTH_PENALTY,
        "has_tables": module.config.positions == "learned",
        "pieces": [list(getattr(side, "pieces", ())) for side in (reader, writer)],
    }, {f"row{index}": one.numpy() for index, one in enumerate(rows)}


def _ids(one: Any, eos_id: int) -> list[int]:
    return [*one.ids, *([eos_id] if one.ended else [])]


def _of_language_model(module: LanguageModel) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Texts of several lengths: within a chunk, whole chunks, and others."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 60, (1, length), generator=generator) for length in (3, 4, 16, 21, 50, 64)]
    rows = []
    for ids in texts:
        # A Transformer-XL reads two segments, the second with the memory of the first.
        cut = [ids] if module.config.architecture == "reformer" else [ids[:, : ids.shape[1] // 2 + 1]]
        cut += [] if module.config.architecture == "reformer" else [ids[:, ids.shape[1] // 2 + 1 :]]
        state, parts = module.body.start(1, projected=False), []
        for part in cut:
            hidden, state = module.body(part, None, state)
            parts.append(module.head.log_probs(hidden)[0])
        rows.append(torch.cat(parts))
    kind = module.config.architecture
    causal = kind != "reformer" or module.config.causal
    expected = {"kind": kind, "causal": causal, "texts": [ids[0].tolist() for ids in texts]}
    return expected, {f"row{index}": one.float().numpy() for index, one in enumerate(rows)}
