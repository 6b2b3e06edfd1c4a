"""A parser from end to end: trees are prepared, learned, judged and given, by the same commands as translations."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from manyheads.cli.main import main
from manyheads.decoding.translator import Translator
from manyheads.errors import RequestError
from manyheads.extras.parsing.parser import Parser
from manyheads.extras.parsing.trees import format_tree, leaves_of, parse_tree

Cli = Callable[..., int]

NOUNS, VERBS = ("cat", "dog", "bird", "man"), ("sees", "likes", "hears")
TREES = [
    f"(ROOT (S (NP-SBJ (DT The) (NN {one})) (VP (VBZ {verb}) (NP (DT a) (NN {other}))) (. .)))"
    for one in NOUNS
    for other in NOUNS
    for verb in VERBS
]
SENTENCE = "The cat sees a dog ."


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    for name, trees in (("train", TREES), ("test", TREES[::9])):
        (folder / f"{name}.ptb").write_text("".join(f"{tree}\n" for tree in trees), encoding="utf-8")
    prepare(folder, "data")
    return folder


def prepare(folder: Path, name: str, *more: str) -> None:
    files = ["--trees", folder / "train.ptb", "--valid-trees", folder / "test.ptb", "--test-trees", folder / "test.ptb"]
    arguments = ["prepare", "--task", "parsing", *files, "--vocab-size", "330", *more, "--output", folder / name]
    assert main([str(argument) for argument in arguments]) == 0


def train(folder: Path, data: str, run: str, **settings: object) -> Path:
    """A parser that has seen each tree a few times at most."""
    settings = {
        "run-dir": folder / run,
        "data.path": folder / data,
        "data.accumulate": 1,
        "training.ema_decay": 0,
        "training.plots": False,
        "validation.best_by": "f1",
        "decoding.max_len_offset": 30,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    assert main(["train", "--preset", "debug", "--quiet", *options]) == 0
    return folder / run


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    more = {"model__tie_embeddings": "decoder", "training__max_steps": 40, "validation__every_steps": 20}
    return train(data, "data", "run", **more)


def test_training_reports_brackets(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n") if line]
    judged = [record for record in records if "f1" in record]
    assert [record["step"] for record in judged] == [20, 40]
    assert judged[0]["brackets_signature"].startswith("evalb:COLLINS")
    assert {"exact_match", "ill_formed", "best"} <= judged[0].keys()
    assert "bleu" not in judged[0]
    assert "F1 " in (run / "train.log").read_text(encoding="utf-8")
    assert "translation: (ROOT" in (run / "samples" / "step-20.txt").read_text(encoding="utf-8")
    config = json.loads((run / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["target_vocab_size"] < config["source_vocab_size"]


def test_evaluate(run, data, printed, tmp_path):
    record = json.loads(printed("evaluate", run, "--json", "--output", tmp_path / "out.ptb"))
    assert record["brackets"]["sentences"] == len(TREES[::9])
    assert record["protocol"]["task"]["name"] == "parsing"
    assert record["protocol"]["data"].endswith("data test")
    assert 0 <= record["brackets"]["f1"] <= 100
    sentences = [" ".join(leaf.word for leaf in leaves_of(parse_tree(tree))) for tree in TREES[::9]]
    scored = Translator.from_pretrained(run, "cpu").score(sentences, TREES[::9])
    assert record["likelihood"]["target_tokens"] == sum(len(one.tokens) for one in scored)
    nats = -sum(one.sum_log_prob for one in scored) / record["likelihood"]["target_tokens"]
    assert record["likelihood"]["nats_per_token"] == pytest.approx(nats, rel=1e-5)
    shown = printed("evaluate", run, "--trees", data / "test.ptb", "--beam", "2")
    assert shown.startswith("F1 = ")
    assert "ill-formed" in shown
    assert f"likelihood = {nats:.4f} nats/token" in shown
    assert "beam 2" in shown
    assert "truncated  0 sources, 0 trees" in shown
    trees = [parse_tree(line) for line in (tmp_path / "out.ptb").read_text(encoding="utf-8").split("\n")[:-1]]
    assert [[leaf.word for leaf in leaves_of(tree)] for tree in trees] == [
        [leaf.word for leaf in leaves_of(parse_tree(tree))] for tree in TREES[::9]
    ]
    again = json.loads(printed("evaluate", "--hypotheses", tmp_path / "out.ptb", "--data", data / "data", "--json"))
    assert again["brackets"] == record["brackets"]
    assert again["ill_formed"] is None
    assert "likelihood" not in again


def test_progress_is_shown(run: Path, manyheads: Cli, told: Callable[[], dict[str, list[str]]]) -> None:
    assert manyheads("evaluate", run) == 0
    shown = told()
    assert list(shown)[:3] == ["loading the model", "likelihood", "parsing"]
    count = len(TREES[::9])
    for what in ("likelihood", "parsing"):
        assert shown[what][0] == f"0 of {count}"
        assert shown[what][-1] == f"{count} of {count}"


def test_right_trees_that_a_model_could_not_write(run, manyheads, tmp_path, capsys):
    """They are longer than what fits, with labels that were never seen; they are judged by all the same."""
    deep = f"{'(NEW ' * 20}(NN cat){')' * 20}"
    (tmp_path / "new.ptb").write_text(f"(ROOT {deep})\n{TREES[0]}\n", encoding="utf-8")
    options = ["--trees", tmp_path / "new.ptb", "--beam", "1", "--max-tokens", "60"]
    assert manyheads("evaluate", run, *options) == 0
    captured = capsys.readouterr()
    assert "2 sentences" in captured.out
    assert "truncated  0 sources, 1 trees" in captured.out
    assert "likelihood = " in captured.out
    assert "tree 1 has" in captured.err


def test_replaced_bytes_of_trees_are_counted(manyheads, tmp_path, capsys):
    for name, count in (("gold", 2), ("judged", 1)):
        (tmp_path / name).write_bytes(b"(ROOT (S (A a\xff)))\n" * count + b"(ROOT (S (A a)))\n" * (2 - count))
    files = ["--trees", tmp_path / "gold", "--hypotheses", tmp_path / "judged", "--on-bad-utf8", "replace"]
    assert manyheads("evaluate", *files) == 0
    assert "lines that are not UTF-8, bad bytes replaced: 3" in capsys.readouterr().err


def test_the_top_label_of_the_data_is_no_bracket_without_a_model(manyheads, tmp_path, capsys):
    """As in the model's own trees."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.ptb").write_text("".join(f"{tree}\n" for tree in TREES[::9]), encoding="utf-8")
    prepare(tmp_path, "data", "--tree-root", "VROOT")
    (tmp_path / "judged").write_text("".join(f"(V{tree[1:]}\n" for tree in TREES[::9]), encoding="utf-8")
    capsys.readouterr()
    assert manyheads("evaluate", "--hypotheses", tmp_path / "judged", "--data", tmp_path / "data", "--json") == 0
    assert json.loads(capsys.readouterr().out)["brackets"]["f1"] == 100
    assert manyheads("evaluate", "--baseline", "flat", "--data", tmp_path / "data", "--output", tmp_path / "flat") == 0
    assert (tmp_path / "flat").read_text(encoding="utf-8").startswith("(ROOT (S (XX ")


