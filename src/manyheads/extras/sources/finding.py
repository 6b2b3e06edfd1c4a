"""From SOURCE to files on this disk: its kinds, what each fetches, and which of the files are which split and side."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from manyheads.config.checks import did_you_mean
from manyheads.errors import ConfigError, DataError
from manyheads.extras.sources import fetching
from manyheads.extras.sources.fetching import UNPACKED, is_archive, unpack
from manyheads.extras.sources.names import ADDRESS, SPLITS, Entry, Wanted, fetch_shard, listed_at, said_of
from manyheads.extras.sources.shards import is_shard, plain_name
from manyheads.files.commit import write_folder
from manyheads.files.safe_open import read_limited
from manyheads.files.verify import MANIFEST

PAIR_FORMS = (".tsv", ".csv", ".jsonl", ".tmx", ".parquet")
_SPLIT = re.compile(r"(?:^|[^a-z])(train|training|valid|validation|val|dev|test|eval)(?=[^a-z]|$)")
_SPLIT_OF = {"train": "train", "training": "train", "test": "test", "eval": "test"}
_TEXTS = (".txt", ".tokens", ".raw")
_DATA = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".txt", ".tmx", ".tokens", ".raw")
_PACKED = (".zip", ".7z", ".rar", ".tar", ".tgz", ".xz", ".txz", ".bz2", ".tbz2", ".zst", ".lz4")
"""Archives inside archives, and others that are not unpacked."""
MOST_LISTED = 20_000
CARD, MOST_CARD_BYTES = "README.md", 2**22
MTDATA_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Found:
    """Files of a split, in order: of pairs each file of a form of pairs, or source and target in turn. origin: for the
    manifest. folder: the only folder that holds all of the source, for a layout.
    """

    files: tuple[Path, ...]
    origin: str
    folder: Path | None = None


def find(one: Wanted, fetcher: fetching.Fetcher, *, is_pairs: bool) -> Found:
    """Fetch a source and return the files of its split.

    Raises: DataError: it cannot be fetched, or lacks the files. ConfigError: it needs options.
    """
    roots, origin = _PLACES[one.kind](one, fetcher)
    if one.entry is not None:
        _check_sums(one.entry, roots, fetcher)
        terms = f", terms accepted: {one.entry.terms}" if one.entry.terms else ""
        origin = f"{one.name} ({origin}; {one.entry.page}{terms})"
    folders = [root for root in roots if root.is_dir()]
    if one.entry is not None:
        fetcher.said.append(f"{one.name}: {said_of(one.entry)}")
    if is_pairs and one.kind != "hf:" and len(roots) == 2 and not folders:
        return Found(tuple(roots), origin)
    listed = [path for root in roots for path in (_listed(root) if root.is_dir() else [root])]
    files = listed if one.kind == ADDRESS else _of_split(one, listed, roots)
    if files and is_pairs:
        found = _sides(one, files, fetcher.languages)
        if any(map(_is_table, found)):
            _say_unread(
                one, [path for path in files if path not in found], "beside tables they are not looked at", fetcher
            )
        files = found
    elif any(map(is_shard, files)):
        files, others = [path for path in files if _is_text(path)], [path for path in files if not _is_text(path)]
        _say_unread(one, others, "beside shards they are no text", fetcher)
    if not files:
        raise DataError(f"{one.option} {one.name or one.text} has no files of data for the {one.split} split.")
    return Found(tuple(files), origin, _top(folders[0]) if len(roots) == 1 and folders else None)


def _say_unread(one: Wanted, paths: Sequence[Path], why: str, fetcher: fetching.Fetcher) -> None:
    """Name files of a source that are not read."""
    if paths:
        names = ", ".join(path.name for path in paths[:3]) + f" and {len(paths) - 3} more" * (len(paths) > 3)
        fetcher.said.append(f"{one.name or one.text}: not read, because {why}: {names}")


def _is_table(path: Path) -> bool:
    """Tell whether each record of a file is a pair."""
    return plain_name(path).endswith(PAIR_FORMS)


def _is_text(path: Path) -> bool:
    """Tell whether a file beside shards is read as well."""
    return is_shard(path) or plain_name(path).endswith(_TEXTS)


def _top(folder: Path) -> Path:
    """Return the folder inside that holds the files, where an archive has one folder at its top."""
    inside = [path for path in folder.iterdir() if path.name != MANIFEST and not path.name.startswith(".")]
    return _top(inside[0]) if len(inside) == 1 and inside[0].is_dir() else folder


def _check_sums(entry: Entry, roots: Sequence[Path], fetcher: fetching.Fetcher) -> None:
    """Raises: DataError: a file has another digest than its publisher states."""
    for name, (algorithm, digest) in entry.sums.items():
        for path in [path for root in roots for path in (root.rglob(name) if root.is_dir() else [root])]:
            if path.name == name:
                found = fetching.digest_of(path, fetcher.progress, f"checking {name}").sums[algorithm]
                if found != digest:
                    raise DataError(
                        f"{name} has the {algorithm.upper()} {found}, and {entry.page} states {digest}: it is damaged,"
                        " or another file. Remove it from the cache to fetch it again."
                    )


def _listed(folder: Path) -> list[Path]:
    paths = []
    for place, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith("."))
        own = {MANIFEST} if place == str(folder) and folder.name.endswith(UNPACKED) else set()  # of `write_folder`
        paths += [Path(place, name) for name in sorted(files) if not name.startswith(".") and name not in own]
        if odd := next((path for path in paths if path.exists() and not path.is_file()), None):
            raise DataError(f"{odd} is a pipe, a socket or a device, and no file; take it out of the folder.")
        if len(paths) > MOST_LISTED:
            raise DataError(f"{folder} has more than {MOST_LISTED:,} files; name a folder inside it.")
    return paths


def _of_split(one: Wanted, files: Sequence[Path], roots: Sequence[Path]) -> list[Path]:
    """Return the files of a split, by words in their names or their folders' names; if no name has such a word, all."""
    if len(files) == 1 and list(files) == list(roots):
        return list(files)  # a file that was named itself
    found: dict[str, list[Path]] = {}
    common = Path(os.path.commonpath([path.parent for path in files])) if files else Path()
    for path in files:
        root = next((root for root in roots if root.is_dir() and path.is_relative_to(root)), common)
        parts = reversed(path.relative_to(root).parts)
        words = (words[-1] for part in parts if (words := _SPLIT.findall(part.lower())))
        word = next(words, "")
        found.setdefault(_SPLIT_OF.get(word, "valid") if word else "", []).append(path)
    named = [split for split in SPLITS if split in found]
    if not named:
        return found.get("", [])
    if one.split not in found:
        raise DataError(
            f"{one.option} {one.name or one.text} has no {one.split} split; its files are those of {', '.join(named)}."
        )
    return found[one.split]


