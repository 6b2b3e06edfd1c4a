"""Damage to checkpoints, model folders and prepared data is refused, or healed by an older checkpoint; none is silent.

Each mutation is applied to a fresh copy, which is then read in every way that the program reads it. What is read must
be what was written, and if the damaged part was to be read there must be a message about it.
"""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import choose_checkpoint, echo, tiny

from manyheads.checkpoint.format import list_checkpoints, load_checkpoint, step_of
from manyheads.data.language.prepared import TextData
from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import TextBlock
from manyheads.data.preparing import Holdout
from manyheads.data.translation.prepared import PreparedData
from manyheads.decoding.translator import Translator
from manyheads.errors import ManyHeadsError
from manyheads.text.settings import VocabularySettings
from manyheads.training.run.loop import train

FAST, LONG, PARTS = 280, 2500, 4
SEED = 20261121
MANIFEST = "manifest.json"
POINTERS = ("latest", "best")


@dataclass(frozen=True)
class Subject:
    """files: relative path -> bytes, of a folder as it was written; donor: the same of another run or step."""

    kind: str
    files: dict[str, bytes]
    donor: dict[str, bytes]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    root = tmp_path_factory.mktemp("whole")
    for name, seed in (("one", 1), ("two", 2)):
        train(tiny(run_dir=str(root / name), seed=seed, training={"keep": 3}), translate=echo)
        text = TextBlock("test", f"a text of run {name} with words\n".encode() * 40)
        words = VocabularySettings(level="words", documents="lines")
        prepare_text(root / name / "text", train=text, vocabulary=words, holdout=Holdout(valid=200))

    def subject(kind: str, place: str) -> Subject:
        one, two = (next(iter(sorted((root / run).glob(place)))) for run in ("one", "two"))
        return Subject(kind, files_of(one), files_of(two))

    found = [subject("checkpoints", "checkpoints"), subject("model", "model"), subject("data", "data/copy-task-*")]
    found.append(subject("text", "text"))
    return {each.kind: each for each in found}


