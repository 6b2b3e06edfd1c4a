"""`manyheads translate` of documents: files in and out, what is refused, and what an interruption leaves."""

import gzip
import io
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from manyheads.extras.documents import translating
from manyheads.extras.documents.formats import read_document
from manyheads.models.pretrained import load, save_pretrained
from manyheads.text.of_folder import load_tokenizer

pytest.importorskip("markdown_it")
Cli = Callable[..., int]
PAGE = "# The cat\n\nThe cat sees **the dog**. Read <https://x.org>.\n\n```\ncode\n```\n\n* She reads a book.\n"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    return path


def test_a_document_by_the_ending_of_its_name(manyheads, model_folder, page, capsys):
    output = page.with_name("out.md")
    assert manyheads("translate", model_folder, page, "-o", output) == 0
    result = output.read_text(encoding="utf-8")
    assert result != PAGE
    assert "\n```\ncode\n```\n\n* " in result
    assert result.count("<https://x.org>") == 1
    assert page.read_text(encoding="utf-8") == PAGE
    assert sorted(path.name for path in page.parent.iterdir()) == ["out.md", "page.md"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"manyheads: {page}: 3 segments, 4 sentences" in captured.err


def test_a_packed_table(manyheads: Cli, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = "id\ten\n1\tThe cat.\n2\n"
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(table.encode()))
    assert manyheads("translate", model_folder, tmp_path / "a.tsv.gz", "--column", "en") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("id\ten\n1\t")
    assert captured.out.endswith("\n2\n")
    assert captured.out != table
    assert "a.tsv.gz: rows without a column that is translated: 1" in captured.err
    assert manyheads("translate", model_folder, tmp_path / "a.tsv.gz", "--column", "2", "-o", tmp_path / "out") == 0
    assert "line 1 looks like a header, and is translated; name the column, and it stays" in capsys.readouterr().err


def test_the_segments_of_an_sgm_file_are_lines(manyheads, model_folder, tmp_path, capsys):
    texts = ["The cat sees the dog.", "She reads a book."]
    segments = "".join(f'<seg id="{number}">{text}</seg>\n' for number, text in enumerate(texts, 1))
    (tmp_path / "a.sgm").write_text(f'<srcset setid="x"><doc docid="a"><p>\n{segments}</p></doc></srcset>\n')
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts))
    for name in ("a.sgm", "a.txt"):
        assert manyheads("translate", model_folder, tmp_path / name) == 0
    first, second, *others = capsys.readouterr().out.split("\n")
    assert others == [first, second, ""]


def test_from_a_pipe_to_a_pipe(printed, model_folder, stdin):
    stdin(b"<p>The cat sees the dog.</p>")
    result = printed("translate", model_folder, "--format", "html")
    assert result.startswith("<p>")
    assert result.endswith("</p>")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_an_output_that_is_a_pipe_or_a_link(manyheads: Cli, model_folder: Path, page: Path) -> None:
    file, pipe, link = (page.with_name(name) for name in ("file.md", "pipe", "link.md"))
    assert manyheads("translate", model_folder, page, "-o", file) == 0
    link.symlink_to(page.with_name("linked.md"))
    assert manyheads("translate", model_folder, page, "-o", link) == 0
    assert link.is_symlink()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert manyheads("translate", model_folder, page, "-o", pipe) == 0
        assert os.read(reader, 10_000) == file.read_bytes() == link.read_bytes()
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_lines_stay_lines(printed, model_folder, page):
    assert printed("translate", model_folder, page, "--format", "lines").count("\n") == PAGE.count("\n")
    text = page.with_name("page.txt")
    text.write_text("The cat sees\nthe dog.\n", encoding="utf-8")
    assert printed("translate", model_folder, text).count("\n") == 2


