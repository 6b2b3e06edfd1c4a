"""Lines in = lines out, in order, whatever stands in them: random files through translate, score and evaluate."""

import dataclasses
import os
import sys
import threading
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
from oddities.cells import Outcome
from oddities.random_files import LONG, RandomFile, random_file
from oddities.running import call

from manyheads.catalogue import build_model
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer.config import TransformerConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

LIMIT = 100  # tokens of a line; LONG has more


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained model, which says something else of every line."""
    texts = ["The cat sees the dog.", "Die Katze sieht den Hund."] * 4
    tokenizer = Tokenizer.train(texts, TokenizerSettings(vocab_size=320))
    size = tokenizer.vocab_size
    torch.manual_seed(1)
    smallest = TransformerConfig(d_model=16, num_heads=2, d_ff=16, num_encoder_layers=1, num_decoder_layers=1)
    model = build_model(dataclasses.replace(smallest, source_vocab_size=size, target_vocab_size=size))
    settings = DecodingSettings(
        num_beams=1, max_new_tokens=3, min_new_tokens=3, max_tokens=LIMIT, too_long="truncate", banned_ids=(3,)
    )
    path = tmp_path_factory.mktemp("random") / "model"
    save_pretrained(model, path, tokenizer=tokenizer, generation=settings)
    return path


class Files:
    """Runs random files and counts what does not agree. The model is loaded once."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.translator = Translator.from_pretrained(folder, "cpu")
        self.folder = folder.parent
        self._patch = patch
        self._alone: dict[str, str] = {}
        self.lines = self.long = self.near_ties = 0
        one = self.translator

        def again(*arguments: object, **options: object) -> Translator:
            return Translator(one.model, one.tokenizer, one.settings, "cpu")

        patch.setattr(Translator, "from_pretrained", again)

    def alone(self, line: str) -> str:
        """Its translation when there is no other line; empty for an empty line."""
        if line not in self._alone:
            self._alone[line] = self.translator.translate(line).replace("\n", " ")
        return self._alone[line]

    def translate(self, file: RandomFile, seed: int) -> None:
        """Raises: AssertionError: lines and translations do not stand beside one another, or a count is wrong."""
        arguments = ["--on-bad-utf8", file.policy, "--lines-at-once", str(1 + seed % 7)]
        if seed % 3 == 0:
            self._patch.setattr(sys, "stdin", TextIOWrapper(BytesIO(file.content), encoding="utf-8"))
            outcome = call("translate", str(self.folder), "-", *arguments)
        elif seed % 50 == 1:
            outcome = self._through_a_pipe(file, arguments)
        else:
            path = self.folder / "in"
            path.write_bytes(file.content)
            outcome = call("translate", str(self.folder), str(path), *arguments)
        assert outcome.code == 0, outcome.err
        found = outcome.out.split("\n")
        assert found.pop() == ""
        assert len(found) == len(file.lines)
        self.lines += len(found)
        for line, translation in zip(file.lines, found, strict=True):
            assert bool(translation) == bool(line.strip())
            self.near_ties += translation != self.alone(line)
        said = "bad bytes replaced" if file.policy == "replace" else "skipped"
        assert (f"lines that are not UTF-8, {said}: {file.bad}\n" in outcome.err) == (file.bad > 0)
        ids = self.translator.tokenizer.encode_batch([line if line.strip() else "" for line in file.lines])
        long = sum(len(one) + 1 > LIMIT for one in ids)
        self.long += long
        assert (f"lines cut because they were too long: {long}\n" in outcome.err) == (long > 0)

    def _through_a_pipe(self, file: RandomFile, arguments: list[str]) -> Outcome:
        path = self.folder / "fifo"
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_bytes, args=(file.content,), daemon=True)
        writer.start()
        outcome = call("translate", str(self.folder), str(path), *arguments)
        writer.join(timeout=60)  # whoever never opened the pipe leaves it waiting
        assert not writer.is_alive(), outcome.err
        return outcome

    def judge(self, source: RandomFile, target: RandomFile) -> None:
        """`score` gives a row for every pair, `evaluate` counts every pair."""
        paths = []
        for name, file in (("source", source), ("target", target)):
            paths.append(self.folder / name)
            paths[-1].write_bytes(file.content)
        options = ("--on-bad-utf8", "replace", "--too-long", "truncate")
        first, second = map(str, paths)
        outcome = call("score", str(self.folder), "--source", first, "--target", second, *options)
        if len(source.lines) != len(target.lines):
            assert outcome.code == 2
            assert f"source has {len(source.lines)} lines" in outcome.err
            assert f"target has {len(target.lines)} (" in outcome.err
            return
        assert outcome.code == 0, outcome.err
        assert outcome.out.count("\n") == len(source.lines)
        outcome = call("evaluate", str(self.folder), "--source", first, "--reference", second, *options)
        if not source.lines:
            assert outcome.code == 2
            assert "nothing to evaluate" in outcome.err
            return
        assert outcome.code == 0, outcome.err
        assert f"sentences  {len(source.lines)}\n" in outcome.out
        self.lines += len(source.lines)