class Damage(random.Random):
    """Mutations of the folder `place`; each returns what it did, or "" if it changed nothing."""

    def __init__(self, subject: Subject, place: Path, seed: int) -> None:
        super().__init__(seed)
        self.subject = subject
        self.place = place
        # Checkpoints: damage is done to one of them; the newest half of the time.
        folders = sorted({name.split("/")[0] for name in subject.files if "/" in name})
        self.victim = ""
        if subject.kind == "checkpoints":
            self.victim = folders[-1] if self.random() < 0.5 else self.choice(folders)
        self.names = [name for name in subject.files if name.startswith(self.victim) and name not in POINTERS]

    def write(self, name: str, data: bytes) -> str:
        if data == (self.place / name).read_bytes():
            return ""
        (self.place / name).write_bytes(data)
        return name

    def pick(self, suffix: str = "") -> str:
        return self.choice([name for name in self.names if name.endswith(suffix)])

    def flip_bit(self) -> str:
        name = self.pick()
        data = bytearray((self.place / name).read_bytes())
        if data:
            data[self.randrange(len(data))] ^= 1 << self.randrange(8)
        return self.write(name, bytes(data))

    def zero_page(self) -> str:
        name = self.pick()
        data = bytearray((self.place / name).read_bytes())
        size = self.choice((16, 512, 4096))
        start = self.randrange(0, len(data) + 1, size)
        data[start : start + size] = bytes(len(data[start : start + size]))
        return self.write(name, bytes(data))

    def truncate(self) -> str:
        name = self.pick()
        data = (self.place / name).read_bytes()
        return self.write(name, data[: self.randrange(len(data) + 1)])

    def empty(self) -> str:
        return self.write(self.pick(), b"")

    def append(self) -> str:
        name = self.pick()
        more = self.choice((b"\n", b" ", b"\0", self.randbytes(self.randrange(1, 99))))
        return self.write(name, (self.place / name).read_bytes() + more)

    def repeat(self) -> str:
        name = self.pick()
        return self.write(name, (self.place / name).read_bytes() * 2)

    def swap_files(self) -> str:
        one, two = self.sample(self.names, 2)
        first, second = ((self.place / name).read_bytes() for name in (one, two))
        self.write(one, second)
        return self.write(two, first) and f"{one} and {two}"

    def lose_file(self) -> str:
        name = self.pick()
        (self.place / name).unlink()
        return name

    def take_from_another(self) -> str:
        """The same file of another step, or of another run."""
        name = self.pick()
        beside = [other for other in self.subject.files if other.endswith("/" + name.split("/")[-1]) and other != name]
        donor = self.subject.donor.get(name, b"")
        return self.write(name, self.subject.files[self.choice(beside)] if beside and self.random() < 0.5 else donor)

    def double_file(self) -> str:
        name = Path(self.pick())
        copy = self.place / name.with_name(f"{name.stem}{self.choice(('2', '.copy', ' (1)'))}{name.suffix}")
        shutil.copy(self.place / name, copy)
        return str(copy.name)

    def folder_for_file(self) -> str:
        name = self.pick()
        (self.place / name).unlink()
        (self.place / name).mkdir()
        return name

    def rename_file(self) -> str:
        name = Path(self.pick())
        (self.place / name).rename(self.place / name.with_name(name.name + self.choice(("~", ".bak", "x"))))
        return str(name)

    def edit_manifest(self) -> str:
        name = self.pick(MANIFEST)
        content = json.loads((self.place / name).read_bytes())
        files = content["files"]
        key = self.choice(sorted(files))
        edit = self.randrange(7)
        if edit == 0:
            del files[key]
        elif edit == 1:
            files[key + "x"] = files.pop(key)
        elif edit == 2:
            files[key] = files[self.choice(sorted(files))]
        elif edit == 3:
            files["more"] = {"sha256": "0" * 64, "size": 0}
        elif edit == 4:
            content[self.choice(sorted(set(content) - {"files"}))] = self.choice((0, 3, "x", None))
        elif edit == 5:
            content["more"] = 1
        else:
            files[key] = {**files[key], "size": float(files[key]["size"])} if "size" in files[key] else {}
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        return self.write(name, text.encode()) and f"{name}, edit {edit}"

    def reformat_manifest(self) -> str:
        name = self.pick(MANIFEST)
        return self.write(name, json.dumps(json.loads((self.place / name).read_bytes())).encode())

    # Of checkpoints alone:

    def rename_folder(self) -> str:
        newest = max(name.split("/")[0] for name in self.subject.files if "/" in name)
        name = self.choice(("step-00000010", "step-00000001", "step-00000099", "step-9", "elsewhere"))
        self.victim = newest
        (self.place / newest).rename(self.place / name)
        return f"{newest} to {name}"

    def file_for_folder(self) -> str:
        shutil.rmtree(self.place / self.victim)
        (self.place / self.victim).write_bytes(b"")
        return self.victim

    def lose_folder(self) -> str:
        self.victim = max(name.split("/")[0] for name in self.subject.files if "/" in name)
        shutil.rmtree(self.place / self.victim)
        return self.victim

    def link_file(self) -> str:
        name = self.pick()
        (self.place / name).rename(self.place / "elsewhere.bin")
        (self.place / name).symlink_to(self.place / "elsewhere.bin")
        return name

    def edit_pointer(self) -> str:
        name = self.choice(POINTERS)
        data = bytearray((self.place / name).read_bytes())
        data[self.randrange(len(data))] ^= 1 << self.randrange(8)
        others = [f"{folder}\n".encode() for folder in {name.split("/")[0] for name in self.subject.files}]
        others += [b"", b"step-00000099\n", b"../../etc\n", b"\xff\xfe", bytes(data), bytes(data), bytes(data)]
        self.victim = ""
        return self.write(name, self.choice(others)) and f"pointer {name}"


EVERYWHERE = (
    Damage.flip_bit,
    Damage.flip_bit,
    Damage.flip_bit,
    Damage.zero_page,
    Damage.truncate,
    Damage.empty,
    Damage.append,
    Damage.repeat,
    Damage.swap_files,
    Damage.lose_file,
    Damage.take_from_another,
    Damage.double_file,
    Damage.folder_for_file,
    Damage.rename_file,
    Damage.edit_manifest,
    Damage.reformat_manifest,
)
CHECKPOINTS = (
    Damage.rename_folder,
    Damage.file_for_folder,
    Damage.lose_folder,
    Damage.link_file,
    Damage.edit_pointer,
    Damage.edit_pointer,
)


class Originals:
    """What is read from whole folders."""

    def __init__(self, subjects: dict[str, Subject], place: Path) -> None:
        for kind, subject in subjects.items():
            restore(subject, place / kind)
        self.checkpoints = {path.name: load_checkpoint(path) for path in list_checkpoints(place / "checkpoints")}
        self.best = choose_checkpoint(place / "checkpoints", "best")[0]
        self.model = Translator.from_pretrained(place / "model", device="cpu")
        self.data = PreparedData.open(place / "data")
        self.text = TextData.open(place / "text")


def restore(subject: Subject, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    for name, data in subject.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)


def refused(read: Callable[[], Any], place: Path) -> str:
    """The message of the refusal, or "" if there was none."""
    text = ""
    try:
        read()
    except ManyHeadsError as error:
        text = str(error)
    first, *lines = text.split("\n")  # one mistake is one line; several are listed
    assert not lines or first.startswith(f"{len(lines)} mistakes in ")
    assert not text or all(str(place) in line for line in lines or [first])
    return text