def test_the_same_command_goes_on_after_an_interruption(manyheads, refused, model_folder, page, monkeypatch, capsys):
    whole, output = page.with_name("whole.md"), page.with_name("out.md")
    options = ("--lines-at-once", "1")
    assert manyheads("translate", model_folder, page, "-o", whole, *options) == 0
    whole_translate = translating.UnitTranslator.translate
    calls = []

    def interrupted(self: translating.UnitTranslator, units: list[translating.Unit], **given: object) -> list[str]:
        calls.append(units)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole_translate(self, units, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(translating.UnitTranslator, "translate", interrupted)
    assert manyheads("translate", model_folder, page, "-o", output, *options) == 130
    assert "the same command continues from there" in capsys.readouterr().err
    assert not output.exists()
    assert "another command" in refused("translate", model_folder, page, "-o", output, "--beam", "3", *options)
    assert manyheads("translate", model_folder, page, "-o", output, *options) == 0
    assert len(calls) == 5  # of four sentences two were there
    assert output.read_bytes() == whole.read_bytes()
    assert not Path(f"{output}.shards").exists()


def test_a_page_of_our_own_differs_in_its_text_only(manyheads: Cli, model_folder: Path, tmp_path: Path) -> None:
    page, output = Path(__file__).parents[3] / "docs" / "many-languages.md", tmp_path / "out.md"
    options = ("--max-new-tokens", "4", "--num-beams", "1")
    assert manyheads("translate", model_folder, page, "-o", output, *options) == 0

    def parts(path: Path) -> tuple[list[str], list[str]]:
        """The text between the segments, and the segments."""
        text = path.read_bytes().decode()
        segments = read_document(text, path.name, "markdown").segments
        bounds = [0, *(place for one in segments for place in (one.start, one.end)), len(text)]
        pieces = [text[first:last] for first, last in pairwise(bounds)]
        return pieces[::2], pieces[1::2]

    before, after = parts(page), parts(output)
    assert after[0] == before[0]
    assert len(before[1]) == 11
    assert all(one != other for one, other in zip(before[1], after[1], strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nbest", "2"], "--num-return-sequences is for lines"),
        (["--json"], "--json is for lines"),
        (["--do-sample"], "--do-sample is for lines"),
        (["--on-bad-utf8", "skip"], "--on-bad-utf8 is for lines"),
        (["--column", "a"], "column a is given, but columns are of csv, tsv and jsonl only"),
        (["--terms", "missing.tsv"], "missing.tsv"),
        (["--format", "csv", "--column", "a"], "there is no column 'a'"),
        (["--format", "jsonl", "--column", "a"], "line 1 is not a JSON object"),
        (["--format", "lines", "--column", "a"], "--column is for documents"),
        (["--format", "xml"], "--format"),
        (["-o", "."], "is a folder"),
    ],
)
def test_what_is_refused(options, message, manyheads, model_folder, page, capsys):
    output = [] if "-o" in options else ["-o", page.with_name("out.md")]
    assert manyheads("translate", model_folder, page, *output, *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert [path.name for path in page.parent.iterdir()] == ["page.md"]


@pytest.mark.parametrize("name", ["a.ass", "a.PO", "a.json.gz", "a b.docx", "a.xml", "a.lrc", "a.arb"])
def test_known_formats_that_are_not_read_are_refused_by_name(name, manyheads, refused, model_folder, tmp_path):
    path, output = tmp_path / name, tmp_path / "out"
    path.write_text("The cat sees the dog.\n", encoding="utf-8")
    message = refused("translate", model_folder, path, "-o", output)
    ending = Path(name.lower().removesuffix(".gz")).suffix
    assert all(word in message for word in (name, f"({ending})", ".srt, .vtt", "--format lines"))
    assert not output.exists()
    assert manyheads("translate", model_folder, path, "-o", output, "--format", "lines") == 0
    assert output.read_text(encoding="utf-8").count("\n") == 1


def test_subtitles_name_what_is_left(manyheads, refused, model_folder, tmp_path, capsys):
    path, output = tmp_path / "a.srt", tmp_path / "out.srt"
    path.write_text("1\n00:00:20 --> 00:00:24 Hello\nThe cat sees the dog.\n", encoding="utf-8")
    assert manyheads("translate", model_folder, path, "-o", output) == 0
    assert "texts that belong to no subtitle, not translated: 1 (line 2)" in capsys.readouterr().err
    path.write_text("The cat sees the dog.\n", encoding="utf-8")
    output.unlink()
    assert "there is no cue" in refused("translate", model_folder, path, "-o", output)
    assert not output.exists()


def test_files_that_cannot_be_read(printed, refused, model_folder, tmp_path):
    subtitles = "1\n".encode("utf-16")
    for content, message in (
        (b"a\n\xff", "byte 2, is not UTF-8; convert the file: iconv -f WINDOWS-1252 -t UTF-8 FILE"),
        (subtitles, "iconv -f UTF-16 -t"),
        (b"\x1f\x8b..", "begins like a gzip file but is cut off or damaged"),
    ):
        (tmp_path / "a.md").write_bytes(content)
        assert message in refused("translate", model_folder, tmp_path / "a.md")
    assert "Cannot read" in refused("translate", model_folder, tmp_path / "b.md")
    (tmp_path / "a.md").write_bytes(b"")
    assert printed("translate", model_folder, tmp_path / "a.md") == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_prompt_names_the_languages(manyheads, model_folder, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    tokenizer = load_tokenizer(model_folder)
    save_pretrained(load(model_folder), folder, tokenizer=tokenizer, languages=[("en", "de")])
    monkeypatch.setattr("sys.stdin", Terminal())
    for model, prompt in ((folder, "en-de> "), (model_folder, "> ")):
        assert manyheads("translate", model) == 0
        banner = [f"manyheads: loading {model} ...", "Type a sentence and Enter; :help lists commands; Ctrl-D ends."]
        assert capsys.readouterr().err.split("\n") == [*banner, prompt, ""]
