"""The files of several pairs of languages, as `prepare --pair` names them.

Preparation of sentence pairs from text files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.catalogue import HOOKS, load
from manyheads.config.options import given_options, refuse_given
from manyheads.data.preparing import CLEANING, MAX_MANIFEST_BYTES, SPLITS
from manyheads.data.translation.prepared import PreparedData
from manyheads.data.translation.preparing import Pairs, RememberedPairs, Rest, TaggedPairs, prepare_corpus
from manyheads.data.translation.readers import PairFiles
from manyheads.errors import ConfigError
from manyheads.files.safe_open import read_limited
from manyheads.tasks.preparation import (
    check_holdout,
    check_keys,
    chosen_vocabulary,
    count_lines,
    summary_of,
    vocabulary_lines,
)
from manyheads.tasks.translation.options import PrepareOptions
from manyheads.text.settings import TokenizerSettings
from manyheads.text.sides import LanguagePair, language_tag, warn_of_languages
from manyheads.text.tokenizer import Tokenizer

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


LEFT_OUT = ("empty_dropped", "bad_utf8_skipped", "units_incomplete", "bad_units_skipped")
_FORMS = ("source", "target", "tsv", "jsonl", "pairs")


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `tasks.report.Task`.

    Raises: ConfigError: training or validation pairs are missing, or are given in two forms.
    """
    cleaning = _cleaning_of(options)
    if (options.valid_pair or options.test_pair) and not options.pair:
        raise ConfigError("--valid-pair and --test-pair go with --pair, which names the training pairs.")
    if options.pair:
        return _of_directions(options, cleaning)
    languages = languages_of(options)
    files = named_files(options, languages)
    if "train" not in files:
        raise ConfigError(
            "There are no training pairs: give --source and --target, or --tsv, --jsonl or --pairs; for several"
            " languages, --pair."
        )
    check_keys(options, ("source_key", "target_key"), any(each.has_keys for each in files.values()))
    check_holdout(options, [f"--valid-{form}" for form in _FORMS], "--valid-count", "500")
    return of_splits({**files}, options, languages)


def named_files(options: PrepareOptions, languages: LanguagePair | None) -> dict[str, PairFiles]:
    """Return the files of each split that the options name. Raises: ConfigError: see `_files`."""
    files: dict[str, PairFiles] = {}
    for split in SPLITS:
        prefix = "" if split == "train" else f"{split}_"
        given = {form: getattr(options, prefix + form) for form in _FORMS}
        if any(path is not None for path in given.values()):
            files[split] = _files(options, split, given, languages or (None, None))
    return files


def of_items(
    options: PrepareOptions, items: Mapping[str, Pairs], languages: LanguagePair | None
) -> Callable[..., dict[str, Any]]:
    """Return the function that prepares pairs in place of the files of these splits.

    Raises: ConfigError: files of such a split are named, too, or validation pairs are missing.
    """
    given = given_options(options)
    prefixes = {"train": "--", "valid": "--valid-", "test": "--test-"}
    files = {split: [f"{prefix}{form}" for form in _FORMS] for split, prefix in prefixes.items()}
    for split in items:
        refuse_given({name: name in given for name in files[split]}, f"{{}} cannot be used beside other {split} data.")
    refuse_given({"--pair": options.pair}, "{} names files; leave it out beside other data.")
    if "valid" not in items:
        check_holdout(options, files["valid"], "--valid-count", "500")
    return of_splits({**named_files(options, languages), **items}, options, languages)


def of_splits(
    splits: dict[str, Pairs], options: PrepareOptions, languages: LanguagePair | None
) -> Callable[..., dict[str, Any]]:
    """Return the function that prepares the pairs of these splits in one direction."""
    cleaning = _cleaning_of(options)
    splits |= {split: RememberedPairs(splits[split]) for split in ("valid", "test") if split in splits}
    held_out = [splits[split] for split in ("valid", "test") if split in splits]
    splits["train"] = cleaning.of(splits["train"], held_out)
    return _preparation_of(
        splits,
        options,
        cleaning=cleaning.to_json,
        languages=() if languages is None else (languages,),
        without_held_back=cleaning.without_held_back,
    )


def _of_directions(options: PrepareOptions, cleaning: Any) -> Callable[..., dict[str, Any]]:
    """The function that prepares pairs of several languages, for one model with tags.

    Raises: ConfigError: see `directions`.
    """
    given = directions(options)
    check_holdout(options, ["--valid-pair"], "--valid-count", "500")
    parts: dict[str, list[tuple[LanguagePair, Pairs]]] = {
        split: [
            (pair, RememberedPairs(files) if split != "train" else files)
            for pair, (source, target) in each
            for files in [_files(options, split, {"source": source, "target": target}, pair)]
        ]
        for split, each in given.items()
    }
    for place, (pair, files) in enumerate(parts["train"]):
        held_out = [other for split in ("valid", "test") for known, other in parts[split] if known == pair]
        cleaned = cleaning.of(files, held_out)
        parts["train"][place] = (pair, cleaned)
        if options.valid_count:
            rest = Rest(cleaned, options.valid_count)
            parts["train"][place] = (pair, rest)
            if given["train"].index(given["train"][place]) == place:  # a corpus named twice is held back once
                parts["valid"].append((pair, rest.holdout))
    splits: dict[str, Pairs] = {split: TaggedPairs(each) for split, each in parts.items() if each}
    return _preparation_of(
        splits,
        options,
        cleaning=cleaning.to_json,
        languages=TaggedPairs(parts["train"]).languages,
        without_held_back=cleaning.without_held_back,
    )