def judge_checkpoints(damage: Damage, place: Path, originals: Originals) -> str:
    """`auto` must find a whole one and say so if it is not the newest; the damaged one must be refused by name."""
    checkpoint, warnings = choose_checkpoint(place, "auto")
    assert checkpoint is not None
    original = originals.checkpoints[checkpoint.path.name]
    assert checkpoint.scalars == original.scalars
    for stem, group in original.tensors.items():
        assert checkpoint.tensors[stem].keys() == group.keys()
        assert all(torch.equal(checkpoint.tensors[stem][name], tensor) for name, tensor in group.items())
    assert all("\n" not in text for text in warnings)
    newest = max(originals.checkpoints)
    assert checkpoint.path.name == newest or warnings, "an older one was taken without a word"
    if not damage.victim:  # a pointer
        assert checkpoint.path.name == newest
        answer: list[Any] = []
        said = refused(lambda: answer.extend(choose_checkpoint(place, "best")), Path("best"))
        assert said or answer[1] or answer[0].step == originals.best.step, "another best was taken without a word"
        return "refused" if said else "healed"
    assert checkpoint.path.name != damage.victim, "damage was not seen"
    if (place / damage.victim).is_dir():
        assert refused(lambda: load_checkpoint(place / damage.victim), place), "damage was not seen"
    return "healed" if damage.victim == newest else "refused"


def judge_model(damage: Damage, place: Path, originals: Originals) -> str:
    assert refused(lambda: Translator.from_pretrained(place, device="cpu"), place), "damage was not seen"
    return "refused"


def judge_data(damage: Damage, place: Path, originals: Originals) -> str:
    assert refused(lambda: PreparedData.open(place), place), "damage was not seen"
    return "refused"


def judge_text(damage: Damage, place: Path, originals: Originals) -> str:
    assert refused(lambda: TextData.open(place), place), "damage was not seen"
    return "refused"


JUDGES = {"checkpoints": judge_checkpoints, "model": judge_model, "data": judge_data, "text": judge_text}


def test_what_is_whole_is_accepted(subjects: dict[str, Subject], tmp_path: Path) -> None:
    originals = Originals(subjects, tmp_path)
    assert [step_of(Path(name)) for name in originals.checkpoints] == [6, 8, 9]
    assert originals.model.translate("w1 w2") is not None
    assert np.array_equal(originals.data.train[0][0], PreparedData.open(tmp_path / "data").train[0][0])
    assert originals.text.vocabulary.decode(originals.text.train.documents[0].tolist()).startswith("a text of run one")
    for kind in subjects:
        files = files_of(tmp_path / kind)
        assert len(files) >= 5
        assert not any(name.startswith("step-00000009/.") for name in files)


def damage_all(subjects: dict[str, Subject], place: Path, number: int, seed: int) -> Counter[str]:
    """Apply and judge so many mutations, the subjects in turn. Returns: verdicts, and mutations by name."""
    originals = Originals(subjects, place / "whole")
    counts: Counter[str] = Counter()
    done = tries = 0
    while done < number:
        tries += 1
        subject = list(subjects.values())[done % len(subjects)]
        here = place / subject.kind
        restore(subject, here)
        damage = Damage(subject, here, seed + tries)
        mutation = damage.choice(EVERYWHERE + (CHECKPOINTS if subject.kind == "checkpoints" else ()))
        did = mutation(damage)
        if not did:
            continue
        try:
            verdict = JUDGES[subject.kind](damage, here, originals)
        except Exception as error:
            raise AssertionError(
                f"{subject.kind}, {mutation.__name__} of {did}, seed {seed + tries}: {type(error).__name__}: {error}"
            ) from error
        counts[verdict] += 1
        counts[f"{subject.kind} {mutation.__name__}"] += 1
        done += 1
    return counts


def test_damage_is_refused_or_healed(subjects: dict[str, Subject], tmp_path: Path) -> None:
    counts = damage_all(subjects, tmp_path, FAST, random.randrange(2**32))
    assert counts["refused"] > FAST // 2
    assert counts["healed"] > FAST // 30


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_thousands_of_damages_are_refused_or_healed(subjects, tmp_path, figure, part):
    counts = damage_all(subjects, tmp_path, LONG, SEED + 1_000_000 * part)
    figure(
        "R4",
        f"mutated checkpoints, model folders and prepared data of pairs and of texts, part {part}",
        cases=LONG,
        refused=counts["refused"],
        healed_from_an_older_checkpoint=counts["healed"],
        silent=0,
        kinds={name: count for name, count in sorted(counts.items()) if " " in name},
    )
