"""`manyheads prepare` of pairs: cleaning, languages, and files whose name says their format."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from manyheads.data.corpora import load_tatoeba
from manyheads.data.translation.prepared import PreparedData

Cli = Callable[..., int]
PAIRS = load_tatoeba("train")[:300]
BAD = [("Same.", "Same."), PAIRS[0], ("See <b>here</b>.", "Siehe hier."), ("", "Leer.")]


@pytest.fixture
def files(tmp_path: Path) -> list[str | Path]:
    """The options for a corpus with bad pairs."""
    lines = [f"{source}\t{target}\n" for source, target in [*PAIRS, *BAD]]
    (tmp_path / "train.tsv").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "valid.tsv").write_text("".join(lines[10:14]), encoding="utf-8")
    return ["--tsv", tmp_path / "train.tsv", "--valid-tsv", tmp_path / "valid.tsv", "--vocab-size", "400"]


def rules_of(folder: Path) -> dict[str, int]:
    content = json.loads((folder / "cleaning.json").read_text(encoding="utf-8"))
    return {rule["name"]: rule["count"] for rule in content["rules"] if rule["count"]}


def test_a_report_without_clean(manyheads, files, tmp_path, capsys):
    folder = tmp_path / "data"
    assert manyheads("prepare", *files, "-o", folder) == 0
    assert len(PreparedData.open(folder).train) == len(PAIRS) + len(BAD) - 1
    found = rules_of(folder)
    assert found["identical"] == found["duplicate"] == found["markup"] == found["empty"] == 1
    assert found["held-out"] >= 4
    printed = capsys.readouterr().out
    assert "training pairs are suspicious, and kept; --clean leaves them out" in printed
    assert "warning: training pairs with sentences of validation or test make its scores too high." in printed
    assert "held back" not in printed


def test_clean(manyheads: Cli, files: list[str | Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data"
    assert manyheads("prepare", *files, "-o", folder, "--clean", "--clean-rule", "markup=off", "ratio=5") == 0
    found = rules_of(folder)
    assert "markup" not in found
    data = PreparedData.open(folder)
    assert len(data.train) == len(PAIRS) + len(BAD) - sum(found.values())
    printed = capsys.readouterr().out
    assert "left out (examples: cleaning.json)" in printed
    assert "warning" not in printed
    assert "held back" not in printed


def test_cleaning_before_pairs_are_held_back(manyheads, files, tmp_path, capsys):
    folder = tmp_path / "data"
    assert manyheads("prepare", *files[:2], *files[4:], "--valid-count", "20", "-o", folder, "--clean") == 0
    assert len(PreparedData.open(folder).valid_text) == 20
    assert "           20 held back for validation" in capsys.readouterr().out


def test_pairs_that_are_held_back_are_not_trained_on(manyheads, tmp_path, capsys):
    """They are found like those of validation files, although they are known only after the training pairs."""
    held = [
        ("This sentence comes last but one.", "Dieser Satz kommt als vorletzter."),
        ("It is over now.", "Das war es."),
    ]
    rows = [held[0], ("Another sentence.", held[0][1]), (held[1][0], "Ein anderer."), *PAIRS[:60], *held]
    (tmp_path / "a.tsv").write_text("".join(f"{one}\t{other}\n" for one, other in rows), encoding="utf-8")
    prepare = ("prepare", "--tsv", tmp_path / "a.tsv", "--valid-count", "2", "--vocab-size", "300", "-o")
    assert manyheads(*prepare, tmp_path / "kept") == 0
    assert rules_of(tmp_path / "kept")["held-out"] == 3
    assert len(PreparedData.open(tmp_path / "kept").train) == len(rows) - 2
    assert "warning: training pairs with sentences of validation or test make" in capsys.readouterr().out
    assert manyheads(*prepare, tmp_path / "clean", "--clean") == 0
    found, data = rules_of(tmp_path / "clean"), PreparedData.open(tmp_path / "clean")
    assert data.valid_text == [PAIRS[59], held[1]]  # the other repeats a pair, so it was left out
    assert found["held-out"] == 1
    assert len(data.train) == data.manifest["counts"]["train"]["pairs"] == len(rows) - sum(found.values()) - 2
    printed = capsys.readouterr().out
    assert "            2 held back for validation" in printed
    assert "warning" not in printed
    assert manyheads(*prepare, tmp_path / "off", "--clean-rule", "held-out=off") == 0
    assert "held-out" not in rules_of(tmp_path / "off")


@pytest.mark.parametrize("directions", [1, 2])
def test_a_pair_counts_once_in_the_report(manyheads: Cli, tmp_path: Path, directions: int) -> None:
    """Pairs that are found while they are read, and again because they equal a pair that is held back."""
    held = ("<b>This sentence comes last.</b>", "<b>Dieser Satz kommt als letzter.</b>")
    alike = ("This sentence comes last too.", "Auch dieser Satz kommt als letzter.")
    rows = [held, alike, *PAIRS[:40], held, alike, alike, ("It is over now.", "Das war es."), alike, held]
    sides = [tmp_path / "a.en", tmp_path / "a.de"]
    for side, file in enumerate(sides):
        file.write_text("".join(f"{row[side]}\n" for row in rows), encoding="utf-8")
    given = ["--source", sides[0], "--target", sides[1]]
    if directions == 2:
        given = ["--pair", "en", "de", *sides, "--pair", "de", "en", *sides[::-1]]
    options = ["--valid-count", "2", "--vocab-size", "300", "--output", tmp_path / "data"]
    assert manyheads("prepare", *given, *options) == 0
    assert len(PreparedData.open(tmp_path / "data").valid_text) == 2 * directions
    # Of `held` one is markup and two repeat it; of `alike` three repeat it, and the first is like one held back.
    found = rules_of(tmp_path / "data")
    assert (found["markup"], found["duplicate"], found["held-out"]) == (directions, 5 * directions, directions)


def test_the_report_does_not_change_the_identity_of_data(manyheads, files, tmp_path):
    """The same pairs, once cleaned with rules that find nothing, and once with a report alone."""
    limits = [f"{name}=off" for name in ("identical", "duplicate", "markup", "held-out", "empty", "numbers")]
    assert manyheads("prepare", *files, "-o", tmp_path / "a") == 0
    assert manyheads("prepare", *files, "-o", tmp_path / "b", "--clean-rule", *limits) == 0
    one, other = (PreparedData.open(tmp_path / name) for name in "ab")
    assert (one.path / "cleaning.json").read_bytes() != (other.path / "cleaning.json").read_bytes()
    assert one.digest == other.digest


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ([], ["languages   look like en > de; --source-lang en --target-lang de would record them"]),
        (["--source-lang", "en-gb", "--target-lang", "DE"], ["languages   en-GB > de"]),
        (
            ["--source-lang", "de", "--target-lang", "en"],
            ["languages   de > en", "warning: The files look exchanged: the source looks like en, the target like de."],
        ),
        (
            ["--source-lang", "en", "--target-lang", "fr"],
            ["languages   en > fr", "warning: The target looks like de, not fr."],
        ),
    ],
)
def test_languages(options, lines, printed, files, tmp_path):
    pytest.importorskip("py3langid")
    folder = tmp_path / "data"
    said = printed("prepare", *files, "-o", folder, *options).split("\n")
    assert [line for line in said if line.startswith(("languages", "warning: The"))] == lines
    recorded = [(lines[0].split()[1], lines[0].split()[3])] if options else []
    assert list(PreparedData.open(folder).languages) == recorded
    assert (" > " in printed("info", folder)) == bool(options)


def test_pairs_of_a_csv_file(manyheads: Cli, tmp_path: Path) -> None:
    text = "id,en,de\n" + "".join(f'{n},"{source}","{target}"\n' for n, (source, target) in enumerate(PAIRS[:50]))
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    keys = ("--source-key", "en", "--target-key", "de", "--valid-count", "5", "--vocab-size", "300")
    assert manyheads("prepare", "--pairs", tmp_path / "a.csv", *keys, "-o", tmp_path / "data") == 0
    assert PreparedData.open(tmp_path / "data").valid_text == PAIRS[45:50]


def trained(folder: Path) -> list[tuple[str, str]]:
    data = PreparedData.open(folder)
    source, target = data.tokenizer.source, data.tokenizer.target
    return [(source.decode([*map(int, one)]), target.decode([*map(int, other)])) for one, other in data.train]


def test_the_header_of_a_tsv_file_names_its_columns(manyheads, tmp_path, capsys):
    (tmp_path / "x.tsv").write_text("de\ten\nHallo.\tHello.\nDanke.\tThank you.\n", encoding="utf-8")
    prepare = ("prepare", "--valid-count", "0", "--vocab-size", "300", "--replace", "-o", tmp_path / "data")
    keys = ("--source-key", "en", "--target-key", "de")
    for form in ("--tsv", "--pairs"):
        assert manyheads(*prepare, form, tmp_path / "x.tsv", *keys) == 0
        assert trained(tmp_path / "data") == [("Hello.", "Hallo."), ("Thank you.", "Danke.")]
        capsys.readouterr()
        assert manyheads(*prepare, form, tmp_path / "x.tsv") == 2
        assert "x.tsv: line 1 looks like a header: de, en. Name the columns by --source" in capsys.readouterr().err
    assert manyheads(*prepare, "--tsv", tmp_path / "x.tsv", "--source-key", "2", "--target-key", "1") == 0
    assert "1 first lines that look like a header, kept" in capsys.readouterr().out
    assert PreparedData.open(tmp_path / "data").manifest["counts"]["train"]["headers_kept"] == 1


def test_units_of_a_tmx_file_that_are_left_out_are_counted(manyheads, refused, tmp_path, capsys):
    units = [("en", "Good morning.", "fr", "Bonjour."), ("en", "Thank you.", "de", "Danke."), ("en", "R&D", "de", "F")]
    rows = "".join(
        f'<tu><tuv xml:lang="{one}"><seg>{text}</seg></tuv><tuv xml:lang="{other}"><seg>{same}</seg></tuv></tu>\n'
        for one, text, other, same in units
    )
    (tmp_path / "x.tmx").write_text(f"<tmx><header srclang='en'/><body>\n{rows}</body></tmx>", encoding="utf-8")
    prepare = ("prepare", "--pairs", tmp_path / "x.tmx", "--source-lang", "en", "--target-lang", "de")
    prepare = (*prepare, "--valid-count", "0", "--vocab-size", "300", "-o", tmp_path / "data")
    assert "x.tmx: line 4: translation unit 3 has '&', which XML does not allow there" in refused(*prepare)
    assert not (tmp_path / "data").exists()
    assert manyheads(*prepare, "--on-bad-utf8", "skip") == 0
    assert trained(tmp_path / "data") == [("Thank you.", "Danke.")]
    told = capsys.readouterr().out
    assert "1 pairs kept of 3 read" in told
    assert "1 translation units without one of the languages, left out" in told
    assert "1 translation units with characters that XML does not allow, left out" in told
    assert "held back" not in told


def test_tokenised_and_escaped_text_is_named(printed, files, tmp_path):
    told = printed("prepare", *files, "-o", tmp_path / "natural")
    assert "is tokenised" not in told
    assert "is escaped" not in told
    rows = [
        (source.replace(".", " .").replace("'", " &apos;").replace('"', "&quot;"), target) for source, target in PAIRS
    ]
    text = "".join(f"{source}\t{target}\n" for source, target in rows)
    (tmp_path / "train.tsv").write_text(text, encoding="utf-8")
    told = printed("prepare", *files, "-o", tmp_path / "moses")
    assert "warning: the source is tokenised (' ,' or ' .' in " in told
    assert "warning: the source is escaped as Moses does it (&quot;, &apos;, @-@ in " in told
    assert "the target is" not in told


def test_pairs_of_sgm_files(manyheads: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, side, texts in (("srcset", "en", ("R&D", "Yes.")), ("refset", "de", ("F&amp;E", "Ja."))):
        segments = "".join(f"<seg id={number}>{text}</seg>\n" for number, text in enumerate(texts, 1))
        (tmp_path / f"a.{side}.sgm").write_text(f"<{kind}><doc docid=a>\n{segments}</doc></{kind}>", encoding="utf-8")
    files = ("--source", tmp_path / "a.en.sgm", "--target", tmp_path / "a.de.sgm", "--valid-count", "0")
    assert manyheads("prepare", *files, "--vocab-size", "300", "-o", tmp_path / "data") == 0
    assert trained(tmp_path / "data") == [("R&D", "F&E"), ("Yes.", "Ja.")]
    capsys.readouterr()
    assert manyheads("evaluate", "--hypotheses", tmp_path / "a.de.sgm", "--reference", tmp_path / "a.de.sgm") == 0
    assert "chrF = 100.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--source-lang", "en"], "give --target-lang as well"),
        (["--source-lang", "english", "--target-lang", "de"], "--source-lang english: this is not a language tag"),
        (["--source-lang", "en", "--target-lang", "EN"], "are both en; a translator has two languages"),
        (["--source-key", "2", "--target-key", "en"], "train.tsv: there is no column '2'; the first line has: "),
        (["--clean-rule", "shape=3"], "there is no rule 'shape'; the rules are empty, identical"),
        (["--clean-rule", "letters=2"], "give a number from 0 to 1, or off; the default is 0.4"),
        (["--pairs", "a.xml"], "given: tsv and pairs"),
        (["--test-pairs", "a.xml"], "ends in .csv, .tsv, .jsonl, .tmx, .parquet"),
        (["--test-pairs", "missing.csv"], "missing.csv"),
        (["--task", "lm", "--clean"], "--clean"),
        (["--task", "parsing", "--source-lang", "en"], "--source-lang"),
    ],
)
def test_what_is_refused(options, message, manyheads, files, tmp_path, capsys):
    before = sorted(path.name for path in tmp_path.iterdir())
    assert manyheads("prepare", *files, "-o", tmp_path / "data", *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "options",
    [
        ["--source", "a", "--target", "b", "--source-key", "en"],
        ["--pairs", "a.tmx", "--target-key", "de"],
        ["--task", "classification", "--texts", "a", "--labels", "b", "--text-key", "text"],
    ],
)
def test_a_key_that_is_not_used_is_refused(options, manyheads, tmp_path, capsys):
    assert manyheads("prepare", *options, "--valid-count", "0", "-o", tmp_path / "data") == 2
    assert (
        f"{options[-2]} names a key or a column, but none of the files has keys or columns" in capsys.readouterr().err
    )


def test_keys_are_not_for_several_directions(manyheads, tmp_path, capsys):
    pairs = ["--pair", "en", "de", "a", "b", "--pair", "en", "fr", "c", "d", "--source-key", "en", "--valid-count", "0"]
    assert manyheads("prepare", *pairs, "-o", tmp_path / "data") == 2
    assert "--pair names the files and languages of each direction; leave out --source-key" in capsys.readouterr().err
