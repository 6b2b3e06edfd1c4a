"""Readers of files: what they read, how it is mutated, and what may come out.

A reader takes a file and either returns or raises a `ManyHeadsError` (or a `RefusedFileError`) with a message. All else
is a fault.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostile.base import Base, reseal

from manyheads.errors import ManyHeadsError
from manyheads.files.safe_open import RefusedFileError

__all__ = ["Reader", "fault_of", "make_readers"]


@dataclass(frozen=True)
class Reader:
    """name: of the case. kind: of the mutations, see `mutations.KINDS`. seed: an honest file. read: takes the path."""

    name: str
    kind: str
    seed: bytes
    suffix: str
    read: Callable[[Path], Any]


def fault_of(reader: Reader, content: bytes, folder: Path) -> str:
    """Offer a content to a reader. Returns: what is wrong, as `Error in file:function`; empty: nothing."""
    path = folder / f"case{reader.suffix}"
    path.write_bytes(content)
    try:
        reader.read(path)
    except (ManyHeadsError, RefusedFileError) as error:
        return "" if str(error).strip() else f"{type(error).__name__} without a message"
    except Exception as error:
        return f"{type(error).__name__} in {_place(error)}"
    return ""


def _place(error: BaseException) -> str:
    """The last function of ours that the error passed through."""
    found = "no function of ours"
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/manyheads/" in code.co_filename:
            found = f"{code.co_filename.rpartition('/manyheads/')[2]}:{code.co_name}"
        trace = trace.tb_next
    return found


def _all(items: Iterator[Any]) -> None:
    for _ in items:
        pass


def _readers_of_text(samples: dict[str, bytes]) -> Iterator[Reader]:
    from manyheads.config.files import load_yaml
    from manyheads.data.language.texts import Pictures, RawFiles, TextFiles
    from manyheads.data.lines import read_lines
    from manyheads.data.translation.readers import PairFiles
    from manyheads.extras.documents.terms import Terms
    from manyheads.extras.parsing.tokenizer import ParsingTask, TreeFile

    def one(name: str, kind: str, read: Callable[[Path], Any]) -> Reader:
        return Reader(name, kind, samples[name], name[name.index(".") :], read)

    yield one("lines.txt", "text", lambda path: _all(read_lines(path)))
    yield one("packed.txt.gz", "gzip", lambda path: _all(read_lines(path, on_bad_utf8="replace")))
    yield one("pairs.tsv", "text", lambda path: _all(PairFiles(tsv=path).read()))
    yield one("pairs.jsonl", "jsonl", lambda path: _all(PairFiles(jsonl=path).read()))
    yield one("pairs.csv", "text", lambda path: _all(PairFiles(pairs=path).read()))
    yield one("pairs.tmx", "text", lambda path: _all(PairFiles(pairs=path).read()))
    yield one("trees.ptb", "text", lambda path: _all(TreeFile(path=path, task=ParsingTask(), subtrees=2).read()))
    yield one("terms.tsv", "text", Terms.read)
    yield one("settings.yaml", "yaml", load_yaml)
    yield one("ids.u16", "bytes", lambda path: _all(RawFiles(paths=[path], form="u16").read()))
    yield one("picture.png", "png", lambda path: _all(Pictures(paths=[path], size=4, resize=True).read()))
    text = samples["lines.txt"]
    yield Reader("bytes", "bytes", text, ".txt", lambda path: _all(TextFiles(paths=[path]).read(as_bytes=True)))


def _readers_of_settings(samples: dict[str, bytes]) -> Iterator[Reader]:
    from manyheads.cli.commands.train import read_arguments

    yield Reader(
        "run settings", "yaml", samples["settings.yaml"], ".yaml", lambda path: read_arguments(["--config", str(path)])
    )


def _readers_of_documents(samples: dict[str, bytes]) -> Iterator[Reader]:
    from manyheads.extras.documents.formats import decode, read_document
    from manyheads.extras.documents.sentence_ends import split_sentences
    from manyheads.extras.documents.translating import DocumentTranslation

    def reading(format_name: str, columns: tuple[str, ...] = ()) -> Callable[[Path], Any]:
        def read(path: Path) -> None:
            document = read_document(decode(path.read_bytes(), "the file"), "the file", format_name, columns)
            same, _ = document.with_translations([segment.parts for segment in document.segments])
            assert same == document.text, "unchanged segments change the document"
            translation = DocumentTranslation(document, split_sentences, lambda text: len(text) < 40)
            found = {"alignment": [], "again": False, "degenerate": False, "wanted": 0, "met": 0}
            translation.finish([json.dumps({"text": "X.", **found}) for _ in translation.units])

        return read

    named = {"page.md": "markdown", "page.html": "html", "film.srt": "srt", "film.vtt": "vtt", "lines.txt": "text"}
    for name, format_name in named.items():
        yield Reader(f"document {format_name}", "text", samples[name], Path(name).suffix, reading(format_name))
    yield Reader("document csv", "text", samples["table.csv"], ".csv", reading("csv", ("text",)))
    yield Reader("document jsonl", "jsonl", samples["records.jsonl"], ".jsonl", reading("jsonl", ("a.b",)))


def _in_folder(folder: Path, name: str, use: Callable[[Path], Any], *, seal: bool) -> Callable[[Path], Any]:
    """A reader of a folder in which one file is the case; the others are honest."""

    def read(path: Path) -> None:
        target = folder / name
        honest = target.read_bytes()
        try:
            shutil.copyfile(path, target)
            if seal:
                reseal(folder)
            use(folder)
        finally:
            target.write_bytes(honest)

    return read


def _readers_of_folders(base: Base, folder: Path) -> Iterator[Reader]:
    import manyheads
    from manyheads.checkpoint.format import load_checkpoint
    from manyheads.cli.lines.output import lines_of
    from manyheads.cli.records import describe_folder
    from manyheads.data.translation.prepared import PreparedData
    from manyheads.decoding.translator import Translator
    from manyheads.extras.peers.convert import import_folder

    def info(where: Path) -> None:
        lines_of(describe_folder(where))

    model = base.copy_model(folder / "copy")
    kinds = {"config.json": "json", "tokenizer.json": "json", "generation_config.json": "json", "manifest.json": "json"}
    kinds |= {"model.safetensors": "safetensors"}
    for name, kind in kinds.items():
        seed = (model / name).read_bytes()
        seal = name != "manifest.json"
        use = Translator.from_pretrained if name.startswith(("tokenizer", "generation")) else manyheads.load
        yield Reader(f"model {name}", kind, seed, Path(name).suffix, _in_folder(model, name, use, seal=seal))
        yield Reader(f"info {name}", kind, seed, Path(name).suffix, _in_folder(model, name, info, seal=seal))
    run = base.copy_run(folder / "copy")
    newest = sorted((run / "checkpoints").glob("step-*"))[-1].relative_to(run)
    names = {f"{newest}/scalars.json": "json", "metrics.jsonl": "jsonl", "environment.json": "json"}
    names |= {"config.yaml": "yaml", "checkpoints/latest": "text"}
    for name, kind in names.items():
        seed = (run / name).read_bytes()
        yield Reader(f"run {Path(name).name}", kind, seed, "", _in_folder(run, name, info, seal=False))
    checkpoint = run / newest
    for name in ("scalars.json", "model.safetensors"):
        kind = "json" if name.endswith("json") else "safetensors"
        seed = (checkpoint / name).read_bytes()
        yield Reader(f"checkpoint {name}", kind, seed, "", _in_folder(checkpoint, name, load_checkpoint, seal=True))
    data = base.copy_data(folder / "copy")
    for name in ("manifest.json", "train/manifest.json", "tokenizer.json"):
        seed = (data / name).read_bytes()
        yield Reader(f"data {name}", "json", seed, "", _in_folder(data, name, PreparedData.open, seal=False))
    marian = base.copy_marian(folder / "copy")
    for name, kind in {"config.json": "json", "model.safetensors": "safetensors"}.items():
        use = lambda where: import_folder(where, folder / "converted")  # noqa: E731
        yield Reader(
            f"marian {name}", kind, (marian / name).read_bytes(), "", _in_folder(marian, name, use, seal=False)
        )


def _readers_of_bodies(samples: dict[str, bytes]) -> Iterator[Reader]:
    from pydantic import ValidationError

    from manyheads.extras.serving.api.native.translation import GenerateBody, ScoreBody, TranslateBody
    from manyheads.extras.serving.api.openai import CompletionBody

    bodies: dict[str, Any] = {"translate": TranslateBody, "generate": GenerateBody, "score": ScoreBody}
    bodies["completion"] = CompletionBody

    def validating(body: Any) -> Callable[[Path], Any]:
        def read(path: Path) -> None:
            try:
                body.model_validate(json.loads(path.read_bytes())).model_dump_json()
            except (ValidationError, ValueError, RecursionError):
                return

        return read

    for name, body in bodies.items():
        yield Reader(f"body {name}", "json", samples[f"{name}.json"], ".json", validating(body))


def make_readers(base: Base, samples: Path, folder: Path) -> dict[str, Reader]:
    """Name -> reader. folder: for copies of the honest files, which readers change; a new one for each process."""
    contents = {path.name: path.read_bytes() for path in samples.iterdir()}
    found = [
        *_readers_of_text(contents),
        *_readers_of_settings(contents),
        *_readers_of_documents(contents),
        *_readers_of_folders(base, folder),
        *_readers_of_bodies(contents),
    ]
    return {reader.name: reader for reader in found}