def translate_files(files: Files, seeds: range) -> list[str]:
    """What went wrong, if anything."""
    wrong = []
    for seed in seeds:
        try:
            files.translate(random_file(seed), seed)
        except AssertionError as error:
            wrong.append(f"seed {seed}: {error}")
    # a line alone and among others may round differently; where two tokens are as likely to six digits, that decides
    assert files.near_ties <= 1 + files.lines // 2000, f"{files.near_ties} lines are not the translations of their own"
    return wrong


def judge_files(files: Files, seeds: range) -> list[str]:
    wrong = []
    for seed in seeds:
        source = random_file(2 * seed, policies=("replace",))
        same = None if seed % 5 == 0 else len(source.lines)
        try:
            files.judge(source, random_file(2 * seed + 1, num_lines=same, policies=("replace",)))
        except AssertionError as error:
            wrong.append(f"seed {seed}: {error}")
    return wrong


@pytest.mark.one_in(2, "random files")
def test_translate_fifty_random_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert translate_files(Files(folder, monkeypatch), range(10_000, 10_050)) == []


@pytest.mark.one_in(2, "random files")
def test_score_and_evaluate_random_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge_files(Files(folder, monkeypatch), range(10_000, 10_040)) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_translate_two_thousand_random_files(folder, monkeypatch, figure, part):
    """In five parts, ten thousand."""
    files = Files(folder, monkeypatch)
    wrong = translate_files(files, range(2000 * part, 2000 * (part + 1)))
    figure(
        "R7",
        f"translate 1:1 on random files, part {part}",
        files=2000,
        lines=files.lines,
        failures=len(wrong),
        cut=files.long,
        near_ties=files.near_ties,
    )
    assert wrong == []


@pytest.mark.slow
def test_score_and_evaluate_two_hundred_pairs_of_files(folder, monkeypatch, figure):
    files = Files(folder, monkeypatch)
    wrong = judge_files(files, range(200))
    figure("R7", "score and evaluate: a row for every pair", files=200, pairs=files.lines, failures=len(wrong))
    assert wrong == []


def test_the_files_are_odd_enough() -> None:
    """Each kind of trouble is met often, so that a test that passes has met it."""
    files = [random_file(seed) for seed in range(2000)]
    assert sum(file.bad for file in files) > 300
    assert sum(LONG in line for file in files for line in file.lines) > 100
    assert sum(not line.strip() for file in files for line in file.lines) > 1000
    assert sum(file.content[:2] == b"\x1f\x8b" for file in files) > 300
    assert sum(file.content[:3] == b"\xef\xbb\xbf" for file in files) > 100
    assert len(Tokenizer.train(["a b"], TokenizerSettings(vocab_size=300)).encode(LONG)) > LIMIT
