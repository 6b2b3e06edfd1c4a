"""Folders as Marian's training leaves them, made here: random weights under Marian's names, vocabularies, decoder.yml.

`peer_state` returns the same weights as transformers' MarianMTModel holds them.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from marian_models import ENGLISH, GERMAN, pieces_of

OPTIONS: dict[str, Any] = {
    "type": "transformer",
    "dim-emb": 16,
    "dim-vocabs": [0, 0],
    "enc-depth": 2,
    "dec-depth": 1,
    "transformer-heads": 4,
    "transformer-dim-ffn": 24,
    "transformer-ffn-activation": "swish",
    "transformer-ffn-depth": 2,
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-top": "",
    "transformer-postprocess-emb": "d",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-no-projection": False,
    "transformer-guided-alignment-layer": "last",
    "transformer-depth-scaling": False,
    "transformer-tied-layers": [],
    "tied-embeddings": False,
    "tied-embeddings-src": False,
    "tied-embeddings-all": True,
    "skip": False,
    "layer-normalization": False,
    "right-left": False,
    "input-types": [],
    "version": "v1.9.0 6c6a0fd 2020-04-15",
}
PRE = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
SEPARATE = {"tied-embeddings-all": False, "tied-embeddings": True}


def spm_model(lines: Sequence[str], size: int = 90, **options: Any) -> bytes:
    """A SentencePiece model with Marian's special pieces: </s> 0, <unk> 1, and no <s>."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, hard_vocab_limit=False, minloglevel=2,
        bos_id=-1, eos_id=0, unk_id=1, **options,
    )  # fmt: skip
    return model.getvalue()


def weights_of(options: Mapping[str, Any], sizes: tuple[int, int], seed: int = 1) -> dict[str, np.ndarray]:
    """Random weights under Marian's names. Matrices are stored as (in, out), vectors as matrices of one row."""
    draw = np.random.default_rng(seed)
    width, inner = options["dim-emb"], options["transformer-dim-ffn"]
    weights: dict[str, np.ndarray] = {}

    def put(name: str, *shape: int, mean: float = 0.0, std: float = 0.2) -> None:
        weights[name] = (mean + std * draw.standard_normal(shape)).astype(np.float32)

    def norm(name: str, suffix: str = "") -> None:
        put(f"{name}_ln_scale{suffix}", 1, width, mean=1.0)
        put(f"{name}_ln_bias{suffix}", 1, width)

    if options["tied-embeddings-all"] or options["tied-embeddings-src"]:
        put("Wemb", sizes[0], width, std=0.5 * width**-0.5)
    else:
        put("encoder_Wemb", sizes[0], width, std=0.5 * width**-0.5)
        put("decoder_Wemb", sizes[1], width, std=0.5 * width**-0.5)
    if not options["tied-embeddings-all"] and not options["tied-embeddings"]:
        put("decoder_ff_logit_out_W", width, sizes[1], std=width**-0.5)
    put("decoder_ff_logit_out_b", 1, sizes[1])
    suffix = "_pre" if options["transformer-preprocess"] == "n" else ""
    layers = [("encoder", number, ["self"]) for number in range(1, options["enc-depth"] + 1)]
    tied = options["transformer-tied-layers"] or range(1, options["dec-depth"] + 1)
    layers += [("decoder", number, ["self", "context"]) for number in sorted(set(tied))]
    for stack, number, attentions in layers:
        start = f"{stack}_l{number}"
        for attention in attentions:
            for letter in "qkvo":
                put(f"{start}_{attention}_W{letter}", width, width, std=2 * width**-0.5)
                put(f"{start}_{attention}_b{letter}", 1, width)
            norm(f"{start}_{attention}_Wo", suffix)
        for number, shape in ((1, (width, inner)), (2, (inner, width))):
            put(f"{start}_ffn_W{number}", *shape, std=2 * shape[0] ** -0.5)
            put(f"{start}_ffn_b{number}", 1, shape[1])
        norm(f"{start}_ffn_ffn", suffix)
    for stack in ("encoder", "decoder") if options["transformer-postprocess-top"] == "n" else ():
        norm(f"{stack}_top")
    return weights