def _sides(one: Wanted, files: Sequence[Path], languages: tuple[str | None, str | None]) -> list[Path]:
    """Return files of pairs: each of a form of pairs, or source and target in turn.

    Raises: ConfigError: the languages are needed. DataError: a side is missing.
    """
    tables = [path for path in files if _is_table(path)]
    if tables:
        return tables
    if packed := [path.name for path in files if path.suffix.lower() in _PACKED]:
        raise DataError(
            f"{one.option} {one.name or one.text} has {packed[0]}, which is packed in a way that is not read here;"
            " unpack it, and give the folder."
        )
    plain = {path: path.name.removesuffix(".gz") for path in files}
    ends = {name.rpartition(".")[2] for name in plain.values() if "." in name}
    source, target = languages
    if source is None or target is None:
        raise ConfigError(
            f"{one.option} {one.name or one.text} has files of the languages {', '.join(sorted(ends)) or 'none'}; give"
            " --source-lang and --target-lang."
        )
    paired = []
    for path, name in plain.items():
        stem, _, end = name.rpartition(".")
        if end == source:
            others = [
                other for other, its in plain.items() if its == f"{stem}.{target}" and other.parent == path.parent
            ]
            if not others:
                raise DataError(f"{path.name} has no file {stem}.{target} beside it, its translation.")
            paired += [path, others[0]]
    if not paired:
        raise DataError(
            f"{one.option} {one.name or one.text} has no files that end in .{source} and .{target}, and none in"
            f" {', '.join(PAIR_FORMS)}."
        )
    return paired


