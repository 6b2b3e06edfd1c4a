"""The line about the search in the protocol of `manyheads evaluate`."""

from __future__ import annotations

from typing import Any

__all__ = ["search_line"]


def search_line(decoding: dict[str, Any]) -> str:
    """One line about the decoding settings."""
    if decoding["do_sample"]:
        names = ("temperature", "top_k", "top_p", "seed")
        parts = ["sampling", *(f"{name} {decoding[name]}" for name in names)]
    elif decoding["num_beams"] == 1:
        parts = ["greedy"]
    else:
        parts = [
            f"beam {decoding['num_beams']}",
            f"length penalty {decoding['length_penalty']} ({decoding['length_penalty_kind']})",
        ]
        parts += ["early stopping"] * (decoding["early_stopping"] is True)
    ratio, offset = decoding["max_len_ratio"], decoding["max_len_offset"]
    limit = decoding["max_new_tokens"] or f"{ratio:g} x source + {offset}"
    parts.append(f"at most {limit} tokens")
    unusual = {
        "min_new_tokens": 0,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "rules": "manyheads",
        "well_formed": True,
    }
    parts += [f"{name} {decoding[name]}" for name, usual in unusual.items() if decoding[name] != usual]
    parts += [f"{name} {list(decoding[name])}" for name in ("banned_ids", "forced_prefix_ids") if decoding[name]]
    return ", ".join([*parts, f"batches of {decoding['max_tokens']} tokens"])
