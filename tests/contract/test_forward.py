"""One pass over a batch: shapes, no leak from the future or from padding, loss and gradients."""

import copy
import json
import re
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.decoding.model_runner import inference, narrow
from manyheads.errors import ConfigError, ShapeError

VOCAB = 23


def test_shapes(subject: Any, precision: Any, make_batch: Any) -> None:
    model, batch = subject.build(), make_batch([5, 3], [6, 4])
    with precision.on():
        log_probs = model.log_probs(batch.source, batch.source_lengths, batch.target_input)
        output = model(batch, label_smoothing=0.1)
    assert log_probs.shape == (2, 5, VOCAB)
    assert log_probs.dtype == output.loss_sum.dtype == output.nll_sum.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 5), atol=1e-4, rtol=0.0)
    assert output.num_tokens == batch.num_target_tokens() == 8
    assert output.loss_sum.requires_grad
    assert not output.nll_sum.requires_grad


def test_tensors_in_place_of_a_batch(subject: Any, make_batch: Any) -> None:
    model, batch = subject.build(), make_batch([5, 3], [6, 4])
    wanted = model(batch, label_smoothing=0.1)
    found = model(batch.source, batch.target, label_smoothing=0.1)
    assert found.num_tokens == wanted.num_tokens
    torch.testing.assert_close(found.loss_sum, wanted.loss_sum)
    for tensors, message in (
        ((batch.source,), "a source needs a target"),
        ((batch.source, batch.target[:1]), "source has 2 rows and target 1"),
        ((batch.source.float(), batch.target), "ids are whole numbers"),
        ((batch.source, batch.target[:, :1]), "at least 2"),
    ):
        with pytest.raises(ShapeError, match=message):
            model(*tensors)


def test_no_leak_from_the_future(subject: Any, precision: Any, make_batch: Any) -> None:
    """Whatever follows position t, what is said up to t stays as it is, to the bit. Where tokens are sorted by their
    hashes, later ones move earlier ones from one product to another, which may round otherwise: there, in float64 for
    fp32, and within what bf16 itself loses."""
    model, batch = subject.build(), make_batch([5, 3], [9, 9])
    target, allowed = batch.target_input, 0.0
    if subject.hashes:
        allowed = 1e-12
        if precision.name == "fp32":
            model = model.double()
        else:
            allowed = precision.tolerance(model, lambda m: m.log_probs(batch.source, batch.source_lengths, target))
    with torch.no_grad(), precision.on():
        before = model.log_probs(batch.source, batch.source_lengths, target)
        for t in range(target.shape[1] - 1):
            changed = target.clone()
            changed[:, t + 1 :] = (changed[:, t + 1 :] + 5) % VOCAB
            after = model.log_probs(batch.source, batch.source_lengths, changed)
            assert (after - before)[:, : t + 1].abs().max() <= allowed
            assert not torch.allclose(after[:, t + 1 :], before[:, t + 1 :], atol=1e-3)


def test_padding_changes_nothing(subject: Any, precision: Any, make_batch: Any) -> None:
    """A sentence alone, and in a batch with longer ones, whatever ids stand at the padding."""
    model, batch = subject.build(), make_batch([4, 9, 1], [5, 8, 3])
    noisy = batch.source.masked_fill(torch.arange(9)[None] >= batch.source_lengths[:, None], 17)
    for row, (s, t) in enumerate(zip([4, 9, 1], [4, 7, 2], strict=True)):
        precision.assert_same(
            model,
            lambda m, r=row, s=s, t=t: m.log_probs(
                batch.source[r : r + 1, :s], batch.source_lengths[r : r + 1], batch.target_input[r : r + 1, :t]
            ),
            lambda m, r=row, t=t: m.log_probs(noisy, batch.source_lengths, batch.target_input)[r : r + 1, :t],
        )


