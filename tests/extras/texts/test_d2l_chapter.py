"""What d2l's Transformer chapter calls beside its modules: data, training, translation, of both editions."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from manyheads.errors import ManyHeadsError
from manyheads.extras.texts import d2l

PAIRS = [
    ("go.", "va !"),
    ("i lost.", "j'ai perdu."),
    ("he's calm.", "il est calme."),
    ("i'm home.", "je suis chez moi."),
]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A file like the text's, with a non-breaking space, capitals, and a third part."""
    path = tmp_path / "fra.txt"
    lines = [f"{source.capitalize()}\t{target}\tCC-BY" for source, target in PAIRS]
    path.write_text("\n".join(lines).replace("va !", "va\u202f!"), "utf-8")
    return path


def test_data_of_the_chinese_edition(pairs: Path) -> None:
    text = d2l.preprocess_nmt(d2l.read_data_nmt(pairs))
    source, target = d2l.tokenize_nmt(text)
    assert source == [["go", "."], ["i", "lost", "."], ["he's", "calm", "."], ["i'm", "home", "."]]
    assert target[0] == ["va", "!"]
    assert [len(side) for side in d2l.tokenize_nmt(text, 1)] == [2, 2]  # one more than asked for, as in the text
    vocab = d2l.Vocab(source, min_freq=2, reserved_tokens=["<pad>", "<bos>", "<eos>"])
    assert vocab.idx_to_token == ["<unk>", "<pad>", "<bos>", "<eos>", "."]
    assert (len(vocab), vocab["."], vocab[["go", "."]], vocab.to_tokens([4, 0])) == (5, 4, [0, 4], [".", "<unk>"])
    assert vocab.to_tokens(torch.tensor([4])) == ["."]
    assert vocab.to_tokens(4) == "."
    array, lens = d2l.build_array_nmt(source[:2], vocab, 3)
    assert array.tolist() == [[0, 4, 3], [0, 0, 4]]  # the end of the second line is cut
    assert lens.tolist() == [3, 3]
    loader, src_vocab, tgt_vocab = d2l.load_data_nmt(2, 8, path=pairs)
    [batch, _] = loader
    assert [one.shape for one in batch] == [(2, 8), (2,), (2, 8), (2,)]
    assert src_vocab["."] == tgt_vocab["."] == 4
    embedded = d2l.read_data_nmt().split("\n")
    assert len(embedded) == 60_000
    assert embedded[0] == "I got an A.\tIch habe eine Eins bekommen."


def test_small_parts() -> None:
    predicted, label = torch.randn(2, 3, 5, requires_grad=True), torch.tensor([[1, 2, 3], [4, 0, 0]])
    losses = d2l.MaskedSoftmaxCELoss()(predicted, label, torch.tensor([3, 1]))
    each = -predicted.log_softmax(-1).gather(2, label[..., None])[..., 0]
    torch.testing.assert_close(losses, torch.stack([each[0].sum(), each[1, 0]]) / 3)
    assert d2l.bleu("a b c", "a b c", k=2) == 1.0
    assert d2l.bleu("a a b", "a b c d", k=2) == pytest.approx(math.exp(-1 / 3) * (2 / 3) ** 0.5 * (1 / 2) ** 0.25)
    assert d2l.bleu("va", "va !", k=2) == 0.0  # the text divides by zero
    sums = d2l.Accumulator(2)
    sums.add(1, torch.tensor(2))
    sums.add(3, 4)
    assert (sums[0], sums[1]) == (4.0, 6.0)
    sums.reset()
    assert sums.data == [0.0, 0.0]
    timer = d2l.Timer()
    timer.stop()
    timer.stop()
    assert timer.sum() == timer.cumsum()[1] == pytest.approx(2 * timer.avg())
    layer = nn.Linear(2, 1)
    (100 * layer(torch.ones(1, 2))).sum().backward()
    d2l.grad_clipping(layer, 1)
    assert torch.cat([one.grad.flatten() for one in layer.parameters()]).norm() == pytest.approx(1)
    assert d2l.try_gpu(99).type == d2l.cpu().type == "cpu"
    assert d2l.try_all_gpus()
    assert (d2l.gpu(1).index, d2l.num_gpus()) == (1, torch.cuda.device_count())


