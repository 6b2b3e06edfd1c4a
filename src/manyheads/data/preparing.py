"""The steps that make a folder of prepared data from any source: read, learn the vocabulary, encode, record; and its
manifest, with the settings, and the size and SHA-256 of every file.

The folder contains tokenizer.json; `train`, `valid` and `test`, each a store of ids; manifest.json with settings,
counts and SHA-256 sums; and further files of the source. It appears under its name only when it is complete.

Until then finished parts are in `OUTPUT.preparing/`, for the same command after a kill or an error. The name of a part
is the SHA-256 of all that it is made of, so that other options, changed inputs and other versions never get it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import tokenizers

from manyheads.errors import ConfigError, DataError, ManyHeadsError
from manyheads.files.commit import make_folder, remove_folder, remove_stale, write_file, write_folder, write_text
from manyheads.files.output_safety import locked
from manyheads.files.safe_open import read_limited
from manyheads.files.verify import MANIFEST, file_sha256

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.text.pipeline import TokenizerFile

MAX_MANIFEST_BYTES = 4 * 2**20
SELF_VOUCHING = 2  # the first format_version whose manifests contain their own SHA-256
READ = (".json", ".bin", ".txt")  # the kinds of files that are read from a folder of data


def write_data(final: Path, write: Callable[[Path], dict[str, Any]], *, replace: bool = False) -> dict[str, Any]:
    """Create a folder of data in one step; see `files.commit.write_folder`.

    Args:
        final: the folder's final name; its parents are made.
        write: fills the folder that it is given, and returns the content of the manifest.
        replace: replace an older folder of that name.

    Returns: the manifest.
    Raises:
        DataError: `final` exists and `replace` is off.
        SaveError: the folder could not be written; nothing is left behind, and an older folder is as it was.
    """
    remove_stale(final.absolute().parent, final.name)  # before the check, because it can bring an older folder back
    if not replace and os.path.lexists(final):
        raise DataError(f"{final} exists already; choose another folder, remove it, or ask for it to be replaced.")
    manifest: dict[str, Any] = {}

    def fill(folder: Path) -> None:
        manifest.update(write(folder))
        write_manifest(folder, manifest)

    write_folder(final, fill, manifest=False, replace=replace)
    return manifest


def file_record(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file, for a manifest."""
    return {"sha256": file_sha256(path), "size": path.stat().st_size}


