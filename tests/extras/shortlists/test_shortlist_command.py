"""`manyheads shortlist` and `--shortlist N`, as a user gives them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from manyheads.distributed.sharded_lines import run_lines
from manyheads.extras.documents import files as documents
from manyheads.extras.documents.translating import Unit, UnitTranslator
from manyheads.extras.shortlists.shortlist import SHORTLIST
from manyheads.files.verify import make_manifest, verify_folder
from manyheads.tasks.translation import evaluate
from manyheads.text.tokenizer import Tokenizer


@pytest.fixture
def files(tmp_path: Path, pairs: list[tuple[str, str]]) -> tuple[Path, Path]:
    for name, column in (("source", 0), ("target", 1)):
        (tmp_path / name).write_text("".join(f"{pair[column]}\n" for pair in pairs), encoding="utf-8")
    return tmp_path / "source", tmp_path / "target"


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def test_learned_kept_and_used(manyheads, printed, folder, files, capsys, tmp_path):
    source, target = files
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    told = printed("shortlist", folder, "--source", source, "--target", target)
    assert f"{folder}/{SHORTLIST}: " in told
    assert "pairs\nnext: manyheads evaluate" in told
    verify_folder(folder)
    assert {name: (folder / name).read_bytes() for name in before} == before

    assert manyheads("translate", folder, source, "--output", tmp_path / "full") == 0
    assert manyheads("translate", folder, source, "--output", tmp_path / "listed", "--shortlist", "1000") == 0
    assert (tmp_path / "full").read_bytes() == (tmp_path / "listed").read_bytes()
    assert manyheads("translate", folder, source, "--output", tmp_path / "few", "--shortlist", "1") == 0
    assert (tmp_path / "full").read_bytes() != (tmp_path / "few").read_bytes()

    capsys.readouterr()
    given = ("evaluate", folder, "--source", source, "--reference", target, "--shortlist", "1")
    assert ", shortlist 1\n" in printed(*given, "--output", tmp_path / "judged")
    assert (tmp_path / "judged").read_bytes() == (tmp_path / "few").read_bytes()

    assert manyheads("prune", folder, "--heads", "encoder.0.self:1", "--output", tmp_path / "pruned") == 0
    capsys.readouterr()
    assert (tmp_path / "pruned" / SHORTLIST).read_bytes() == (folder / SHORTLIST).read_bytes()
    verify_folder(tmp_path / "pruned")
    assert json.loads(printed(*given, "--json"))["protocol"]["shortlist"] == 1

    assert "from 1 pairs" in printed("shortlist", folder, "--source", source, "--target", target, "--max-pairs", "1")


def test_finished_parts_are_of_the_same_shortlist(manyheads, folder, files, tmp_path, monkeypatch):
    """Else an interrupted command would go on from sentences that were searched in another way."""
    source, target = files
    (tmp_path / "page.md").write_text("a\n", encoding="utf-8")
    assert manyheads("shortlist", folder, "--source", source, "--target", target) == 0
    seen = []

    def run_and_see(*given: Any, identity: dict[str, Any], **more: Any) -> bool:
        seen.append(identity)
        return run_lines(*given, identity=identity, **more)

    for module in (documents, evaluate):
        monkeypatch.setattr(module, "run_lines", run_and_see)
    for more in ((), ("--shortlist", "1")):
        assert manyheads("evaluate", folder, "--source", source, "--reference", target, *more) == 0
        assert manyheads("translate", folder, tmp_path / "page.md", "-o", tmp_path / "out.md", *more) == 0
    assert [one["shortlist"] for one in seen] == [None, None, 1, 1]
    verify_folder(folder)


def test_a_document_does_not_go_on_with_another_shortlist(manyheads, refused, folder, files, tmp_path, monkeypatch):
    source, target = files
    assert manyheads("shortlist", folder, "--source", source, "--target", target) == 0
    whole = UnitTranslator.translate
    blocks: list[Any] = []

    def interrupted(self: UnitTranslator, units: list[Unit], **given: Any) -> list[str]:
        blocks.append(units)
        if len(blocks) == 2:
            raise KeyboardInterrupt
        return whole(self, units, **given)

    monkeypatch.setattr(UnitTranslator, "translate", interrupted)
    given = ("translate", folder, source, "--format", "text", "-o", tmp_path / "out", "--lines-at-once", "1")
    assert manyheads(*given) == 130
    assert "another command" in refused(*given, "--shortlist", "5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("translate", "MODEL", "FILE", "--shortlist", "0"), "--shortlist is 0; it must be at least 1."),
        (("evaluate", "MODEL", "--shortlist", "-3"), "--shortlist is -3; it must be at least 1."),
        (("translate", "MODEL", "FILE", "--shortlist", "5"), "has no shortlist.safetensors; learn one first"),
        (("translate", "MODEL", "FILE", "--shortlist", "5", "--compile"), "leave out --compile or --shortlist"),
        (("shortlist", "MODEL"), "its training pairs are unknown; give --data, or --source and --target"),
        (("shortlist", "MODEL", "--source", "FILE"), "--source and --target belong together"),
        (("shortlist", "MODEL", "--max-pairs", "0"), "--max-pairs is 0"),
        (("shortlist", "nowhere"), "there is no folder nowhere"),
        (("shortlist", "MODEL", "--source", "EMPTY", "--target", "EMPTY"), "no training pairs"),
    ],
)
def test_refused_with_one_sentence(manyheads, folder, files, capsys, tmp_path, arguments, message):
    (tmp_path / "empty").touch()
    names = {"MODEL": folder, "FILE": files[0], "EMPTY": tmp_path / "empty"}
    assert manyheads(*(names.get(word, word) for word in arguments)) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert "Traceback" not in told.err
    assert told.out == ""
    assert not (folder / SHORTLIST).exists()


def test_a_shortlist_of_another_model(manyheads, folder, files, capsys):
    """Put there by hand, with a manifest that covers it; and damaged."""
    assert manyheads("shortlist", folder, "--source", files[0], "--target", files[1]) == 0
    content = (folder / SHORTLIST).read_bytes()
    digest = Tokenizer.load(folder / "tokenizer.json").digest.encode()
    assert digest in content

    def told_with(changed: bytes, *, listed: bool) -> str:
        (folder / SHORTLIST).write_bytes(changed)
        if listed:
            (folder / "manifest.json").unlink()
            (folder / "manifest.json").write_text(make_manifest(folder), encoding="utf-8")
        capsys.readouterr()
        assert manyheads("translate", folder, files[0], "--shortlist", "5") == 2
        return capsys.readouterr().err

    other = content.replace(digest, b"0" * len(digest))
    assert "was learned with another vocabulary (000000000000) than the model's" in told_with(other, listed=True)
    assert f"contents of {SHORTLIST} differ from their SHA-256" in told_with(content[:-1] + b"\1", listed=False)