def test_the_source_is_read(subject: Any, make_batch: Any) -> None:
    """Every source token and its place reach the target; so does every earlier target token, but where what is seen of
    the target is up to its hashes: there, as long as it is attended to exactly."""
    model, batch = subject.build(), make_batch([6], [6])
    with torch.no_grad():
        before = model.log_probs(batch.source, batch.source_lengths, batch.target_input)
        for i in range(6):
            changed = batch.source.clone()
            changed[0, i] = (changed[0, i] + 3) % VOCAB
            after = model.log_probs(changed, batch.source_lengths, batch.target_input)
            assert ((after - before).abs().amax(-1) > 1e-6).all()
        swapped = batch.source[:, [1, 0, 2, 3, 4, 5]]
        assert not torch.allclose(model.log_probs(swapped, batch.source_lengths, batch.target_input), before, atol=1e-4)
        if subject.hashes:
            model = subject.build(exact_len=batch.target_input.shape[1])
            before = model.log_probs(batch.source, batch.source_lengths, batch.target_input)
        for t in range(4):
            changed = batch.target_input.clone()
            changed[0, t] = (changed[0, t] + 3) % VOCAB
            after = model.log_probs(batch.source, batch.source_lengths, changed)
            assert ((after - before)[:, t:].abs().amax(-1) > 1e-6).all()


def test_an_encoder_sees_what_follows(subject: Any, make_batch: Any) -> None:
    """The first place depends on the last token: also where an encoder hashes, whose decoder looks back alone."""
    model, batch = subject.build(), make_batch([6], [4])
    changed = batch.source.clone()
    changed[0, -1] = (changed[0, -1] + 3) % VOCAB
    with torch.no_grad():
        before, after = (model.body.encode(source, batch.source_lengths) for source in (batch.source, changed))
    assert float((after - before)[0, 0].abs().max()) > 1e-6


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_is_cross_entropy_over_real_tokens(subject, precision, make_batch, label_smoothing):
    model, batch = subject.build(), make_batch([5, 3, 4], [6, 4, 2])

    def plain(m: Any) -> torch.Tensor:
        log_probs = m.log_probs(batch.source, batch.source_lengths, batch.target_input)
        real = torch.arange(5)[None] < batch.target_lengths[:, None] - 1
        spread = -log_probs.mean(-1)[real]
        nll = F.nll_loss(log_probs[real], batch.target_labels[real], reduction="none")
        return torch.stack([((1 - label_smoothing) * nll + label_smoothing * spread).sum(), nll.sum()]) / real.sum()

    def ours(m: Any) -> torch.Tensor:
        out = m(batch, label_smoothing=label_smoothing)
        return torch.stack([out.loss_sum, out.nll_sum]) / out.num_tokens

    precision.assert_same(model, plain, ours)


def test_chunked_loss_has_the_gradients_of_the_whole(subject: Any, precision: Any, make_batch: Any) -> None:
    """Against autograd's own gradient of the plain formula in one piece; in bf16, twice its distance from float64."""
    model, batch = subject.build(), make_batch([5, 3], [7, 4])
    real = torch.arange(6)[None] < batch.target_lengths[:, None] - 1

    def grads(m: Any, chunk: int | None, low: bool) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            if chunk is None:
                log_probs = m.log_probs(batch.source, batch.source_lengths, batch.target_input)[real]
                loss = (
                    0.9 * F.nll_loss(log_probs, batch.target_labels[real], reduction="sum")
                    - 0.1 * log_probs.mean(-1).sum()
                )
            else:
                loss = m(batch, label_smoothing=0.1, chunk_tokens=chunk).loss_sum
        return [g.double() for g in torch.autograd.grad(loss, list(m.parameters()))]

    exact = grads(copy.deepcopy(model).double(), None, low=False)
    plain = grads(model, None, low=precision.name == "bf16")
    scale = max(g.abs().max().item() for g in exact)
    allowed = 1e-5 * scale
    if precision.name == "bf16":
        allowed = 2 * max((p - e).abs().max().item() for p, e in zip(plain, exact, strict=True))
    for chunk_tokens in (1, 3, 7):
        ours = grads(model, chunk_tokens, low=precision.name == "bf16")
        assert max((o - e).abs().max().item() for o, e in zip(ours, exact, strict=True)) <= allowed, chunk_tokens


