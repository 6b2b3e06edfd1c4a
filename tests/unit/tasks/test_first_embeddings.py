"""The embeddings with which translators and language models begin."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.data.store import PairStore
from manyheads.distributed.group import Group
from manyheads.errors import ConfigError
from manyheads.extras.cooccurrence.embeddings import cooccurrence_embeddings, neighbour_embeddings
from manyheads.extras.research.presets import duplication
from manyheads.models.reformer.config import SEQ2SEQ_PRESETS
from manyheads.seeding import derive_seed
from manyheads.tasks.data_sets import begin_embeddings
from manyheads.tasks.language_modelling.settings import reformer_debug, xl_debug
from manyheads.tasks.translation.settings import TrainConfig, debug
from manyheads.training.run.components import assemble
from manyheads.training.run.loop import train
from manyheads.training.settings import TokenInitialSettings

CPU = torch.device("cpu")
Tie = Literal["all", "decoder", "embeddings", "none"]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Twenty steps of the copy task, whose words occur in the same pairs as themselves."""
    found = replace(debug(), run_dir=str(tmp_path / "run"), initial=TokenInitialSettings(embeddings="cooccurrence"))
    training = replace(found.training, max_steps=2, ema_decay=0.0, plots=False, tensorboard=False)
    return replace(found, training=training, validation=replace(found.validation, bleu_sentences=0))


def similarities(table: torch.Tensor) -> torch.Tensor:
    return table @ table.T


def pairs_of_four() -> PairStore:
    return PairStore.from_lists([([4, 5], [6]), ([5, 7], [4]), ([6], [7, 5])], 9)


def begin(model: Any, group: Group | None = None) -> None:
    pairs = pairs_of_four()
    tables = (model.body.source_embedding.weight, model.body.target_embedding.weight, model.head.weight)
    begin_embeddings(tables, 9, partial(cooccurrence_embeddings, pairs), 3, group or Group())


def test_a_run_begins_with_them(config: TrainConfig, tmp_path: Path) -> None:
    components = assemble(config, CPU, tmp_path / "data")
    table: Any = components.model.body.source_embedding.weight.detach()  # type: ignore[union-attr]
    learned = cooccurrence_embeddings(components.objective.stream.store, table.shape[1])  # type: ignore[attr-defined]
    occurs = learned.any(1)
    assert occurs.sum() >= 16
    torch.testing.assert_close(similarities(table[occurs]), similarities(learned[occurs]), atol=1e-5, rtol=1e-5)
    plain = assemble(replace(config, initial=TokenInitialSettings()), CPU, tmp_path / "data")
    random: Any = plain.model.body.source_embedding.weight.detach()  # type: ignore[union-attr]
    torch.testing.assert_close(table[~occurs], random[~occurs], rtol=0, atol=0)
    assert any("co-occurrence" in note for note in components.notes)
    assert not plain.notes


def test_the_turn_depends_on_the_seed_alone(config: TrainConfig, tmp_path: Path) -> None:
    tables = []
    for seed in (1, 1, 2):
        components = assemble(replace(config, seed=seed), CPU, tmp_path / f"data-{seed}")
        tables.append(components.model.body.source_embedding.weight.detach())  # type: ignore[union-attr]
    assert torch.equal(tables[0], tables[1])
    assert not torch.allclose(tables[0], tables[2], atol=0.1)


@pytest.mark.parametrize("tie", ["all", "decoder", "embeddings", "none"])
@pytest.mark.parametrize("kind", ["transformer", "reformer"])
def test_all_tables_get_them(kind: str, tie: Tie) -> None:
    sizes = {"source_vocab_size": 9, "target_vocab_size": 9, "tie_embeddings": tie}
    base: Any = debug().model if kind == "transformer" else SEQ2SEQ_PRESETS["debug"]
    model: Any = build_model(replace(base, **sizes))
    begin(model)
    tables = (model.body.source_embedding.weight, model.body.target_embedding.weight, model.head.weight)
    for table in tables:
        assert torch.equal(table[4:8], tables[0][4:8])
        torch.testing.assert_close(table[4:8].norm(dim=1), torch.ones(4))


def test_other_ranks_take_the_vectors_of_the_main_one() -> None:
    """They may compute other signs on another processor."""
    model: Any = build_model(replace(debug().model, source_vocab_size=9, target_vocab_size=9))
    sent = torch.randn(9, debug().model.d_model)

    class Second(Group):
        is_main = False

        def joined(self, part: torch.Tensor | None, *, rows: int) -> torch.Tensor:
            assert (part, rows) == (None, 9)
            return sent

    begin(model, Second())
    assert torch.equal(model.head.weight, sent)


def test_a_smaller_table_gets_the_first_rows() -> None:
    sizes: Any = {"source_vocab_size": 9, "target_vocab_size": 6, "tie_embeddings": "none"}
    model: Any = build_model(replace(debug().model, **sizes))
    begin(model)
    assert torch.equal(model.body.target_embedding.weight[4:], model.body.source_embedding.weight[4:6])


def test_a_resumed_run_does_not_compute_them_again(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    name = "manyheads.tasks.translation.objective.begin_embeddings"
    monkeypatch.setattr(name, lambda *given: calls.append(given[3]))
    train(config)
    assert calls == [derive_seed(config.seed, "embeddings")]
    longer = replace(config, training=replace(config.training, max_steps=3))
    assert train(longer).step == 3
    assert len(calls) == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["transformer-xl", "adaptive transformer-xl", "reformer"])
def test_a_language_model_begins_with_them(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = np.bincount
    monkeypatch.setattr(
        np, "bincount", lambda ids, minlength=0: counted.append(len(ids)) or count(ids, None, minlength)
    )
    base = reformer_debug() if kind == "reformer" else xl_debug()
    sizes: Any = {"cutoffs": (20, 60)} if kind.startswith("adaptive") else {}
    config = replace(base, model=replace(base.model, **sizes), initial=TokenInitialSettings(embeddings="cooccurrence"))
    components = assemble(config, CPU, tmp_path / "data")
    found: Any = components.model.body.embedding  # type: ignore[union-attr]
    table = (found.weight if kind == "reformer" else found.tables[0]).detach()
    text: Any = components.objective.data.train  # type: ignore[attr-defined]
    assert counted.count(len(text)) == 1  # the frequencies serve for the embeddings and for the output
    learned = neighbour_embeddings(text.ids, text.vocab_size, table.shape[1])
    occurs = learned.any(1)
    assert 60 < occurs.sum() < len(table)
    torch.testing.assert_close(similarities(table[occurs]), similarities(learned[occurs]), atol=1e-4, rtol=1e-4)
    assert table[~occurs].any()
    shares = torch.from_numpy(np.bincount(text.ids, minlength=len(table))).clamp(min=0.5)
    head: Any = components.model.head  # type: ignore[union-attr]
    width = head.weight.shape[1] if hasattr(head, "weight") else head.tables[0].shape[1]
    torch.testing.assert_close(head.log_probs(torch.zeros(width)), (shares / shares.sum()).log())
    assert any("neighbours" in note for note in components.notes)


def test_a_language_model_has_no_others_for_narrow_tables_and_drawn_tokens() -> None:
    initial = TokenInitialSettings(embeddings="cooccurrence")
    with pytest.raises(ConfigError, match=r"'cooccurrence'.*model.div_value to 1"):
        replace(xl_debug(), model=replace(xl_debug().model, cutoffs=(20, 60), div_value=2), initial=initial)
    with pytest.raises(ConfigError, match=r"'cooccurrence'.*'duplication-task'.*'random'"):
        replace(duplication(), initial=initial)
