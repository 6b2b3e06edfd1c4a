"""A text file that a language model is judged on is read as `prepare` reads it."""

from types import SimpleNamespace
from typing import Any

import pytest

from manyheads.data.language.prepared import TextData
from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import TextFiles
from manyheads.evaluation.likelihood import segments_of
from manyheads.evaluation.reading import Reading
from manyheads.tasks.language_modelling.evaluate import held_text
from manyheads.text.settings import VocabularySettings

TEXT = "one two three\n\n  \ntwo two\nthree one three one\n"


@pytest.mark.parametrize("documents", ["none", "files", "lines"])
@pytest.mark.parametrize("level", ["bytes", "words", "bpe"])
def test_a_text_file_has_the_ids_documents_and_counts_of_prepared_data(tmp_path, level, documents):
    """With lines as documents, the model has never read a line break."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text(TEXT, encoding="utf-8")
    settings = VocabularySettings(level=level, documents=documents, **({"vocab_size": 300} if level == "bpe" else {}))
    given: dict[str, Any] = {name: TextFiles(paths=[tmp_path / f"{name}.txt"]) for name in ("train", "test")}
    prepare_text(tmp_path / "data", **given, vocabulary=settings)
    data = TextData.open(tmp_path / "data")
    generator: Any = SimpleNamespace(vocabulary=data.vocabulary)
    held = held_text(generator, "model", text=str(tmp_path / "test.txt"))
    assert held.store.ids.tolist() == data.test.ids.tolist()
    if documents != "none":
        assert held.store.offsets.tolist() == data.test.offsets.tolist()
        separate = Reading(documents="separate", segment_len=4, lanes=2)
        wanted = segments_of(data.test, separate, data.vocabulary.end_id, data.vocabulary.begin_id)
        found = segments_of(held.store, separate, data.vocabulary.end_id, data.vocabulary.begin_id)
        for one, other in zip(wanted, found, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.resets.tolist() == other.resets.tolist()
    counts = data.counts("test")
    assert held.counts == {name: counts[name] for name in held.counts}