DEGENERATE = [
    *(([0, 0], [2, 2]), ([1, 1], [2, 2]), ([0, 4], [5, 1]), ([3, 3], [1, 1])),
    *(([0, 0], [1, 1]), ([0, 0], [0, 0]), ([4, 0], [0, 3])),
]


def test_degenerate_batches_stay_finite(subject: Any, precision: Any, make_batch: Any) -> None:
    """Sources of padding alone, single tokens, targets with nothing to say: finite values and gradients."""
    model = subject.build()
    for source, target in DEGENERATE:
        batch = make_batch([max(1, n) for n in source], [max(2, n) for n in target])
        batch = replace(batch, source_lengths=torch.tensor(source), target_lengths=torch.tensor(target))
        with precision.on():
            output = model(batch, label_smoothing=0.1)
            log_probs = model.log_probs(batch.source, batch.source_lengths, batch.target_input)
        assert log_probs.isfinite().all()
        assert output.loss_sum.isfinite()
        assert output.num_tokens == sum(max(0, n - 1) for n in target)
        grads = torch.autograd.grad(output.loss_sum, list(model.parameters()), allow_unused=True)
        assert all(grad is None or bool(grad.isfinite().all()) for grad in grads)


def test_nothing_to_read_gives_finite_words(subject: Any, precision: Any, make_batch: Any) -> None:
    """Searching from a source of padding, a token at a time."""
    model, batch = subject.build(), make_batch([1, 1], [4, 4])
    with torch.no_grad(), precision.on():
        for source in ([0, 0], [1, 0], [1, 1]):
            state = model.start(batch.source, torch.tensor(source))
            for position in range(3):
                log_probs, state = model.step(batch.target_input[:, position : position + 1], state)
                assert log_probs.isfinite().all()


def test_evaluation_is_deterministic_and_training_is_not(subject: Any, make_batch: Any) -> None:
    model, batch = subject.build(), make_batch([5, 3], [6, 4])
    assert torch.equal(model(batch).loss_sum, model(batch).loss_sum)
    model.train()
    assert not torch.equal(model(batch).loss_sum, model(batch).loss_sum)