def _cleaning_of(options: PrepareOptions) -> Any:
    """The cleaning of the training pairs. Raises: ConfigError: there is no such rule, or its limit is out of range."""
    clean, limits = options.clean, options.clean_rule
    return load(HOOKS["cleaning"])(clean=clean, limits=limits, holds_back=bool(options.valid_count))


def _files(options: PrepareOptions, split: str, given: Mapping[str, Any], languages: Any) -> PairFiles:
    """Raises: ConfigError: the pairs are given in two forms, or incompletely."""
    try:
        return PairFiles(
            **given,
            source_key=options.source_key,
            target_key=options.target_key,
            languages=languages,
            on_bad_utf8=options.on_bad_utf8,
        )
    except ConfigError as error:
        raise ConfigError(f"The {split} pairs: {error}") from None


def languages_of(options: PrepareOptions) -> LanguagePair | None:
    """Raises: ConfigError: one language without the other, no language tag, or the same language twice."""
    if options.source_lang is None and options.target_lang is None:
        return None
    if options.source_lang is None or options.target_lang is None:
        missing = "--source-lang" if options.source_lang is None else "--target-lang"
        raise ConfigError(f"The languages of both sides belong together; give {missing} as well.")
    source = language_tag(options.source_lang, "--source-lang")
    target = language_tag(options.target_lang, "--target-lang")
    if source == target:
        raise ConfigError(f"--source-lang and --target-lang are both {source}; a translator has two languages.")
    return source, target


def _preparation_of(
    splits: dict[str, Pairs], options: PrepareOptions, **arguments: Any
) -> Callable[..., dict[str, Any]]:
    """Return the function that prepares pairs. Args: splits: the source of each split. arguments: others of
        `prepare_corpus`.

    Raises: ConfigError, DataError: the tokenizer cannot be used.
    """
    if options.keep_spaces and options.vocabulary.tokenizer is not None:
        raise ConfigError(
            "--keep-spaces is for a new tokenizer; leave it out with --tokenizer, which is used as it is."
        )
    defaults = {"normalize_spaces": options.vocabulary.kind != "word" and not options.keep_spaces}
    tokenizer = chosen_vocabulary(options.vocabulary, TokenizerSettings, Tokenizer.load, defaults)
    return partial(prepare_corpus, **with_holdout(splits, options.valid_count), tokenizer=tokenizer, **arguments)


def with_holdout(splits: dict[str, Pairs], valid_count: int | None) -> dict[str, Any]:
    """Return the splits, with so many training pairs as validation pairs if there are no others."""
    if not valid_count or "valid" in splits:
        return splits
    rest = Rest(splits["train"], valid_count)
    return {**splits, "train": rest, "valid": rest.holdout}


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """See `tasks.report.Task`."""
    data = PreparedData.open(folder, verify=False)
    cleaning = _cleaning(folder)
    lines = vocabulary_lines(manifest) + _about_languages(manifest.get("languages", []), cleaning)
    for split, counts in manifest["counts"].items():
        num_lines, num_pairs = counts["lines"], counts["pairs"]
        lines += ["", f"{split}: {num_pairs:,} pairs kept of {num_lines:,} read"]
        lines += count_lines({**counts, "lines": 0})
        left_out = sum(counts.get(name, 0) for name in LEFT_OUT)
        left_out += cleaning.get("left_out", 0) if split == "train" else 0
        if held_back := num_lines - num_pairs - left_out:
            lines.append(f"  {held_back:>13,} held back for validation")
        for side in ("source", "target"):
            tokens, longest, unknown = (counts[f"{side}_{name}"] for name in ("tokens", "longest", "unknown"))
            noted = f", {unknown:,} unknown" if unknown else ""
            mean = tokens / max(num_pairs, 1)
            lines.append(f"  {tokens:>13,} {side} tokens: {mean:.1f} a sentence, {longest:,} the longest{noted}")
    if cleaning and (told := load(HOOKS["cleaning in lines"])(cleaning)):
        lines += ["", *told]
    return summary_of(data, lines, "" if data.task == "translation" else "demo")


def _cleaning(folder: Path) -> dict[str, Any]:
    """The content of cleaning.json; empty without it."""
    file = folder / CLEANING
    return dict(json.loads(read_limited(file, MAX_MANIFEST_BYTES).decode("utf-8"))) if file.is_file() else {}


def _about_languages(recorded: Sequence[Sequence[str]], cleaning: dict[str, Any]) -> list[str]:
    """Return lines about the languages: the given ones, or those that were detected."""
    source, target = cleaning.get("languages", (None, None))
    given = (recorded[0][0], recorded[0][1]) if recorded else (None, None)
    lines = []
    if len(recorded) > 1:
        return ["languages   " + ", ".join(f"{one} > {other}" for one, other in recorded)]
    if recorded:
        lines.append(f"languages   {given[0]} > {given[1]}")
    elif source is not None and target is not None and source != target:
        guess = f"--source-lang {source} --target-lang {target}"
        lines.append(f"languages   look like {source} > {target}; {guess} would record them")
    warning = warn_of_languages(given, (source, target))
    return lines if warning is None else [*lines, f"warning: {warning}"]