def _from_disk(one: Wanted, fetcher: fetching.Fetcher) -> tuple[list[Path], str]:
    path = Path(one.text)
    return [unpack(path, fetcher.progress) if is_archive(path) else path], str(path)


def _from_url(one: Wanted, fetcher: fetching.Fetcher) -> tuple[list[Path], str]:
    roots = []
    for url in one.urls:
        if fetcher.lock.update:
            fetching.forget(url)
        path, record = fetching.fetch(url, fetcher.progress, fetcher.most_bytes)
        fetcher.lock.check(url, record)
        roots.append(unpack(path, fetcher.progress) if is_archive(path) else path)
        fetcher.said.append(f"{url}: {record.num_bytes:,} bytes, SHA-256 {record.sums['sha256'][:12]}")
    return roots, one.text


def _from_storage(one: Wanted, fetcher: fetching.Fetcher) -> tuple[list[Path], str]:
    """The shards of a split at an address of fsspec, each fetched once. Raises: DataError, ConfigError."""
    shards = listed_at(one.text, one.option, MOST_LISTED)
    names = {Path(name): name for name in shards.names}
    chosen = [names[path] for path in _of_split(one, list(names), [])]
    paths, total = [], 0
    for name in chosen:
        path, record = fetch_shard(shards, name, fetcher)
        if not shards.is_here:
            fetcher.lock.check(f"{shards.scheme}://{name}", record)
        paths.append(path)
        total += record.num_bytes
    fetcher.said.append(f"{one.text}: {len(paths):,} files, {total:,} bytes")
    return paths, one.text


def _from_hub(one: Wanted, fetcher: fetching.Fetcher) -> tuple[list[Path], str]:
    """Files of data in a repository of the hub, and no code. Raises: DataError, ConfigError."""
    from huggingface_hub import HfApi, hf_hub_download

    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:\[([\w.-]+)\])?(?:@([\w./-]+))?", one.rest)
    if match is None:
        raise ConfigError(f"{one.option} {one.text}: a data set of the hub is hf:owner/name or hf:owner/name[config].")
    name, config, revision = match.groups()
    try:
        facts = HfApi().dataset_info(name, revision=revision)
        names = sorted(file.rfilename for file in facts.siblings or [])
        card = ""
        if CARD in names:
            fetched = Path(hf_hub_download(name, CARD, repo_type="dataset", revision=facts.sha))
            card = read_limited(fetched.resolve(), MOST_CARD_BYTES).decode("utf-8", "replace")
        chosen = _in_card(one, card, names, config) or _of_config(one, names, config)
        paths = [Path(hf_hub_download(name, file, repo_type="dataset", revision=facts.sha)) for file in chosen]
    except (ConfigError, DataError):
        raise
    except Exception as error:  # of many kinds: the hub's, the network's, the cache's
        raise DataError(
            f"{one.text} cannot be fetched from the hub: {type(error).__name__}: {_first_line(error)}."
            " Check the name and the network; what was fetched stays."
        ) from error
    for file, path in zip(chosen, paths, strict=True):
        key = f"hf:{name}/{file}"
        if revision is None or len(revision) != 40:
            fetcher.lock.check(key, fetching.digest_of(path, fetcher.progress, f"checking {path.name}"))
    return paths, f"{one.text} at {str(facts.sha)[:12]}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _in_card(one: Wanted, card: str, names: Sequence[str], config: str | None) -> list[str]:
    """Return the files of data that the card of a data set names for the split of a config; empty: it names none.

    Raises: ConfigError: the card names several configs. DataError: it has no such split, or no file is there.
    """
    import yaml

    head = re.match(r"---\r?\n(.*?)\r?\n---", card, re.DOTALL)
    try:
        content = yaml.safe_load(head[1]) if head else None
    except (yaml.YAMLError, RecursionError, ValueError):
        return []  # it is for people, and its folders may say it as well
    listed = content.get("configs") if isinstance(content, dict) else None
    known = {
        each["config_name"]: each["data_files"]
        for each in (listed if isinstance(listed, list) else ())
        if isinstance(each, dict) and isinstance(each.get("config_name"), str) and each.get("data_files")
    }
    if config is None and known:
        config = next(iter(known)) if len(known) == 1 else "default"
        if config not in known:
            first = next(iter(known))
            raise ConfigError(f"{one.text} has several configs: {', '.join(known)}; give one, {one.text}[{first}].")
    files = known.get(config or "")
    if not files:
        return []
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    patterns: dict[str, list[str]] = {}
    for each in files if isinstance(files, list) else [files]:
        split, path = (each.get("split"), each.get("path")) if isinstance(each, dict) else ("train", each)
        word = next(iter(_SPLIT.findall(str(split).lower())), "train")
        paths = path if isinstance(path, list) else [path]
        patterns.setdefault(_SPLIT_OF.get(word, "valid"), []).extend(map(str, paths))
    found = [name for name in names if any(fnmatchcase(name, each) for each in patterns.get(one.split, ()))]
    found = [name for name in found if plain_name(Path(name)).endswith(_DATA)]
    if not found:
        raise DataError(
            f"{one.option} {one.text} has no files of data for the {one.split} split; its card names"
            f" {', '.join(sorted(path for some in patterns.values() for path in some))[:200]}."
        )
    return found


