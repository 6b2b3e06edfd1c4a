"""Files of trees as training pairs, and prepared folders of a parser."""

import gzip
import json
from pathlib import Path

import pytest

from manyheads.data.lines import ReadReport
from manyheads.data.translation.prepared import PreparedData
from manyheads.errors import ConfigError, DataError, ModelFileError
from manyheads.extras.parsing.sequence_task.prepare import prepare_trees
from manyheads.extras.parsing.tokenizer import ParsingTask, ParsingTokenizer, TreeFile, read_sentences
from manyheads.extras.parsing.trees import ParsingSettings, format_tree
from manyheads.text.of_folder import load_tokenizer
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.words import words_of

TREES = """( (S (NP-SBJ (DT The) (NN cat) (-LRB- -LRB-) (NN x) (-RRB- -RRB-))
     (VP (VBZ sleeps) (NP (-NONE- *)))
     (. .)))
(ROOT (NP (NNS Results)))
"""
TASK = ParsingTask()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trees.txt"
    path.write_bytes(gzip.compress(TREES.encode()))
    return path


def test_pairs_of_sentences_and_trees(path: Path) -> None:
    report = ReadReport()
    pairs = list(TreeFile(path=path, task=TASK).read(report))
    assert [sentence for sentence, _ in pairs] == ["The cat ( x ) sleeps .", "Results"]
    assert pairs[0][1].startswith("( (S (NP-SBJ (DT The)")
    assert report.lines == 2
    kept = ParsingTask(ParsingSettings(traces="keep"))
    assert read_sentences(path, kept)[0][0] == "The cat ( x ) sleeps * ."


def test_parts_of_trees_teach_too(path: Path) -> None:
    file = TreeFile(path=path, task=TASK, subtrees=2)
    assert [sentence for sentence, _ in file.read()] == ["The cat ( x ) sleeps .", "The cat ( x )", "Results"]
    assert "2 words or more" in file.describe()
    assert [TASK.target(tree) for _, tree in file.read()][1] == "(NP XX XX XX XX XX )NP"
    assert len(list(TreeFile(path=path, task=TASK, subtrees=1).read())) == 4  # and "sleeps", without its trace


def test_mistakes_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content, message in (
        (b"(ROOT (NP (A b)))\n(ROOT (NP))\n", "f: line 2"),
        (b"(ROOT (NP (A b)))\n\n(S (-NONE- *))", "f: the tree that begins in line 3: .*only traces"),
        (b"(S (A \xff))", "line 1 is not UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            list(TreeFile(path=path, task=TASK).read())
    with pytest.raises(ConfigError, match="cannot be skipped"):
        TreeFile(path=path, task=TASK, on_bad_utf8="skip")
    with pytest.raises(ConfigError, match="subtrees"):
        TreeFile(path=path, task=TASK, subtrees=-1)


def test_a_prepared_folder_remembers_its_task(path: Path, tmp_path: Path) -> None:
    task = ParsingTask(ParsingSettings(functions="keep", root="TOP"))
    trees = TreeFile(path=path, task=task)
    settings = TokenizerSettings(vocab_size=300)
    prepare_trees(tmp_path / "data", train=trees, valid=trees, tokenizer=settings, task=task)
    data = PreparedData.open(tmp_path / "data")
    assert data.task == "parsing"
    assert isinstance(data.tokenizer, ParsingTokenizer)
    assert data.tokenizer.task == task
    assert data.describe().startswith(f"data {data.digest[:12]} in {tmp_path / 'data'}, for parsing")
    assert [tree for _, tree in data.valid_text] == [tree for _, tree in trees.read()]  # the gold trees, whole
    written = data.tokenizer.decode(data.train[0][1].tolist())
    assert written == "(S (NP-SBJ XX XX XX XX XX )NP-SBJ (VP XX )VP XX )S"
    assert len(data.train[0][1]) == len(written.split(" "))
    assert data.train[0][1].max() < data.tokenizer.num_target_ids
    assert format_tree(task.restore("Results", "(NP XX )NP").tree) == "(TOP (NP (XX Results)))"
    plain = Tokenizer.train(["a b c"], settings)
    with pytest.raises(ConfigError, match="no symbols"):
        prepare_trees(tmp_path / "other", train=trees, tokenizer=plain, task=task)


def test_the_tokenizer_of_a_parser(path: Path, tmp_path: Path) -> None:
    pairs = read_sentences(path, TASK)
    tokenizer = ParsingTokenizer(TASK.learn_tokenizer(pairs, TokenizerSettings(vocab_size=300)), TASK)
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_bytes(content)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, ParsingTokenizer)
    assert (again.task, again.digest) == (TASK, tokenizer.digest)
    tree = pairs[0][1]
    assert again.target.decode(again.target.encode(tree)) == TASK.target(tree)
    assert again.target.encode("(S (NP") == tokenizer.encode_targets(["(S (NP"])[0]
    with pytest.raises(DataError, match="target of a parser must be a tree"):
        again.target.encode("no tree")
    for content, error in (
        ({"name": "translation"}, "names the task 'translation'"),
        ({"name": "parsing", "tags": "some"}, "tags"),
        ({"name": "parsing", "else": 1}, "else"),
    ):
        (tmp_path / "task.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=error):
            load_tokenizer(tmp_path)
    (tmp_path / "task.json").write_text("[]")
    with pytest.raises(ModelFileError, match="one JSON object, not a list"):
        load_tokenizer(tmp_path)


def test_words_are_those_of_trees() -> None:
    assert words_of(" a\u00a0b \t c\x1cd\u2028\r\n") == ["a\u00a0b", "c\x1cd\u2028"]
