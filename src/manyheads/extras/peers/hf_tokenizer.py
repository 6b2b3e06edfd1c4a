"""Our tokenizer as `transformers` reads it: the same tokenizer.json with EOS after each text, and options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyheads.errors import DataError
from manyheads.text.pipeline import parse_json, read_tokenizer_file
from manyheads.text.sides import TAG, tag_of
from manyheads.text.tokenizer import Tokenizer

_FILE = "tokenizer.json"


def to_files(tokenizer: Tokenizer, max_len: int) -> dict[str, bytes]:
    """Return name -> content of the files. max_len: positions of the model."""
    content = json.loads(tokenizer.to_json())
    content["added_tokens"] = [_as_read_there(token) for token in content["added_tokens"]]
    pieces = tokenizer.pieces
    end = pieces[tokenizer.eos_id]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end, "type_id": 0}}],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}},
            {"SpecialToken": {"id": end, "type_id": 0}},
        ],
        "special_tokens": {end: {"id": end, "ids": [tokenizer.eos_id], "tokens": [end]}},
    }
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pieces[tokenizer.pad_id],
        "bos_token": pieces[tokenizer.bos_id],
        "eos_token": end,
        "unk_token": pieces[tokenizer.unk_id],
        "model_max_length": max_len,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # "</s>" in a text is four characters, not the end of the sentence
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return {
        _FILE: (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(options, indent=2) + "\n").encode(),
    }


def notes_of(tokenizer: Tokenizer) -> list[str]:
    """Return what differs there."""
    notes = []
    if tokenizer.target_languages:
        tag = tag_of(tokenizer.target_languages[0])
        notes.append(f"The model translates into several languages; begin each source with a tag, such as {tag}.")
    if tokenizer.kind != "word":
        return notes
    return [
        *notes,
        "In transformers the words <pad>, <s> and </s> in a text become special ids; here they are unknown words.",
    ]


def from_folder(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a folder that `to_files` wrote; None if there is none of ours."""
    if not (folder / _FILE).is_file():
        return None
    try:
        content = parse_json(read_tokenizer_file(folder / _FILE), str(folder / _FILE))
        if not isinstance(content, dict):
            return None
        added = content.get("added_tokens")
        own = {"post_processor": None, "added_tokens": [_as_ours(token) for token in added or ()]}
        return Tokenizer.from_json(json.dumps({**content, **own}), where=str(folder / _FILE))
    except DataError:
        return None  # another library's


def _as_read_there(token: dict[str, Any]) -> dict[str, Any]:
    """Return an added token for transformers, which would split the tags of languages into characters, as it splits all
    special tokens in a text.
    """
    return {**token, "special": False, "rstrip": True} if TAG.fullmatch(token["content"]) else token


def _as_ours(token: Any) -> Any:
    """The inverse of `_as_read_there`."""
    is_tag = isinstance(token, dict) and TAG.fullmatch(str(token.get("content")))
    return {**token, "special": True, "rstrip": False} if is_tag else token