def _of_config(one: Wanted, names: Sequence[str], config: str | None) -> list[str]:
    """Return the names of the files of data of a config: those in its folder, or all if there is but one.

    Raises: DataError: there is none. ConfigError: there are several configs.
    """
    data = [name for name in names if plain_name(Path(name)).endswith(_DATA) and not name.startswith(".")]
    if not data:
        raise DataError(f"{one.text} has no files of data ({', '.join(_DATA)}); code that would make them is not run.")
    heads = sorted({name.split("/")[0] for name in data if "/" in name})
    if config is not None:
        inside = [name for name in data if config in name.split("/")[:-1]]
        named = inside or [name for name in data if fnmatchcase(name, f"{config}[-._]*")]
        if not named:
            raise DataError(f"{one.text} has no config {config!r}; its folders are {', '.join(heads) or 'none'}.")
        return named
    top = [name for name in data if "/" not in name]
    if not top and len(heads) > 1 and not any(_SPLIT.search(head.lower()) for head in heads):
        raise ConfigError(f"{one.text} has several configs: {', '.join(heads)}; give one, {one.text}[{heads[0]}].")
    return data


def _from_sacrebleu(one: Wanted, fetcher: fetching.Fetcher) -> tuple[list[Path], str]:
    """Source and first reference of a test set, as sacreBLEU gives them. Raises: ConfigError, DataError."""
    from sacrebleu.dataset import DATASETS

    test_set, _, direction = one.rest.rpartition("/")
    if test_set not in DATASETS:
        raise ConfigError(
            f"{one.option} {one.text}: sacreBLEU has no test set {test_set!r}.{did_you_mean(test_set, DATASETS)}"
        )
    known = DATASETS[test_set]
    if direction not in known.langpairs:
        raise ConfigError(
            f"{one.option} {one.text}: {test_set} has no direction {direction!r}."
            f"{did_you_mean(direction, known.langpairs)}"
        )
    try:
        with redirect_stderr(io.StringIO()):
            known.process_to_text(direction)
            files: Any = known  # without types
            source, reference = files.get_source_file(direction), files.get_reference_files(direction)[0]
    except (Exception, SystemExit) as error:
        raise DataError(
            f"{one.text} cannot be fetched by sacreBLEU: {_first_line(error)}. Check the network."
        ) from error
    for side, path in (("source", source), ("reference", reference)):
        fetcher.lock.check(f"{one.text}/{side}", fetching.digest_of(Path(path), fetcher.progress, f"checking {side}"))
    return [Path(source), Path(reference)], f"{one.text}, sacreBLEU"


def mtdata_program() -> list[str]:
    """Return how mtdata is called, in an environment of its own. Raises: ConfigError: there is no way."""
    if given := os.environ.get("MANYHEADS_MTDATA", "").strip():
        try:
            return shlex.split(given)
        except ValueError as error:
            raise ConfigError(f"MANYHEADS_MTDATA is {given!r}, which is no command: {error}.") from None
    if shutil.which("uvx"):
        return ["uvx", "mtdata"]
    if shutil.which("pipx"):
        return ["pipx", "run", "mtdata"]
    raise ConfigError(
        "mtdata is a program in an environment of its own, because it needs older versions of our packages: install uv"
        " or pipx, or name the program by MANYHEADS_MTDATA."
    )


