"""Running a command on an oddity, within this process, and reading what it made."""

from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
from oddities.cells import Outcome
from oddities.kinds import LIMIT, Oddity

from manyheads.cli.main import main
from manyheads.data.translation.prepared import PreparedData
from manyheads.decoding.translator import Translator
from manyheads.text.words import is_blank

__all__ = ["Judge"]

RUN = ("--preset", "debug", "--data.max_source_len", str(LIMIT), "--data.max_target_len", str(LIMIT),
       "--data.max_tokens", "2048", "--training.max_steps", "1", "--training.plots", "false",
       "--training.tensorboard", "false", "--validation.bleu_sentences", "0")  # fmt: skip


def call(*arguments: str) -> Outcome:
    """`manyheads ARGUMENTS` in this process."""
    out, err = TextIOWrapper(BytesIO(), encoding="utf-8"), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
        out.flush()
    buffer = out.buffer
    assert isinstance(buffer, BytesIO)
    return Outcome(code, buffer.getvalue().decode("utf-8"), err.getvalue())


@dataclass
class Judge:
    """Runs commands on oddities and compares what they do with the table.

    Args:
        model: a tiny model's folder.
        plain: two plain files, for validation.
        folder: a new folder for every run is made in here.
    """

    model: Path
    plain: tuple[Path, Path]
    folder: Path
    _count: int = 0
    _known: dict[str, str] = field(default_factory=dict)
    _translator: Translator | None = None

    def judge(self, oddity: Oddity, command: str) -> None:
        """Raises: AssertionError: it is not as the table says."""
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir()
        cell = oddity.cells[command]
        with ExitStack() as stack:
            source, target = oddity.make(folder, stack)
            outcome: Outcome = getattr(self, f"_{command}")(oddity, source, target, folder / "made")
        cell.check(outcome)
        if cell.code:
            return
        if command in ("prepare", "train"):
            self._check_pairs(oddity, folder / "made", cell.count, outcome)
        elif command == "translate":
            self._check_lines(oddity, outcome.out, cell.count)
        elif command == "score":
            self._check_rows(oddity, outcome.out, cell.count)
        else:
            assert f"sentences  {cell.count}\n" in outcome.out
            self._check_lines(oddity, (folder / "made").read_bytes().decode(), cell.count)

    @property
    def translator(self) -> Translator:
        """The model, for expectations."""
        if self._translator is None:
            self._translator = Translator.from_pretrained(self.model, "cpu")
        return self._translator

    def alone(self, line: str) -> str:
        """The translation of a line when there is no other."""
        if line not in self._known:
            self._known[line] = self.translator.translate(line, too_long="truncate").replace("\n", " ")
        return self._known[line]

    def _prepare(self, oddity: Oddity, source: str, target: str, made: Path) -> Outcome:
        pairs = ["--source", source, "--target", target] if oddity.form == "aligned" else [f"--{oddity.form}", source]
        valid = ["--valid-source", str(self.plain[0]), "--valid-target", str(self.plain[1])]
        options = oddity.options.get("prepare", ())
        return call("prepare", *pairs, *valid, *options, "--vocab-size", "320", "--output", str(made))

    def _train(self, oddity: Oddity, source: str, target: str, made: Path) -> Outcome:
        """From the prepared folder; where there is none, `data.path` is pointed at the odd thing itself."""
        data = source if oddity.cells["prepare"].code else str(made)
        if data == str(made):
            assert self._prepare(oddity, source, target, made).code == 0
        return call("train", "--data.path", data, "--run-dir", f"{made}-run", *RUN)

    def _translate(self, oddity: Oddity, source: str, target: str, made: Path) -> Outcome:
        return call("translate", str(self.model), source, *oddity.options.get("translate", ()))

    def _score(self, oddity: Oddity, source: str, target: str, made: Path) -> Outcome:
        options = oddity.options.get("score", ())
        return call("score", str(self.model), "--source", source, "--target", target, *options)

    def _evaluate(self, oddity: Oddity, source: str, target: str, made: Path) -> Outcome:
        options = ("--output", str(made), *oddity.options.get("evaluate", ()))
        return call("evaluate", str(self.model), "--source", source, "--reference", target, *options)

    def _check_pairs(self, oddity: Oddity, made: Path, count: int | None, outcome: Outcome) -> None:
        """The prepared folder holds the pairs, as its tokenizer normalises them, and the run says how many it took."""
        both = zip(oddity.source, oddity.target, strict=False)
        pairs = oddity.pairs or [(one, other) for one, other in both if not (is_blank(one) or is_blank(other))]
        data = PreparedData.open(made)
        decode = data.tokenizer.decode
        found = [(decode(source.tolist()), decode(target.tolist())) for source, target in data.train]
        sides = data.tokenizer.source, data.tokenizer.target
        assert found == [
            tuple(side.decode(side.encode(one)) for side, one in zip(sides, pair, strict=True)) for pair in pairs
        ]
        said = (
            f"{count} of {len(pairs)} training pairs kept"
            if "training pairs" in outcome.err
            else f"train: {count} pairs kept of "
        )
        assert said in outcome.err + outcome.out

    def _check_lines(self, oddity: Oddity, out: str, count: int | None) -> None:
        """As many lines as were read, each the translation of its own line; empty ones empty."""
        assert out == "" or out.endswith("\n")
        found = out.removesuffix("\n").split("\n") if out else []
        assert len(found) == count == len(oddity.source)
        assert found == [self.alone(line) for line in oddity.source]
        assert not any(text for text, line in zip(found, oddity.source, strict=True) if not line.strip())

    def _check_rows(self, oddity: Oddity, out: str, count: int | None) -> None:
        table = [line.split("\t") for line in out.removesuffix("\n").split("\n")] if out else []
        assert len(table) == count
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.translator, "settings", self.translator.options(too_long="truncate"))
            expected = self.translator.score(oddity.source[:count], oddity.target[:count]) if count else []
        for row, scored in zip(table, expected, strict=True):
            assert float(row[0]) == pytest.approx(scored.sum_log_prob, abs=1e-3, rel=1e-4)
            assert int(row[1]) == len(scored.tokens)
