"""The files of several pairs of languages, as `prepare --pair` names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from manyheads.config.options import given_options, refuse_given
from manyheads.errors import ConfigError
from manyheads.text.sides import LanguagePair, language_tag

if TYPE_CHECKING:
    from manyheads.tasks.translation.options import PrepareOptions

PairOfFiles = tuple[LanguagePair, tuple[str, str]]
"""Languages of source and target, and their files."""
_FORM = "SOURCE-LANG TARGET-LANG SOURCE TARGET"
_ALONE = ("source", "target", "tsv", "jsonl", "pairs")


def directions(options: PrepareOptions) -> dict[str, list[PairOfFiles]]:
    """Return split -> the languages and files of each pair.

    Raises: ConfigError: a pair is incomplete, there is one direction only, a held-out pair has a direction without
        training pairs, a training direction has no validation pairs, or files are also given in another form.
    """
    options_of = {"train": options.pair, "valid": options.valid_pair, "test": options.test_pair}
    given = set(given_options(options))
    others = [f"--{prefix}{form}" for prefix in ("", "valid-", "test-") for form in _ALONE]
    others += ["--source-lang", "--target-lang", "--source-key", "--target-key"]
    clashes = {name: name in given for name in others}
    refuse_given(clashes, "--pair names the files and languages of each direction; leave out {}.")
    made = {
        split: _pairs_of(texts, "--pair" if split == "train" else f"--{split}-pair")
        for split, texts in options_of.items()
    }
    known = list(dict.fromkeys(pair for pair, _ in made["train"]))
    if len(known) < 2:
        source, target = known[0]
        raise ConfigError(
            f"--pair names one direction, {source} > {target}; give two or more, or use --source, --target,"
            " --source-lang and --target-lang."
        )
    for split in ("valid", "test"):
        named = {pair for pair, _ in made[split]}
        for source, target in sorted(named - set(known)):
            raise ConfigError(f"--{split}-pair {source} {target}: there are no training pairs of this direction.")
        missing = [f"{source} > {target}" for source, target in known if named and (source, target) not in named]
        if missing and split == "valid":
            raise ConfigError(f"There are no validation pairs of {', '.join(missing)}; give them by --valid-pair.")
    return made


def _pairs_of(texts: Sequence[str], option: str) -> list[PairOfFiles]:
    if len(texts) % 4:
        raise ConfigError(f"{option} takes four values, {_FORM}; {len(texts)} are given: {' '.join(texts)}.")
    found = []
    for place in range(0, len(texts), 4):
        first, second, *files = texts[place : place + 4]
        pair = (language_tag(first, option), language_tag(second, option))
        if pair[0] == pair[1]:
            raise ConfigError(f"{option}: both languages are {pair[0]}; a translator has two.")
        found.append((pair, (files[0], files[1])))
    return found