def verify_file(path: Path, record: Any, *, content: bool = True) -> None:
    """Compare a file with its record. content: compare the SHA-256 too, not only the size.

    Raises: DataError: the file is missing, or differs.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"The manifest of {path.parent} does not list {path.name}; the folder is damaged. Prepare the data again."
        )
    try:
        if not path.is_file() or path.stat().st_size != record.get("size"):
            found = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
            raise DataError(f"{path} {found}, but its manifest says {record.get('size')}. Prepare the data again.")
        if content and file_sha256(path) != record.get("sha256"):
            raise DataError(f"{path} is damaged: its SHA-256 differs from the manifest. Prepare the data again.")
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from None


def refuse_strangers(folder: Path, known: Collection[str]) -> None:
    """Refuse files that have a name of the kind that is read but are not in the manifest.

    Args: known: names in the manifest.

    Raises: DataError: there is such a file, or the folder cannot be listed.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise DataError(f"Cannot read {folder}: {error.strerror or error}.") from None
    strange = [name for name in names if name.endswith(READ) and name[0] != "." and name not in (*known, MANIFEST)]
    if strange:
        raise DataError(
            f"{folder} holds {strange[0]}, which its manifest does not list. Remove it, or prepare the data again."
        )


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write manifest.json, with its own SHA-256 under `sha256`."""
    content["sha256"] = _own_digest(content)
    (folder / MANIFEST).write_bytes(_render(content))


def _own_digest(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its entry `sha256`."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _render(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path, *, kind: str, version: int) -> dict[str, Any]:
    """Return the manifest of a folder.

    Args:
        folder: the folder.
        kind: the required `format`.
        version: the newest `format_version` that this code reads.

    Raises: DataError: the manifest is missing, damaged, of another kind or of a newer version.
    """
    path = folder / MANIFEST
    try:
        raw = read_limited(path, MAX_MANIFEST_BYTES)
        content = json.loads(raw.decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder} is not a folder written by manyheads: there is no {MANIFEST} in it.") from None
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}. Prepare the data again.") from None
    if not isinstance(content, dict) or content.get("format") != kind:
        raise DataError(f"{path} does not describe {kind}; is this the right folder?")
    found = content.get("format_version")
    if type(found) is not int or not 1 <= found <= version:
        raise DataError(f"{path} has format_version {found!r}; this program reads up to {version}. Update manyheads.")
    if not isinstance(content.get("files"), dict):
        raise DataError(f"{path} lists no files; it is damaged. Prepare the data again.")
    own = _own_digest(content) if found >= SELF_VOUCHING else None
    try:
        is_own = content.get("sha256") == own and raw == _render(content)
    except UnicodeEncodeError:  # an escape of half a surrogate pair
        is_own = False
    if not is_own:
        raise DataError(f"{path} was changed after it was written. Prepare the data again.")
    return content


VERSION = "2"  # raise it if the same input gives other parts
MARK = "README.txt"
ABOUT = "Finished parts of `manyheads prepare`. The same command continues from them, and removes them at its end.\n"
MOST_BYTES = 2**30
_DIGEST_BYTES = 32


def parts_folder(output: Path) -> Path:
    """Return the folder of the parts of an output."""
    return output.absolute().with_name(f"{output.name}.preparing")


def num_finished(folder: Path) -> int:
    """Return the number of finished parts in a folder of them. Raises: OSError: it cannot be listed."""
    return sum(len(path.name) == 2 * _DIGEST_BYTES for path in folder.iterdir())


class Parts:
    """The folder of finished parts, made with the first of them.

    It is removed at the end of the block. After an error it stays if a part was finished, which the error then says;
    after a kill or a signal it stays as it is.

    Args: output: the folder that is prepared. progress: told how many parts were found.
    """

    def __init__(self, output: Path, progress: Progress) -> None:
        self._folder, self._output, self._progress = parts_folder(output), output, progress
        self._held = ExitStack()
        self._is_claimed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held, suppress(ManyHeadsError, OSError):
            if kind is None and not self._is_claimed and (self._folder / MARK).is_file():
                self._claim()
            if not self._is_claimed:
                return
            if isinstance(error, ManyHeadsError) and num_finished(self._folder):
                error.add_note(f"The same command continues from the finished parts in {self._folder}.")
            elif kind is None or issubclass(kind, ManyHeadsError):
                remove_folder(self._folder)

    def kept(self, made_of: Iterable[str], make: Callable[[], bytes]) -> bytes:
        """Return a part; see `kept_part`. Raises: see `claimed`."""
        return kept_part(self.claimed(), made_of, make)

    def claimed(self) -> Path:
        """Return the folder of the parts, which this command then holds.

        Raises: ConfigError: the folder is not one of parts, or another command uses it. SaveError: see `write_file`.
        """
        if not self._is_claimed:
            self._claim()
        return self._folder

    def _claim(self) -> None:
        def in_use(owner: str) -> ConfigError:
            return ConfigError(
                f"process {owner} prepares {self._output} at the moment; wait, or choose another folder."
            )

        if self._folder.exists() and not (self._folder / MARK).is_file():
            raise ConfigError(
                f"{self._folder} would keep finished parts, but it holds something else; move it, or choose another"
                " output."
            )
        make_folder(self._folder)
        write_text(self._folder / MARK, ABOUT)
        self._held.enter_context(locked(self._folder / ".lock", in_use))
        self._is_claimed = True
        if found := num_finished(self._folder):
            self._progress(f"finished parts found in {self._folder}", found, found)


def kept_part(folder: Path | None, made_of: Iterable[str], make: Callable[[], bytes]) -> bytes:
    """Return a part: the one that an earlier command has left, or else the result of `make`, which is kept.

    Args: folder: `Parts.claimed`; None: nothing is kept. made_of: everything that determines the result, besides the
        versions of the code.

    Raises: SaveError: see `write_file`.
    """
    if folder is None:
        return make()
    name = hashlib.sha256()
    for text in (VERSION, tokenizers.__version__, *made_of):
        name.update(f"{len(text)}:{text}".encode())
    path = folder / name.hexdigest()
    with suppress(OSError):
        found = read_limited(path, MOST_BYTES)
        if found[:_DIGEST_BYTES] == hashlib.sha256(found[_DIGEST_BYTES:]).digest():
            return found[_DIGEST_BYTES:]
    content = make()
    write_file(path, hashlib.sha256(content).digest() + content)
    return content


def in_this_process(work: Callable[[Any], Iterable[T]], items: Iterable[Any]) -> Iterator[T]:
    """Yield the results of `work` for each item, in order."""
    for item in items:
        yield from work(item)


InOrder = Callable[[Callable[[Any], Iterable[Any]], Iterable[Any]], Iterator[Any]]
"""Works like `in_this_process`, perhaps with several processes, for which `work` can be pickled."""


FORMAT = "manyheads.prepared"
FORMAT_VERSION = 2
SPLITS = ("train", "valid", "test")
LANGUAGE_TASK = "language-modelling"  # the task of a folder made by `preparing_text` or `preparing_ids`
CLEANING = "cleaning.json"
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f]")  # control characters except tab and line feed; rarely intended in text

T = TypeVar("T")


def text_path(folder: Path, split: str, side: str) -> Path:
    """Return the file with the raw text of a split, one sentence per line."""
    return folder / f"{split}.{side}.txt"


class Source(ABC):
    """The material of a folder: pairs, a text, or ids. `prepare` calls the methods in this order.

    Attributes:
        settings: the settings of the vocabulary to learn, a dataclass; None: the vocabulary is given.
        folder: the folder to write to; set by `prepare`.
        progress: set by `prepare`.
        parts: set by `prepare`; what took long to make, and is found again after a kill.
        in_order: set by `prepare`; does the work of encoding.
    """

    settings: Any
    folder: Path
    progress: Progress
    parts: Parts
    in_order: InOrder

    @abstractmethod
    def read(self) -> dict[str, str]:
        """Copy the splits into the folder, because a pipe can be read only once.

        Returns: split -> description of its origin.
        Raises: DataError: a split is empty or cannot be used.
        """

    @abstractmethod
    def learn(self) -> TokenizerFile:
        """Return the vocabulary: the given one, or one learned from the training split."""

    @abstractmethod
    def encode(self, split: str) -> dict[str, int]:
        """Write the ids of a split into its store. Returns: the counts of the split."""

    @abstractmethod
    def finish(self) -> Iterable[str]:
        """Remove the copies that are no longer needed. Returns: the names of those that stay."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return further entries of the manifest, with the `task`."""