def test_a_baseline_counts_no_traces(manyheads: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gold").write_text("(ROOT (S (A a) (B b) (C c) (. .)))\n")
    shown = []
    for trace in ("", " (NP (-NONE- *T*-1))"):
        words = f"(S (A a) (VP (B b) (C c){trace}) (. .){trace})"
        (tmp_path / "train").write_text(f"(ROOT {words})\n(ROOT (X (A a) (Y (B b) (C c))))\n")
        files = ["--trees", tmp_path / "gold", "--train-trees", tmp_path / "train", "--output", tmp_path / "out"]
        assert manyheads("evaluate", "--baseline", "right", *files) == 0
        shown.append((tmp_path / "out").read_text())
    assert shown == ["(ROOT (S (XX a) (VP (XX b) (XX c)) (XX .)))\n"] * 2


def test_baselines(data, printed):
    record = json.loads(printed("evaluate", "--baseline", "right", "--data", data / "data", "--json"))
    files = ["--trees", data / "test.ptb", "--train-trees", data / "train.ptb"]
    assert json.loads(printed("evaluate", "--baseline", "right", *files, "--json"))["brackets"] == record["brackets"]
    assert "P 100.00  R 25.00" in printed("evaluate", "--baseline", "flat", "--data", data / "data")


def test_translate(run, manyheads, printed, stdin, capsys):
    text = f"{SENTENCE}\n\n \t \na ( b\u00a0c\n".encode()
    stdin(text)
    lines = printed("translate", run).split("\n")
    assert len(lines) == 5
    assert lines[1:3] == ["", ""]
    assert [leaf.word for leaf in leaves_of(parse_tree(lines[0]))] == SENTENCE.split(" ")
    assert [leaf.word for leaf in leaves_of(parse_tree(lines[3]))] == ["a", "-LRB-", "b\u00a0c"]
    stdin(text)
    assert printed("translate", run, "--linearised", "--beam", "2").count("\n") == 4
    stdin(text)
    assert manyheads("translate", run, "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    assert records[0]["translations"][0]["text"] == lines[0]
    assert {"written", "repairs"} <= records[0]["translations"][0].keys()


def test_words_in_the_targets(data, manyheads, printed, stdin, capsys):
    """A model that has learned almost nothing gives trees over the sentence all the same, unless it is not held to."""
    prepare(data, "written", "--tree-words", "write", "--tree-tags", "keep")
    run = train(data, "written", "run-written", model__tie_embeddings="all", training__max_steps=4)
    task = json.loads((run / "model" / "task.json").read_text(encoding="utf-8"))
    assert (task["words"], task["tags"]) == ("write", "keep")
    capsys.readouterr()
    for more, mends in (([], False), (["--no-well-formed"], True)):
        record = json.loads(printed("evaluate", run, "--json", "--output", data / "out.ptb", *more))
        assert (record["ill_formed"] > 0) == mends
        assert record["protocol"]["decoding"]["well_formed"] != mends
        written = (data / "out.ptb").read_text(encoding="utf-8").split("\n")[:-1]
        assert [[leaf.word for leaf in leaves_of(parse_tree(tree))] for tree in written] == [
            [leaf.word for leaf in leaves_of(parse_tree(tree))] for tree in TREES[::9]
        ]
        stdin(f"{SENTENCE}\nThe  fox (\n".encode())
        assert manyheads("translate", run, "--json", *more) == 0
        answers = [json.loads(line)["translations"][0] for line in capsys.readouterr().out.split("\n") if line]
        assert any(answer["repairs"] for answer in answers) == mends
        assert [[leaf.word for leaf in leaves_of(parse_tree(answer["text"]))] for answer in answers] == [
            SENTENCE.split(" "), ["The", "fox", "-LRB-"]
        ]  # fmt: skip
    assert "well_formed False" in printed("evaluate", run, "--no-well-formed", "--beam", "1")
    parser = Parser.from_pretrained(run, "cpu")
    held, free = (parser.parse([SENTENCE], well_formed=well_formed)[0] for well_formed in (True, False))
    assert not held.repairs
    assert free.repairs


def test_from_python(run: Path, model_folder: Path) -> None:
    parser = Parser.from_pretrained(run, "cpu")
    found, nothing = parser.parse([SENTENCE, " "], num_beams=1)
    assert nothing is None
    assert format_tree(found.tree).startswith("(ROOT ")
    [scored] = parser.translator.score([SENTENCE], [TREES[0]])
    assert scored.tokens[0] == "▁(S"
    with pytest.raises(RequestError, match="cannot parse"):
        Parser(Translator.from_pretrained(model_folder, "cpu"))


def test_the_task_goes_with_an_average(run, manyheads, printed, tmp_path):
    assert manyheads("average", run, "--last", "2", "--output", tmp_path / "mean") == 0
    out = printed("info", tmp_path / "mean", "--json")
    assert json.loads(out[out.index("{") :])["tokenizer"]["task"]["name"] == "parsing"


def test_mistakes(run, data, model_folder, manyheads, capsys):
    trees = data / "test.ptb"
    (data / "bad.ptb").write_bytes(b"(S (A b)\n")
    (data / "short.ptb").write_bytes(TREES[0].encode() + b"\n")
    prepare = ["prepare", "--output", data / "new"]
    parsing = [*prepare, "--task", "parsing", "--trees", trees]
    cases: list[tuple[list[str | Path], str]] = [
        (["evaluate", "--trees", trees], "Say what to evaluate"),
        (
            ["evaluate", run, "--source", trees, "--reference", trees],
            "--source is an option for the task translation; this is about parsing",
        ),
        (["evaluate", run, "--trees", trees, "--data", data / "data"], "leave out --data"),
        (["evaluate", run, "--trees", data / "bad.ptb"], "bad.ptb: the tree that begins in line 1 is not closed"),
        (["evaluate", run, "--trees", trees, "--output", trees], "is the file"),
        (["evaluate", "--hypotheses", data / "short.ptb", "--trees", trees], "has 1 lines"),
        (["evaluate", "--hypotheses", data / "bad.ptb", "--trees", data / "short.ptb"], "bad.ptb: line 1"),
        (["evaluate", "--baseline", "flat", "--trees", trees], "--train-trees"),
        (["evaluate", "--baseline", "flat", "--trees", trees, "--precision", "bf16"], "leave out --precision."),
        (["evaluate", run, "--train-trees", trees], "--baseline"),
        (["evaluate", model_folder, "--trees", trees], "--trees is an option for the task parsing"),
        (["translate", model_folder, trees, "--linearised"], "is for parsers"),
        ([*prepare, "--trees", trees], "--task parsing"),
        ([*parsing, "--source", trees], "--source needs --task translation"),
        (parsing, "no validation data"),
        ([*prepare, "--task", "parsing", "--valid-trees", trees], "Missing: --trees"),
        ([*parsing, "--valid-count", "2", "--subtrees", "2"], "held back"),
        ([*parsing, "--valid-trees", trees, "--tree-root", "a b"], "root is 'a b'"),
        ([*parsing, "--valid-trees", trees, "--tokenizer", model_folder], "no symbols for the brackets"),
        (["train", "--run-dir", data / "r2", "--data.path", data / "data", "--validation.best_by", "bleu"], "parsing"),
        (["train", "--preset", "debug", "--run-dir", data / "r3", "--validation.best_by", "f1"], "translation"),
    ]
    for arguments, message in cases:
        assert manyheads(*arguments) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err, captured.err
        assert "Traceback" not in captured.err


def test_several_parsers_are_one(manyheads, refused, data, run, tmp_path, capsys):
    found = []
    for more in ((), ("--ensemble", run)):
        assert manyheads("evaluate", run, "--trees", data / "test.ptb", "--json", *more) == 0
        found.append(json.loads(capsys.readouterr().out))
    alone, averaged = found
    assert averaged["protocol"].pop("ensemble") == [str(run)]
    assert averaged["protocol"].pop("parameters") == alone["protocol"].pop("parameters") * 2
    nats = [one["likelihood"].pop("nats_per_token") for one in found]
    assert nats[0] == pytest.approx(nats[1])
    assert averaged["likelihood"].pop("perplexity") == pytest.approx(alone["likelihood"].pop("perplexity"))
    assert averaged == alone
    (tmp_path / "in").write_text(f"{SENTENCE}\n", encoding="utf-8")
    assert "one of the models is a parser" in refused("translate", run, tmp_path / "in", "--rerank", run)
