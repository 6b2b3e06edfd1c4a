"""Neighbours and maps of embeddings against slow oracles in float64, for every architecture."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.errors import ModelFileError
from manyheads.extras.inspect import embeddings as subject
from manyheads.extras.inspect.embeddings import EmbeddingTable, embedding_tables, nearest, principal_plane
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.nn.positions import TokenEmbedding

VOCAB = 37
XL = TransformerXLConfig(vocab_size=VOCAB, d_model=16, num_heads=2, d_ff=32, num_layers=1, memory_len=4)


def configs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, entry in ARCHITECTURES.items():
        config = entry.presets["debug"]
        sizes = [size for size in ("vocab_size", "source_vocab_size", "target_vocab_size") if hasattr(config, size)]
        found[name] = replace(config, **dict.fromkeys(sizes, VOCAB))
    found["untied"] = replace(found["transformer"], tie_embeddings="none", target_vocab_size=VOCAB + 4)
    found["adaptive"] = replace(XL, cutoffs=(7, 20), div_value=2)
    found["projected"] = replace(XL, d_embed=12, cutoffs=(7,))
    return found


CONFIGS = configs()


def model_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = build_model(CONFIGS[name]).double()
    return model


def rows_of(table: EmbeddingTable) -> list[list[float]]:
    """The vectors as the papers define them, from the parameters alone, without the module's forward."""
    module: Any = table.module
    if isinstance(module, TokenEmbedding):
        return [[module.scale * x for x in row] for row in module.weight.tolist()]
    found = []
    for number, weights in enumerate(module.tables):
        for row in weights.tolist():
            if module.projections is not None:
                matrix = module.projections[number].tolist()
                row = [sum(a * b for a, b in zip(row, line, strict=True)) for line in matrix]
            found.append([math.sqrt(len(row)) * x for x in row])
    return found


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(x * x for x in b))


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("numbers_at_once", [1 << 22, 100])
def test_neighbours_are_those_of_a_slow_search(monkeypatch, name, numbers_at_once):
    monkeypatch.setattr(subject, "_NUMBERS_AT_ONCE", numbers_at_once)
    for table in embedding_tables(model_of(name)):
        rows, ids = rows_of(table), [0, 6, 7, 19, 20, 36]
        assert table.num_rows == len(rows)
        assert table.width == len(rows[0])
        found = nearest(table, table.vectors(ids), 5, without=[[index] for index in ids])
        for index, near in zip(ids, found, strict=True):
            slow = sorted((-cosine(rows[index], row), other) for other, row in enumerate(rows) if other != index)[:5]
            assert [one.id for one in near] == [other for _, other in slow]
            assert [one.cosine for one in near] == pytest.approx([-value for value, _ in slow], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("transformer", [("source", "target")]),
        ("untied", [("source",), ("target",)]),
        ("reformer-seq2seq", [("source", "target")]),
        ("transformer-xl", [("tokens",)]),
        ("adaptive", [("tokens",)]),
        ("reformer", [("tokens",)]),
        ("transformer-classifier", [("tokens",)]),
        ("reformer-classifier", [("tokens",)]),
    ],
)
def test_sides(name: str, sides: list[tuple[str, ...]]) -> None:
    assert [table.sides for table in embedding_tables(model_of(name))] == sides


def table_of(weights: Tensor) -> EmbeddingTable:
    module = TokenEmbedding(*weights.shape, scale=False)
    module.weight = nn.Parameter(weights)
    return EmbeddingTable(("tokens",), module, *weights.shape)


def test_equal_neighbours_come_by_id_and_zeros_are_near_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_NUMBERS_AT_ONCE", 4)
    table = table_of(torch.tensor([[1.0, 0], [0, 0], [2, 0], [-1, 0], [3, 0], [0, 5]]))
    [near] = nearest(table, table.vectors([0]), 10, without=[[0]])
    assert [tuple(one) for one in near] == [(2, 1.0), (4, 1.0), (1, 0.0), (5, 0.0), (3, -1.0)]
    [near] = nearest(table, table.vectors([0]), 10, num_rows=3)
    assert [one.id for one in near] == [0, 2, 1]


def test_a_damaged_vector_is_named() -> None:
    weights = torch.ones(5, 2)
    weights[3, 1] = torch.nan
    with pytest.raises(ModelFileError, match="id 3 has infinite or undefined"):
        nearest(table_of(weights), torch.ones(1, 2).double(), 2)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, Tensor):
                self.numel = max(self.numel, one.numel())
        return out


def test_a_large_vocabulary_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_NUMBERS_AT_ONCE", 1 << 16)
    table = table_of(torch.randn(60_000, 16))
    queries = table.vectors([5])
    with Largest() as largest:
        nearest(table, queries, 3)
    assert 0 < largest.numel <= 1 << 16


@pytest.mark.parametrize("points", [40, 5])
def test_the_plane_is_that_of_the_covariance(points: int) -> None:
    vectors = torch.randn(points, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plane, shares = principal_plane(vectors)
    centred = vectors.numpy() - vectors.numpy().mean(0)
    values, directions = np.linalg.eigh(centred.T @ centred)
    for axis in (0, 1):
        direction = directions[:, -1 - axis]
        direction = direction * np.sign(direction[np.abs(direction).argmax()])
        np.testing.assert_allclose(plane[:, axis].numpy(), centred @ direction, atol=1e-10)
        assert shares[axis] == pytest.approx(values[-1 - axis] / values.sum())


def test_the_plane_has_one_sign_and_few_points_have_one() -> None:
    vectors = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plane, _ = principal_plane(vectors)
    again, _ = principal_plane(vectors.flip(0))
    torch.testing.assert_close(again.flip(0), plane)
    plane, shares = principal_plane(vectors[:1])
    assert plane.tolist() == [[0.0, 0.0]]
    assert shares == (0.0, 0.0)
    plane, shares = principal_plane(torch.tensor([[1.0], [3.0]]))
    assert sorted(plane[:, 0].tolist()) == [-1.0, 1.0]
    assert shares == (1.0, 0.0)