def write_npz(path: Path, options: Mapping[str, Any] | bytes, weights: Mapping[str, np.ndarray]) -> None:
    """The options are an array of bytes with a zero at the end."""
    raw = options if isinstance(options, bytes) else yaml.safe_dump(dict(options)).encode() + b"\0"
    np.savez(path, **{"special:model.yml": np.frombuffer(raw, np.int8), **weights})


def write_vocabulary(path: Path, pieces: Sequence[str]) -> None:
    """One piece on each line, as Marian writes them."""
    text = yaml.safe_dump(
        dict(zip(pieces, range(len(pieces)), strict=True)), allow_unicode=True, sort_keys=False, width=2**20
    )
    path.write_text(text, encoding="utf-8")


def write_folder(
    folder: Path, *, is_joint: bool = True, decoder: Mapping[str, Any] | None = None, seed: int = 1, **changes: Any
) -> Path:
    """A folder with model.npz, vocab.yml (or two), source.spm, target.spm and decoder.yml."""
    folder.mkdir(parents=True)
    models = [spm_model([*ENGLISH, *GERMAN])] * 2 if is_joint else [spm_model(ENGLISH, 70), spm_model(GERMAN, 80)]
    names = ["vocab.yml"] * 2 if is_joint else ["vocab.en.yml", "vocab.de.yml"]
    sizes = []
    for model, name, side in zip(models, names, ("source", "target"), strict=True):
        (folder / f"{side}.spm").write_bytes(model)
        pieces = list(dict.fromkeys([*pieces_of(model), ">>deu<<", "null", "1", "on", "~", "a: b", "y" * 200]))
        write_vocabulary(folder / name, pieces)
        sizes.append(len(pieces))
    options = {
        **OPTIONS,
        **({} if is_joint else SEPARATE),
        **{name.replace("_", "-"): v for name, v in changes.items()},
    }
    options["dim-vocabs"] = sizes
    write_npz(folder / "model.npz", options, weights_of(options, (sizes[0], sizes[1]), seed))
    settings = {
        "relative-paths": True, "models": ["model.npz"], "vocabs": names, "beam-size": 3, "normalize": 1,
        "word-penalty": 0, "mini-batch": 16,
    }  # fmt: skip
    (folder / "decoder.yml").write_text(yaml.safe_dump({**settings, **(decoder or {})}), encoding="utf-8")
    return folder


def peer_state(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights under the names of transformers, with its additional row for padding."""

    def longer(table: np.ndarray) -> np.ndarray:
        return np.concatenate([table, np.zeros_like(table[:1])])

    state = {"final_logits_bias": np.pad(weights["decoder_ff_logit_out_b"], ((0, 0), (0, 1)))}
    for name, array in weights.items():
        stack, *parts = name.split("_")
        if name == "Wemb":
            state["model.shared.weight"] = longer(array)
        elif name.endswith("_Wemb"):
            state[f"model.{stack}.embed_tokens.weight"] = longer(array)
        elif parts[0] == "top":
            state[f"model.{stack}.layer_norm.{'weight' if parts[-1] == 'scale' else 'bias'}"] = array[0]
        elif parts[0] != "ff":
            layer, block, *rest = parts
            start = f"model.{stack}.layers.{int(layer[1:]) - 1}"
            attention = {"self": "self_attn", "context": "encoder_attn"}.get(block, "final")
            if "ln" in rest:
                state[f"{start}.{attention}_layer_norm.{'weight' if 'scale' in rest else 'bias'}"] = array[0]
                continue
            letter = rest[0][1:]
            module = f"fc{letter}" if block == "ffn" else f"{attention}.{'out' if letter == 'o' else letter}_proj"
            is_matrix = rest[0][0] == "W"
            state[f"{start}.{module}.{'weight' if is_matrix else 'bias'}"] = array.T if is_matrix else array[0]
    return state