def _from_mtdata(one: Wanted, fetcher: fetching.Fetcher) -> tuple[list[Path], str]:
    """Two files of a corpus, by the program mtdata. Raises: ConfigError, DataError."""
    match = re.fullmatch(r"([\w.+-]+)(?:\[([\w]+)-([\w]+)\])?", one.rest)
    if match is None:
        raise ConfigError(f"{one.option} {one.text}: a corpus of mtdata is mtdata:GROUP-name-version-lang1-lang2.")
    name = f"OPUS-{match[1]}" if one.kind == "opus:" else match[1]
    codes = name.split("-")[-2:]
    if len(name.split("-")) < 5:
        raise ConfigError(
            f"{one.option} {one.text}: a corpus is GROUP-name-version-lang1-lang2, for opus: without the group."
        )
    sides = _direction(one, codes, match.groups()[1:], fetcher.languages)
    final = fetching.cache_folder() / "mtdata" / name
    if not final.is_dir() or fetcher.lock.update:
        program = mtdata_program()
        fetcher.progress(f"mtdata {name}", 0, 0)

        def write(aside: Path) -> None:
            with tempfile.TemporaryDirectory() as folder:
                command = [*program, "get", "--langs", "-".join(codes), "--train", name, "--out", folder]
                _run(program, command, one)
                parts = {code: sorted(Path(folder).rglob(f"{name}.{code}*")) for code in codes}
                for code, paths in parts.items():
                    if len(paths) != 1:
                        raise DataError(f"{one.text}: mtdata gave {len(paths)} files of {code} where one is expected.")
                    shutil.copyfile(paths[0], aside / f"{code}{'.gz' if paths[0].suffix == '.gz' else ''}")

        write_folder(final, write, replace=True)
    paths = [next(path for path in sorted(final.iterdir()) if path.name.removesuffix(".gz") == code) for code in sides]
    for path in paths:
        fetcher.lock.check(
            f"mtdata:{name}/{path.name}", fetching.digest_of(path, fetcher.progress, f"checking {path.name}")
        )
    return paths, f"{one.text}, mtdata"


def _run(program: Sequence[str], command: Sequence[str], one: Wanted) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=MTDATA_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(
            f"{one.text}: {command[0]} cannot be run: {getattr(error, 'strerror', None) or error}."
        ) from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines() or ["no message"]
        told = f"{one.text}: mtdata ended with the code {done.returncode}: {lines[-1][:300]}"
        if "pickle" in lines[-1].lower() or lines[-1].startswith("EOFError"):
            told += f". Its index is damaged, perhaps by an interruption; renew it: {shlex.join(program)} index"
        raise DataError(told)


def _direction(
    one: Wanted, codes: Sequence[str], given: Sequence[str | None], languages: tuple[str | None, str | None]
) -> list[str]:
    """Return mtdata's codes of source and target. Raises: ConfigError: they are unclear."""
    asked = [code or language for code, language in zip(given, languages, strict=True)]
    if not any(asked):
        return list(codes)
    for order in (list(codes), list(codes)[::-1]):
        if all(
            wanted is None or code.split("_")[0].startswith(wanted.split("-")[0])
            for wanted, code in zip(asked, order, strict=True)
        ):
            return order
    raise ConfigError(
        f"{one.option} {one.text} has the languages {' and '.join(codes)}, which are not clearly {asked[0]} and"
        f" {asked[1]}; give the direction in these codes, {one.text}[{codes[0]}-{codes[1]}]."
    )


_PLACES: Mapping[str, Callable[[Wanted, fetching.Fetcher], tuple[list[Path], str]]] = {
    "": _from_disk,
    ADDRESS: _from_storage,
    "url:": _from_url,
    "hf:": _from_hub,
    "sacrebleu:": _from_sacrebleu,
    "opus:": _from_mtdata,
    "mtdata:": _from_mtdata,
}