def test_validation_leaves_no_gradient(subject: Any, make_batch: Any) -> None:
    """The printed loop also runs backward on validation batches, and the next step takes their gradients."""
    model, batch = subject.build(), make_batch([5, 3], [6, 4])
    with torch.no_grad():
        output = model(batch)
    assert not output.loss_sum.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rates_of_dropout_reach_every_part(subject: Any) -> None:
    """Attention dropout too, which the printed model leaves at its default whatever is asked for."""
    from manyheads.nn.attention.lsh import LSHSelfAttention
    from manyheads.nn.attention.multi_head import MultiHeadAttention
    from manyheads.nn.layers import Dropout

    rates = {"dropout": 0.25, "attention_dropout": 0.5, "feed_forward_dropout": 0.125}
    rates = {name: rate for name, rate in rates.items() if hasattr(subject.config, name)}
    model = subject.build(**rates)
    attention = [m.dropout_rate for m in model.modules() if isinstance(m, MultiHeadAttention | LSHSelfAttention)]
    assert attention
    assert set(attention) == {rates.pop("attention_dropout")}
    assert {m.rate for m in model.modules() if isinstance(m, Dropout)} == set(rates.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_attention_kind_is_under_contract(architecture: str) -> None:
    """A new kind in a config's union, or among its names, or those of its layers, must appear among the variants."""
    from dataclasses import fields

    here = Path(__file__).with_name("conftest.py").read_text("utf-8")
    hints = typing.get_type_hints(ARCHITECTURES[architecture].config)
    if "layers" in hints:  # each has a kind of its own
        kinds = typing.get_args(typing.get_args(hints["layers"])[0])
        assert kinds
        named = [kind for kind in kinds if re.search(rf'"layers": \([^)]*"{kind}"', here)]
        assert {*named, *ARCHITECTURES[architecture].presets["debug"].kinds} == {*kinds}
        return
    if "attention" not in hints:
        return  # it has one kind alone
    kinds = typing.get_args(hints["attention"])
    assert kinds
    if all(isinstance(kind, str) for kind in kinds):
        default = ARCHITECTURES[architecture].presets["debug"].attention
        assert [kind for kind in kinds if kind != default and f'"attention": "{kind}"' not in here] == []
        return
    default = type(ARCHITECTURES[architecture].presets["debug"].attention)
    assert [kind.__name__ for kind in kinds if kind is not default and f"{kind.__name__}()" not in here] == []
    assert {"attention"} <= {f.name for f in fields(ARCHITECTURES[architecture].config)}


def test_exemptions_name_real_tests() -> None:
    """An exemption is for an architecture of the table and a test of this folder, and gives a reason."""
    folder = Path(__file__).parent
    source = "\n".join(path.read_text("utf-8") for path in folder.glob("test_*.py"))
    for name, reason in json.loads((folder / "exemptions.json").read_text("utf-8")).items():
        architecture, test = name.partition("/")[0], name.rpartition("/")[2].partition("[")[0]
        assert architecture in ARCHITECTURES
        assert test == "*" or f"def {test}(" in source
        assert len(reason.split()) >= 4


@pytest.mark.parametrize(
    ("preset", "vocab", "millions"), [("tiny", 10_000, 2.6), ("base", 37_000, 63.1), ("big", 37_000, 214.3)]
)
def test_presets_have_the_papers_sizes(preset: str, vocab: int, millions: float) -> None:
    """Vaswani et al. 2017, table 3: 65M and 213M. The paper does not say what it counts; ours are within 3 %."""
    config = replace(ARCHITECTURES["transformer"].presets[preset], source_vocab_size=vocab, target_vocab_size=vocab)
    with torch.device("meta"):
        model = build_model(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted / 1e6 == pytest.approx(millions, abs=0.06)
    paper = {"base": 65, "big": 213}.get(preset, counted / 1e6)
    assert counted / 1e6 == pytest.approx(paper, rel=0.03)


def test_mistakes_in_a_config_are_named() -> None:
    config = ARCHITECTURES["transformer"].config
    for changes, said in [
        ({"d_model": 30, "num_heads": 4}, "not divisible"),
        ({"dropout": 1.0}, r"must be in \[0, 1\)"),
        ({"d_ff": 0}, "from 1 to 16,777,216"),
        ({"num_encoder_layers": -1}, "from 0 to 1,024"),
        ({"source_vocab_size": 4, "target_vocab_size": 5}, "tie_embeddings"),
    ]:
        with pytest.raises(ConfigError, match=said):
            config(**changes)
    with pytest.raises(ConfigError, match="source_vocab_size is not set"):
        build_model(config())


def test_narrowing_the_maps_changes_no_bit(any_subject: Any) -> None:
    """What autocast would cast in each call is cast once; tables stay as they are."""
    model = any_subject.build()
    tables = {name: module.weight.clone() for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    with inference(torch.device("cpu"), "bf16"):
        before = any_subject.say(model)
        narrow(model, "bf16")
        after = any_subject.say(model)
    assert torch.equal(before, after)
    assert any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert all(torch.equal(model.get_submodule(name).weight, table) for name, table in tables.items())
    narrow(wide := any_subject.build(), "fp32")
    assert all(parameter.dtype == torch.float32 for parameter in wide.parameters())
