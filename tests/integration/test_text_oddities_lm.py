"""The table of text oddities once more, for `prepare --task lm`: each odd source file as a text to be learned.

What is expected follows from the table: the lines that `translate` reads are the text, and what it cannot read is
refused in the same words. As bytes, a file comes back bit for bit whatever is in it.
"""

import gzip
import shutil
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from oddities.cells import Outcome
from oddities.kinds import DE, EN, Oddity
from oddities.running import call
from oddities.table import LATER, ODDITIES
from slices import sliced

from manyheads.data.language.prepared import TextData
from manyheads.data.lines import GZIP_MAGIC
from manyheads.text.of_folder import learn_vocabulary
from manyheads.text.settings import VocabularySettings

QUICK = [oddity for oddity in ODDITIES if not oddity.slow and oddity.name not in LATER]
MORE = [oddity for oddity in ODDITIES if oddity.slow or oddity.name in LATER]
PACKED = ("is an xz file", "is a bzip2 file", "is a zip file")


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """A folder that every user may enter, with a vocabulary of pieces in it."""
    folder = Path(tempfile.mkdtemp(prefix="manyheads-oddities-"))
    folder.chmod(0o755)
    learn_vocabulary([*EN, *DE] * 4, VocabularySettings(level="bpe", vocab_size=320)).save(folder / "tokenizer.json")
    call(
        "prepare",
        "--task",
        "lm",
        "--corpus",
        str(folder / "tokenizer.json"),
        "--valid-bytes",
        "0",
        "-o",
        str(folder / "d"),
    )
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def prepare(base: Path, oddity: Oddity, *options: str) -> tuple[Outcome, bytes | None, bytes | None]:
    """Returns: what the command did, the text it made, and the file's own bytes where they can be read again."""
    folder = Path(tempfile.mkdtemp(dir=base))
    folder.chmod(0o755)
    asked = () if "bytes" in options else oddity.options.get("prepare", ())
    with ExitStack() as stack:
        source, _ = oddity.make(folder, stack)
        try:
            regular = source != "-" and Path(source).is_file()
            raw = Path(source).read_bytes() if regular else None
        except OSError:
            raw = None
        outcome = call(
            "prepare",
            "--task",
            "lm",
            "--corpus",
            source,
            "--valid-bytes",
            "0",
            *asked,
            *options,
            "-o",
            f"{folder}/made",
        )
    if outcome.code:
        assert not (folder / "made").exists()
        assert outcome.out == ""
        assert len(outcome.err[outcome.err.find("manyheads: ") :].rstrip("\n").split("\n")) <= 10
        return outcome, None, raw
    data = TextData.open(folder / "made")
    return outcome, text_of(data), raw


def text_of(data: TextData) -> bytes:
    """What was prepared. In bytes, an id stands for one or none: by a table, since a file may have millions."""
    decode, ids = data.vocabulary.decode_bytes, data.train.ids
    if data.vocabulary.kind != "bytes":
        return decode(ids.tolist())
    pieces = [decode([number]) for number in range(data.vocabulary.vocab_size)]
    values = np.array([piece[0] if piece else 0 for piece in pieces], np.uint8)
    return values[ids][np.array([len(piece) == 1 for piece in pieces])[ids]].tobytes()


def refusal(oddity: Oddity) -> tuple[str, ...]:
    return oddity.cells["translate"].says if oddity.cells["translate"].code else ("There is no train text in",)


def check_pieces(base: Path, oddity: Oddity) -> None:
    outcome, made, _ = prepare(base, oddity, "--tokenizer", str(base / "tokenizer.json"))
    assert "Traceback" not in outcome.err
    if not oddity.source:
        assert outcome.code == 2, oddity.name
        assert all(text in outcome.err for text in refusal(oddity)), outcome.err
        return
    assert outcome.code == 0, outcome.err
    skips = "skip" in oddity.options.get("prepare", ())
    lines = [line for line in oddity.source if line or not skips]
    assert made == unicodedata.normalize("NFC", "".join(f"{line}\n" for line in lines)).encode()


def check_bytes(base: Path, oddity: Oddity) -> None:
    outcome, made, raw = prepare(base, oddity, "--level", "bytes")
    assert "Traceback" not in outcome.err
    says = oddity.cells["translate"].says
    if raw is None:  # no file that could be read twice
        assert outcome.code == (0 if oddity.source else 2), outcome.err
        assert made == ("".join(f"{line}\n" for line in oddity.source).encode() if oddity.source else None)
    elif raw.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(raw)
        except (OSError, EOFError):
            assert outcome.code == 2
            assert "cut off or damaged" in outcome.err
        else:
            assert made == (content or None)
    elif not raw or any(packed in text for packed in PACKED for text in says):
        assert outcome.code == 2, outcome.err
        assert "There is no train text" in outcome.err or any(packed in outcome.err for packed in PACKED)
    else:
        assert made == raw


@pytest.mark.parametrize("oddity", sliced(QUICK, 5, "text oddities of language models", lambda oddity: oddity.id))
def test_a_quick_oddity(base: Path, oddity: Oddity) -> None:
    check_pieces(base, oddity)
    check_bytes(base, oddity)


@pytest.mark.slow
@pytest.mark.parametrize("oddity", MORE, ids=lambda oddity: oddity.id)
def test_the_rest_of_the_table(base: Path, oddity: Oddity) -> None:
    check_pieces(base, oddity)
    check_bytes(base, oddity)


def test_what_is_counted(base: Path) -> None:
    known = {oddity.name: oddity for oddity in ODDITIES}
    pieces = ("--tokenizer", str(base / "tokenizer.json"))
    for name, says in (
        ("bad UTF-8 in a line, --on-bad-utf8 replace", "1 lines that were not UTF-8, bad bytes replaced"),
        ("bad UTF-8 in a line, --on-bad-utf8 skip", "1 left out, because they are not UTF-8"),
        ("NUL inside: kept", "1 with control characters inside (NUL, carriage return, ...), kept"),
    ):
        outcome, _, _ = prepare(base, known[name], *pieces)
        assert f" {says}\n" in outcome.out