def prepare(
    folder: str | Path,
    source: Source,
    *,
    replace: bool = False,
    progress: Progress | None = None,
    key: str = "",
    in_order: InOrder = in_this_process,
) -> dict[str, Any]:
    """Make a folder of prepared data.

    Args:
        folder: its name.
        source: its material.
        replace: replace an older folder of that name when this one is complete.
        progress: called with the phase, the amount done, and the total or 0.
        key: stored in the manifest, to recognise the folder.
        in_order: does the work of encoding, such as that of `extras.sources.shards`; the folder is the same.

    Returns: the manifest.
    Raises:
        DataError: the source cannot be used, or the folder exists.
        SaveError: the disk is full or refuses; nothing is left behind.
    """

    def write(aside: Path) -> dict[str, Any]:
        source.folder = aside
        origin = source.read()
        vocabulary = source.learn()
        vocabulary.save(aside / "tokenizer.json")
        counts = {split: source.encode(split) for split in origin}
        names = ["tokenizer.json", *(f"{split}/manifest.json" for split in origin), *source.finish()]
        settings = None if source.settings is None else dataclasses.asdict(source.settings)
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "key": key,
            "origin": origin,
            "tokenizer": {"digest": vocabulary.digest, "vocab_size": vocabulary.vocab_size, "settings": settings},
            "counts": counts,
            "files": {name: file_record(aside / name) for name in names},
            **source.record(),
        }

    source.in_order = in_order
    source.progress = progress or (lambda phase, done, total: None)
    with Parts(Path(folder), source.progress) as source.parts:
        return write_data(Path(folder), write, replace=replace)


def given_splits(train: T, valid: T | None, test: T | None) -> dict[str, T]:
    """Return split -> its input, without the splits that are None."""
    return {split: given for split, given in zip(SPLITS, (train, valid, test), strict=True) if given is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holdout:
    """The part of the training files that is held back for validation and test: their end, the test part last.

    Bytes are cut anywhere. Where lines matter (pieces, words, lines as documents) the cut moves to the next line, and
    where all documents have the same length, only whole documents are held back.

    Args:
        valid: number of bytes; 0: none.
        test: number of bytes; 0: none.
        whole: required size of the training text in bytes, as a check that it is the corpus of that name; 0: any size.

    Raises: ConfigError: a number is negative.
    """

    valid: int = 0
    test: int = 0
    whole: int = 0

    def __post_init__(self) -> None:
        for name in ("valid", "test"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{getattr(self, name)} bytes of {name} text are to be held back; give at least 0.")

    def check_splits(self, given: Collection[str]) -> None:
        """Raises: ConfigError: a split is given and held back as well."""
        for name in ("valid", "test"):
            if name in given and getattr(self, name):
                raise ConfigError(
                    f"{getattr(self, name)} bytes are to be held back for {name}, but there are files for it already."
                )


def canonical(content: Any) -> bytes:
    """Return JSON bytes that are equal for equal content."""
    return json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()