def test_the_english_editions_way_to_write_a_class() -> None:
    """A module whose methods are added later, with its arguments as attributes."""

    class Attention(d2l.Module):
        def __init__(self, num_hiddens: int, num_heads: int, _private: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["num_hiddens"])
            self.W_q = nn.LazyLinear(num_hiddens)

    @d2l.add_to_class(Attention)
    def forward(self: Attention, X: torch.Tensor) -> torch.Tensor:  # noqa: N803
        return d2l.transpose_qkv(self.W_q(X), self.num_heads)

    attention = Attention(8, 2)
    assert attention.hparams == {"num_heads": 2}
    assert attention(torch.zeros(1, 3, 5)).shape == (2, 3, 4)
    assert list(attention.state_dict()) == ["W_q.weight", "W_q.bias"]


def test_the_chinese_edition_learns_its_pairs(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    sides = d2l.tokenize_nmt(d2l.preprocess_nmt(d2l.read_data_nmt(pairs)))
    src_vocab, tgt_vocab = (d2l.Vocab(side, 1, ["<pad>", "<bos>", "<eos>"]) for side in sides)  # also rare words
    arrays = [d2l.build_array_nmt(side, vocab, 8) for side, vocab in zip(sides, (src_vocab, tgt_vocab), strict=True)]
    data = d2l.load_array([one for pair in arrays for one in pair], 4)
    sizes = (*[16] * 4, [16], 16, 32, 2, 1, 0.0)
    net = d2l.EncoderDecoder(
        d2l.TransformerEncoder(len(src_vocab), *sizes), d2l.TransformerDecoder(len(tgt_vocab), *sizes)
    )
    curve = d2l.train_seq2seq(net, data, 0.01, 60, tgt_vocab, d2l.try_gpu())
    assert curve.X == [[10, 20, 30, 40, 50, 60]]
    assert curve.Y[0][-1] < 0.3 * curve.Y[0][0]
    assert capsys.readouterr().out.startswith(f"loss {curve.Y[0][-1]:.3f}, ")
    assert curve.draw().axes[0].get_xlim() == (10, 60)
    found, weights = d2l.predict_seq2seq(net, "go .", src_vocab, tgt_vocab, 8, torch.device("cpu"), True)
    assert found.split(" ")[0] == "va"
    assert len(weights) >= 2
    assert weights[0][1][0].shape == (2, 1, 8)  # attention to the source, of the first block in the first step
    assert d2l.predict_seq2seq(net, "go . " * 9, src_vocab, tgt_vocab, 8, torch.device("cpu"))[1] == []


def test_the_english_edition_learns_its_pairs(pairs: Path) -> None:
    torch.manual_seed(0)
    data = d2l.MTFraEng(batch_size=2, num_steps=6, num_train=3, num_val=1, path=pairs)
    begin, end, pad = (data.tgt_vocab[mark] for mark in ("<bos>", "<eos>", "<pad>"))
    source, target, lens, label = data.build(["Go."], ["Va !"])
    assert lens.tolist() == [3]
    assert source[0, 2:].tolist() == [data.src_vocab["<eos>"], *[pad] * 3]
    assert target[0].tolist() == [begin, 0, 0, end, pad, pad]  # its words occur once, so they are unknown
    assert torch.equal(label[:, :-1], target[:, 1:])
    assert [len(list(loader)) for loader in (data.train_dataloader(), data.val_dataloader())] == [2, 1]
    encoder = d2l.TransformerEncoder(len(data.src_vocab), 16, 32, 2, 1, 0.0)
    decoder = d2l.TransformerDecoder(len(data.tgt_vocab), 16, 32, 2, 1, 0.0)
    model = d2l.Seq2Seq(encoder, decoder, tgt_pad=pad, lr=0.01)
    trainer = d2l.Trainer(max_epochs=30, gradient_clip_val=1, num_gpus=1)
    trainer.fit(model, data)
    assert not model.training
    assert len(trainer.board.Y[1]) == 30
    assert trainer.board.Y[0][-1] < 0.5 * trainer.board.Y[0][0]
    logits = model(target, target, lens)
    assert model.loss(logits, label) == nn.functional.cross_entropy(logits[0, :3], label[0, :3])
    ids, weights = model.predict_step(data.build(["go ."], ["va !"]), d2l.try_gpu(), data.num_steps, True)
    assert ids.shape == (1, 6)
    assert len(weights) == 6
    assert encoder.attention_weights[0].shape == (2, 6, 6)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: d2l.TransformerEncoder(10, 8, 16, 2, 1, 0.0)(torch.tensor([[1, 20]])), IndexError, "vocab_size=21"),
        (lambda: d2l.TransformerEncoder(10, 8, 16, 2, 1, 0.0)(torch.ones(1, 2)), RuntimeError, r"call X.long\(\)"),
        (lambda: d2l.TransformerEncoder(10, 8, 16, 2, 0, 0.0), ValueError, "num_blks is 0"),
        (
            lambda: d2l.TransformerDecoder(10, 8, 16, 2, 1, 0.0)(torch.tensor([[1]]), torch.ones(1, 2, 8)),
            ValueError,
            "the state is Tensor; give what init_state",
        ),
        (lambda: d2l.PositionalEncoding(8, 0.0, -1), RuntimeError, "max_len is -1"),
        (lambda: d2l.AddNorm([3, 4], 0.5)(torch.ones(2, 3, 5), torch.ones(2, 3, 5)), RuntimeError, r"\(3, 4\)"),
        (lambda: d2l.Decoder().init_state(None), NotImplementedError, "Decoder has no init_state"),
        (
            lambda: d2l.DecoderBlock(8, 8, 8, 8, [8], 8, 16, 2, 0.0, 1)(torch.ones(1, 2, 8), [None, None, [None]]),
            IndexError,
            "the state is list with 1 blocks; give what init_state",
        ),
        (
            lambda: d2l.TransformerDecoderBlock(8, 16, 2, 0.0, 0)([1], [None, None, [None]]),
            AttributeError,
            "X is list; give a tensor",
        ),
        (lambda: d2l.masked_softmax(torch.ones(1, 2).long(), None), NotImplementedError, r"call X\.float\(\)"),
        (lambda: d2l.check_shape([1], (1,)), AttributeError, r"a is list; give a tensor \(1\)"),
        (lambda: d2l.PositionWiseFFN(8, 8, 8)(torch.tensor(1.0)), RuntimeError, r"shape \(\), a width of 0"),
        (lambda: d2l.masked_softmax([[1.0]], None), TypeError, "X is list; give a tensor"),
        (lambda: d2l.Accumulator(2).add(1), IndexError, "2 sums, but 1 numbers"),
        (lambda: d2l.show_heatmaps(torch.rand(1, 2, 3, 4), "", "", ["a"]), IndexError, "1 titles for 2 columns"),
        (lambda: d2l.plot([1, 2], [1, 2, 3]), ValueError, "2 places, but .* 3 values"),
        (lambda: d2l.bleu("a", "a", 0), ValueError, "k is 0"),
        (lambda: d2l.load_data_nmt(2, 8, path="nowhere.txt"), OSError, "nowhere.txt cannot be read"),
        (lambda: d2l.load_data_nmt(0, 8), ValueError, "batch_size is 0"),
        (lambda: d2l.load_data_nmt(2, 0), ValueError, "num_steps is 0"),
        (lambda: d2l.Vocab(["a"]).to_tokens([5]), IndexError, "5 is no id .* 0 to 1"),
        (lambda: d2l.Trainer(3, num_gpus=2), NotImplementedError, "num_gpus is 2"),
        (
            lambda: d2l.train_seq2seq(nn.Linear(1, 1), [], 0.1, 1, d2l.Vocab(), "cpu"),
            ZeroDivisionError,
            "data_iter has no batch",
        ),
        (
            lambda: d2l.MaskedSoftmaxCELoss()(torch.zeros(2, 3, 5), torch.zeros(2, 4).long(), torch.ones(2)),
            AssertionError,
            r"\(2, 4\), not \(2, 3\)",
        ),
        (
            lambda: d2l.MaskedSoftmaxCELoss()(torch.zeros(2, 3, 5), torch.zeros(2, 3).long(), torch.ones(3)),
            IndexError,
            "2 rows",
        ),
    ],
)
def test_mistakes(call: Callable[[], object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        call()
    assert isinstance(caught.value, ManyHeadsError)


def test_curves_of_a_training_by_the_texts_options() -> None:
    """Options by place as in the text; a place for each curve, and a value that is missing."""
    animator = d2l.Animator("epoch", "loss", ["a", "b"], [1, 9], None, "linear", "log", ("-", "m--"), 1, 2, (4, 2))
    animator.add(1, (0.5, None))
    animator.add(torch.tensor(2.0), torch.tensor([0.25, 3.0]))
    animator.add([3, 4], [0.125, 2.0])
    assert (animator.X, animator.Y) == ([[1, 2, 3], [2, 4]], [[0.5, 0.25, 0.125], [3, 2]])
    figure = animator.draw()
    first, second = figure.axes
    assert [len(line.get_xdata()) for line in first.lines] == [3, 3]
    assert (first.get_yscale(), first.lines[1].get_color(), second.lines[:]) == ("log", "m", [])
    with pytest.raises(ValueError, match=r"there are 2 curves, but 1 places and 1 values"):
        animator.add(5, 0.1)
