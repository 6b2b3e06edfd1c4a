"""Mistakes in widely copied code that ours could fall into, one test each.

Others have theirs beside what they concern: the norm with the unbiased deviation (test_small_parts), label smoothing
over two words (test_head), Noam at step 0 (interop), attention dropout that ignores its setting, validation gradients
(contract), and positions past 5,000 or of odd width (test_positions).
"""

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.data.batch import PairBatch
from manyheads.errors import ConfigError
from manyheads.models.transformer.config import TransformerConfig
from manyheads.nn.attention.masks import Dense, KeyPadding, Lengths
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.kernels.attention import dot_product_weights


def test_a_mask_masks() -> None:
    """Filled with -1e-9, as printed, it masks nothing."""
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4) * 50
    weights = dot_product_weights(q, k, KeyPadding(torch.tensor([[True, False, True]])))
    assert (weights[..., 1] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 3))


def test_the_softmax_runs_without_a_mask_too() -> None:
    weights = dot_product_weights(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4))
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 3))


def test_targets_are_shifted_by_one() -> None:
    """The printed batch never sets its targets."""
    target = torch.tensor([[1, 7, 8, 2], [1, 9, 2, 0]])
    lengths = torch.tensor([4, 3])
    batch = PairBatch(
        source=target, source_lengths=lengths, target=target, target_lengths=lengths, sample_ids=torch.arange(2)
    )
    assert batch.target_input.tolist() == [[1, 7, 8], [1, 9, 2]]
    assert batch.target_labels.tolist() == [[7, 8, 2], [9, 2, 0]]
    assert batch.num_target_tokens() == 5


def test_bias_is_obeyed() -> None:
    """One write-up takes `bias` and ignores it."""
    assert [name for name, _ in MultiHeadAttention(8, 2, bias=False).named_parameters() if "bias" in name] == []
    assert sum("bias" in name for name, _ in MultiHeadAttention(8, 2, bias=True).named_parameters()) == 4
    config = TransformerConfig(
        source_vocab_size=5, target_vocab_size=5, d_model=8, num_heads=2, d_ff=8, norm_position="pre", bias=False
    )
    assert [name for name, _ in build_model(config).named_parameters() if "bias" in name] == []


def test_nothing_is_overwritten() -> None:
    """One masked softmax writes into its scores; inputs, masks and lengths stay as they were."""
    layer = MultiHeadAttention(8, 2)
    x, lengths = torch.randn(2, 3, 8), torch.tensor([1, 2])
    before = x.clone(), lengths.clone()
    layer(x, mask=Lengths(lengths))
    layer(x, x, x, mask=Dense(torch.ones(3, 3).tril()))
    assert torch.equal(x, before[0])
    assert torch.equal(lengths, before[1])


def test_input_width_may_differ_from_the_models() -> None:
    """The fused tutorial breaks when input_dim is not embed_dim."""
    layer = MultiHeadAttention(8, 2, query_dim=5, key_dim=5)
    assert layer(torch.randn(2, 3, 5))[0].shape == (2, 3, 8)


def test_a_mask_a_sentence_is_not_taken_for_one_a_head() -> None:
    """(batch, q_len, k_len) against (batch, heads, q_len, k_len): silently wrong when batch equals heads."""
    pattern = torch.stack([torch.eye(3), torch.ones(3, 3)]).bool()
    q, k = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    weights = dot_product_weights(q, k, Dense(pattern))
    torch.testing.assert_close(weights[0], torch.eye(3).expand(2, 3, 3))
    assert (weights[1] > 0).all()


def test_heads_must_divide_the_width() -> None:
    """One implementation rounds down without a word."""
    with pytest.raises(ConfigError, match="divisible"):
        MultiHeadAttention(10, 4)
    with pytest.raises(ConfigError, match="divisible"):
        TransformerConfig(d_model=10, num_heads=4)


@pytest.mark.parametrize("d_model", [9, 15])
def test_a_model_of_odd_width(d_model: int) -> None:
    config = TransformerConfig(
        source_vocab_size=7, target_vocab_size=7, d_model=d_model, num_heads=3, d_ff=8, num_encoder_layers=1
    )
    ids = torch.tensor([[3, 4, 2]])
    assert build_model(config).log_probs(ids, torch.tensor([3]), ids).shape == (1, 3, 7)
