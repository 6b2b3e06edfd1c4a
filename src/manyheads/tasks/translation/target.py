"""The target language of a command, compared with a local model before the model is loaded."""

from __future__ import annotations

from pathlib import Path

from manyheads.text.tags import check_target

__all__ = ["check_target_of"]


def check_target_of(model: str, wanted: str | None) -> None:
    """Check the target language that a user chose, if any.

    Args: model: a folder with a model, or a run; other names are left to whoever loads them.

    Raises: ConfigError: see `text.tags.check_target`. DataError: the tokenizer is damaged.
    """
    from manyheads.text.of_folder import has_tokenizer, load_tokenizer

    folder = next((path for path in (Path(model) / "model", Path(model)) if (path / "config.json").is_file()), None)
    if folder is None or not has_tokenizer(folder):
        return
    tokenizer = load_tokenizer(folder)
    check_target(tokenizer.target_languages, wanted, model, "--target-lang", is_needed=tokenizer.needs_language)
