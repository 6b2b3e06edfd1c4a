"""The files of a Marian model's folder besides weights: the tokenizer's files, generation options and special ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.config.files import to_json
from manyheads.errors import ConfigError, ModelFileError
from manyheads.extras.peers import hf_tokenizer
from manyheads.extras.peers.marian import ACTIVATIONS, Marian
from manyheads.extras.peers.marian_generation import (
    MarianIds,
    generation_to_peer,
    never_produced,
    settings_from_peer,
)
from manyheads.extras.peers.marian_tokenizer import MarianOptions, MarianTokenizer, file_names, read_bytes, read_json

if TYPE_CHECKING:
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.models.transformer.config import TransformerConfig
    from manyheads.text.sides import TranslationTokenizer
    from manyheads.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class MarianFiles:
    """The files of a peer's folder besides weights. generation: the peer's own options; None if they are in
    config.json.
    """

    tokenizer: MarianTokenizer | Tokenizer | None
    settings: DecodingSettings
    generation: dict[str, Any] | None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PeerFiles:
    """The files to write into a peer's folder besides weights."""

    config: dict[str, Any]
    files: dict[str, bytes]
    notes: list[str]


def read(peer: type[Marian], folder: Path, config: Mapping[str, Any], ours: TransformerConfig) -> MarianFiles:
    """Read tokenizer and generation options of a peer's folder.

    Args:
        peer: `Marian` or `Pegasus`.
        config: its config.json.
        ours: the model's config.

    Raises: ConfigError, ModelFileError, DataError: files are damaged, contradict each other, or need unsupported
        features. MissingExtraError: sentencepiece is not installed.
    """
    path = folder / "generation_config.json"
    generation = read_json(read_bytes(path), str(path)) if path.is_file() else None
    # A generation_config.json need not repeat the special ids; a config.json need not repeat MarianConfig's defaults.
    whole = {**peer.special_ids, **config}
    names = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
    ids = MarianIds.of(
        {**whole, **{name: generation[name] for name in names if generation and generation.get(name) is not None}}
    )
    options = whole if generation is None else generation
    notes = []
    if options.get("max_length") is None and options.get("max_new_tokens") is None:
        notes.append(
            "No max_length was given; as in transformers, translations end after 19 tokens (--max-new-tokens)."
        )
    notes += never_produced(options, ids)
    has_pieces = (folder / "source.spm").is_file()
    tokenizer = _tokenizer(folder, ids, ours) if has_pieces else hf_tokenizer.from_folder(folder)
    return MarianFiles(tokenizer, settings_from_peer(options, ids), generation, notes)


def _tokenizer(folder: Path, ids: MarianIds, ours: TransformerConfig) -> MarianTokenizer:
    path = folder / "tokenizer_config.json"
    values = read_json(read_bytes(path), str(path)) if path.is_file() else {}
    options = MarianOptions.from_peer(values, str(path), ids.start)
    files = {name: read_bytes(folder / name) for name in file_names(options.separate_vocabs)}
    tokenizer = MarianTokenizer(files, options, where=str(folder))
    for name, id_, own in (("pad", ids.pad, tokenizer.target.pad_id), ("eos", ids.eos, tokenizer.target.eos_id)):
        if id_ != own:
            raise ConfigError(f"{folder}: {name}_token_id is {id_} in config.json, but {own} in vocab.json.")
    sizes = (("source", tokenizer.source, ours.source_vocab_size), ("target", tokenizer.target, ours.target_vocab_size))
    for name, side, size in sizes:
        if side.vocab_size > size:
            raise ModelFileError(
                f"{folder}: the tokenizer's {name} side has ids up to {side.vocab_size - 1}, but the model has only"
                f" {size}; these files do not belong together."
            )
    return tokenizer


def export(
    peer: type[Marian],
    options: Mapping[str, Any],
    settings: DecodingSettings,
    tokenizer: TranslationTokenizer | None,
    kept: Mapping[str, Any],
    ours: TransformerConfig,
) -> PeerFiles:
    """Return the peer's files for one of our models.

    Args:
        peer: `Marian` or `Pegasus`.
        options: its config's, from `to_peer`.
        settings: the model's decoding options.
        tokenizer: its tokenizer, if any.
        kept: the peer's files in peer.json, if the model came from there.
        ours: the model's config.

    Raises: ConfigError: the special ids are unknown, or an option has no counterpart.
    """
    before = kept.get("config")
    before = before if isinstance(before, dict) else {}
    notes: list[str] = []
    files: dict[str, bytes] = {}
    if before:
        ids = MarianIds.of({**peer.special_ids, **before})
    elif tokenizer is not None:
        ids = MarianIds(pad=tokenizer.target.pad_id, eos=tokenizer.target.eos_id, start=tokenizer.target.bos_id)
    else:
        raise ConfigError(
            "this model has no tokenizer, so the ids of padding, EOS and start, which Marian needs, are unknown."
        )
    pieces = None if tokenizer is None else tokenizer.in_pieces
    if isinstance(tokenizer, MarianTokenizer):
        files |= {name: content for name, content in tokenizer.files().items() if name != "tokenizer_config.json"}
        files["tokenizer_config.json"] = to_json(tokenizer.options.to_peer()).encode("utf-8")
    elif pieces is not None:
        files |= hf_tokenizer.to_files(pieces, ours.max_len)
        notes += hf_tokenizer.notes_of(pieces)
    elif tokenizer is not None:
        notes.append(f"The peer has no tokenizer of our kind {tokenizer.kind}; the folder takes ids, not text.")
    generation, differs = generation_to_peer(settings, ids, ours.max_len)
    notes += [f"Generation differs: {what}." for what in differs]
    own = {
        "model_type": peer.model_type,
        "architectures": [peer.model_class],
        "is_encoder_decoder": True,
        "pad_token_id": ids.pad,
        "eos_token_id": ids.eos,
        "decoder_start_token_id": ids.start,
        "forced_eos_token_id": generation["forced_eos_token_id"],
    }
    config = {**before, **_changed(peer, options, before)} if before else {**own, **options}
    said = kept.get("generation")
    if (
        before
        and _settings_or_none(said if isinstance(said, dict) else {**peer.special_ids, **before}, ids) == settings
    ):
        generation = said if isinstance(said, dict) else {}  # unchanged: use the peer's own file
    if generation:
        files["generation_config.json"] = json.dumps(generation, indent=2).encode("utf-8") + b"\n"
    return PeerFiles(config, files, notes)


def _changed(peer: type[Marian], options: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return our options where they differ from the peer's, or from its defaults; `silu` and `swish` are the same."""
    said = {**peer.options, "decoder_vocab_size": None, **before}
    same = {name for name, value in options.items() if said[name] == value}
    if ACTIVATIONS.get(said["activation_function"]) == ACTIVATIONS[options["activation_function"]]:
        same.add("activation_function")
    if said["decoder_vocab_size"] is None and options.get("decoder_vocab_size") == options["vocab_size"]:
        same.add("decoder_vocab_size")
    return {name: value for name, value in options.items() if name not in same}


def _settings_or_none(generation: Mapping[str, Any], ids: MarianIds) -> DecodingSettings | None:
    try:
        return settings_from_peer(generation, ids)
    except ConfigError:
        return None
