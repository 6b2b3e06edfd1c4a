"""Dive into Deep Learning: attention with valid lengths, the Transformer chapter, its data, training and pictures.

    from manyheads.extras.texts import d2l  # instead of: from d2l import torch as d2l

The modules, with what differs from the text's, are in `d2l_model`, and `d2l_tools` has timers and pictures. Here are
`load_data_nmt`, `train_seq2seq`, `predict_seq2seq` of the Chinese edition, `MTFraEng`, `Seq2Seq`, `Trainer` of the
present English one.

Differs: nothing is downloaded. The sentence pairs are English and German ones of the package, the shortest first, or
those of a file `path` (English, tab, translation; the text's own `fra.txt` is one). `train_seq2seq` sets gradients to
zero before each step, which one edition forgets; `bleu` of a translation of fewer than k words is 0, where the text
divides by zero; curves are drawn on request, `draw()`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.cli.process import echo
from manyheads.data.corpora import load_tatoeba
from manyheads.errors import ConfigError, DataError, ShapeError
from manyheads.extras.texts.common import TextIndexError, also, check_at_least, check_axes, explain
from manyheads.extras.texts.d2l_model import (
    AdditiveAttention,
    AddNorm,
    AttentionDecoder,
    Decoder,
    DecoderBlock,
    DotProductAttention,
    Encoder,
    EncoderBlock,
    EncoderDecoder,
    MultiHeadAttention,
    PositionalEncoding,
    PositionWiseFFN,
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
    masked_softmax,
    sequence_mask,
    transpose_output,
    transpose_qkv,
)
from manyheads.extras.texts.d2l_tools import (
    Accumulator,
    Animator,
    HyperParameters,
    Module,
    Timer,
    add_to_class,
    check_shape,
    cpu,
    gpu,
    grad_clipping,
    num_gpus,
    plot,
    show_heatmaps,
    try_all_gpus,
    try_gpu,
)
from manyheads.files.safe_open import open_stream

__all__ = [
    "Accumulator",
    "AddNorm",
    "AdditiveAttention",
    "Animator",
    "AttentionDecoder",
    "Decoder",
    "DecoderBlock",
    "DotProductAttention",
    "Encoder",
    "EncoderBlock",
    "EncoderDecoder",
    "HyperParameters",
    "MTFraEng",
    "MaskedSoftmaxCELoss",
    "Module",
    "MultiHeadAttention",
    "PositionWiseFFN",
    "PositionalEncoding",
    "Seq2Seq",
    "Timer",
    "Trainer",
    "TransformerDecoder",
    "TransformerDecoderBlock",
    "TransformerEncoder",
    "TransformerEncoderBlock",
    "Vocab",
    "add_to_class",
    "bleu",
    "build_array_nmt",
    "check_shape",
    "cpu",
    "gpu",
    "grad_clipping",
    "load_array",
    "load_data_nmt",
    "masked_softmax",
    "num_gpus",
    "plot",
    "predict_seq2seq",
    "preprocess_nmt",
    "read_data_nmt",
    "sequence_mask",
    "show_heatmaps",
    "tokenize_nmt",
    "train_seq2seq",
    "transpose_output",
    "transpose_qkv",
    "truncate_pad",
    "try_all_gpus",
    "try_gpu",
]

_MARKS = ("<pad>", "<bos>", "<eos>")


class Vocab:
    """Tokens and their ids: 0 is `<unk>`, then the reserved ones, then the others, frequent ones first.

    Args: tokens: a list of tokens, or of lists of them. min_freq: rarer tokens are unknown.
    """

    def __init__(
        self, tokens: Sequence[Any] | None = None, min_freq: int = 0, reserved_tokens: Sequence[str] | None = None
    ) -> None:
        lines = [[one] if isinstance(one, str) else one for one in tokens or ()]
        counts = Counter(token for line in lines for token in line)
        self.token_freqs = sorted(counts.items(), key=lambda item: item[1], reverse=True)
        frequent = [token for token, count in self.token_freqs if count >= min_freq]
        self.idx_to_token = list(dict.fromkeys(["<unk>", *(reserved_tokens or ()), *frequent]))
        self.token_to_idx = {token: index for index, token in enumerate(self.idx_to_token)}

    def __len__(self) -> int:
        return len(self.idx_to_token)

    def __getitem__(self, tokens: Any) -> Any:
        """Return the id of a token, or the list of ids of a list of tokens."""
        if isinstance(tokens, list | tuple):
            return [self[token] for token in tokens]
        return self.token_to_idx.get(tokens, self.unk)

    def to_tokens(self, indices: Any) -> Any:
        """Return the token of an id, or the list of tokens of a list or tensor of ids."""
        ids = indices.tolist() if isinstance(indices, Tensor) else indices
        if isinstance(ids, list | tuple):
            return [self.to_tokens(index) for index in ids]
        if not 0 <= ids < len(self):
            raise TextIndexError(f"{ids} is no id of this vocabulary, which has the ids 0 to {len(self) - 1}.")
        return self.idx_to_token[ids]

    @property
    def unk(self) -> int:
        """The id of unknown tokens."""
        return 0


def read_data_nmt(path: Path | str | None = None) -> str:
    """Return sentence pairs as text, one a line: English, a tab, its translation.

    Args: path: a file of such lines; None: 60,000 English-German pairs of this package, the shortest first.
    Raises: DataError: the file cannot be read.
    """
    if path is None:
        return "\n".join("\t".join(pair) for pair in sorted(load_tatoeba("train"), key=lambda pair: len(pair[0])))
    try:
        with open_stream(Path(path)) as file:
            return file.read().decode("utf-8")
    except (OSError, UnicodeError) as error:
        raise also(DataError, OSError)(
            f"{path} cannot be read ({error}); give a UTF-8 file of lines with a sentence, a tab and its translation."
        ) from error


def preprocess_nmt(text: str) -> str:
    """Return the text in lower case, with a space before each of , . ! ? that has none."""
    text = text.replace("\u202f", " ").replace("\xa0", " ").lower()
    pairs = zip(" " + text, text, strict=False)  # each character, and the one before it
    return "".join(f" {char}" if char in ",.!?" and before != " " else char for before, char in pairs)


def tokenize_nmt(text: str, num_examples: int | None = None) -> tuple[list[list[str]], list[list[str]]]:
    """Return the words of the first lines, of all if None: of their first and of their second part.

    Like the text, it reads one line more than `num_examples`. Lines of fewer than two parts are left out; further parts
    (the file's notes on authors) are not read.
    """
    lines = text.split("\n")[: num_examples + 1 if num_examples else None]
    parts = [line.split("\t")[:2] for line in lines if "\t" in line]
    return [source.split(" ") for source, _ in parts], [target.split(" ") for _, target in parts]


def truncate_pad(line: list[Any], num_steps: int, padding_token: Any) -> list[Any]:
    """Return the first num_steps of a list, or the list with padding up to that length."""
    return line[:num_steps] + [padding_token] * (num_steps - len(line))


def build_array_nmt(lines: Sequence[Sequence[str]], vocab: Vocab, num_steps: int) -> tuple[Tensor, Tensor]:
    """Return ids with `<eos>` at the end, cut or padded, (lines, num_steps), and the number of ids of each line."""
    pad, end = vocab["<pad>"], vocab["<eos>"]
    array = torch.tensor([truncate_pad([*vocab[list(line)], end], num_steps, pad) for line in lines])
    return array, (array != pad).sum(dim=1, dtype=torch.int32)


def load_array(data_arrays: Sequence[Tensor], batch_size: int, is_train: bool = True) -> Any:
    """Return a loader of batches of these tensors, shuffled in training."""
    from torch.utils.data import DataLoader, TensorDataset

    check_at_least(1, batch_size=batch_size)
    return DataLoader(TensorDataset(*data_arrays), batch_size, shuffle=is_train)


def load_data_nmt(
    batch_size: int, num_steps: int, num_examples: int | None = 600, path: Path | str | None = None
) -> tuple[Any, Vocab, Vocab]:
    """Return a loader of (source, lengths, target, lengths), and the vocabularies; path: see `read_data_nmt`."""
    check_at_least(1, num_steps=num_steps)
    sides = tokenize_nmt(preprocess_nmt(read_data_nmt(path)), num_examples)
    if not sides[0]:
        raise DataError(f"{path} has no pair; its lines must be a sentence, a tab and its translation.")
    vocabularies = [Vocab(side, min_freq=2, reserved_tokens=_MARKS) for side in sides]
    arrays = [array for side in zip(sides, vocabularies, strict=True) for array in build_array_nmt(*side, num_steps)]
    return load_array(arrays, batch_size), vocabularies[0], vocabularies[1]


class MaskedSoftmaxCELoss(nn.CrossEntropyLoss):
    """The cross-entropy of each row, with 0 after its length, divided by num_steps.

    Shape: pred (batch, num_steps, vocab_size), label (batch, num_steps), valid_len (batch,) -> (batch,).
    """

    def forward(self, pred: Tensor, label: Tensor, valid_len: Tensor) -> Tensor:  # type: ignore[override]
        check_axes("pred", pred, "batch, num_steps, vocab_size", RuntimeError, ValueError)
        check_shape(label, pred.shape[:2])
        if label.is_floating_point() or label.dtype == torch.bool:
            raise also(ShapeError, RuntimeError)(f"label is of {label.dtype}; it must be whole numbers: label.long().")
        losses = F.cross_entropy(pred.transpose(1, 2), label, reduction="none")
        return sequence_mask(losses, valid_len).mean(dim=1)


def _xavier(module: nn.Module) -> None:
    if type(module) is nn.Linear:
        nn.init.xavier_uniform_(module.weight)


def train_seq2seq(
    net: nn.Module, data_iter: Iterable[Sequence[Tensor]], lr: float, num_epochs: int, tgt_vocab: Vocab, device: Any
) -> Animator:
    """Train with teacher forcing by Adam from Xavier's values, and print the last epoch's loss of a token.

    Returns: the loss of every tenth epoch, `draw()` for a picture.
    """
    check_at_least(1, num_epochs=num_epochs)
    net.apply(_xavier)
    net.to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    loss = MaskedSoftmaxCELoss()
    net.train()
    animator = Animator(xlabel="epoch", ylabel="loss", xlim=[10, num_epochs] if num_epochs > 10 else None)
    for epoch in range(1, num_epochs + 1):
        timer, metric = Timer(), Accumulator(2)  # the summed loss, and the number of tokens
        for batch in data_iter:
            optimizer.zero_grad()
            X, X_valid_len, Y, Y_valid_len = (x.to(device) for x in batch)  # noqa: N806
            begin = torch.full_like(Y[:, :1], tgt_vocab["<bos>"])
            Y_hat, _ = net(X, torch.cat([begin, Y[:, :-1]], dim=1), X_valid_len)  # noqa: N806
            summed = loss(Y_hat, Y, Y_valid_len).sum()
            summed.backward()
            grad_clipping(net, 1)
            optimizer.step()
            metric.add(summed.detach(), Y_valid_len.sum())
        if epoch % 10 == 0 and metric[1]:
            animator.add(epoch, metric[0] / metric[1])
    if not metric[1]:
        raise also(DataError, ZeroDivisionError)("data_iter has no batch; a generator can be read once: make a loader.")
    echo(f"loss {metric[0] / metric[1]:.3f}, {metric[1] / timer.stop():.1f} tokens/sec on {device}")
    return animator


@torch.no_grad()
def predict_seq2seq(
    net: Any,
    src_sentence: str,
    src_vocab: Vocab,
    tgt_vocab: Vocab,
    num_steps: int,
    device: Any,
    save_attention_weights: bool = False,
) -> tuple[str, list[Any]]:
    """Translate a sentence by greedy search. Returns: the words, and the decoder's weights of each step on request."""
    net.eval()
    ids = [*src_vocab[src_sentence.lower().split(" ")], src_vocab["<eos>"]]
    length = torch.tensor([min(len(ids), num_steps)], device=device)
    source = torch.tensor([truncate_pad(ids, num_steps, src_vocab["<pad>"])], device=device)
    state = net.decoder.init_state(net.encoder(source, length), length)
    step, words, weights = torch.tensor([[tgt_vocab["<bos>"]]], device=device), [], []
    for _ in range(num_steps):
        Y, state = net.decoder(step, state)  # noqa: N806
        step = Y.argmax(dim=2)
        if save_attention_weights:
            weights.append(net.decoder.attention_weights)
        if step.item() == tgt_vocab["<eos>"]:
            break
        words.append(step.item())
    return " ".join(tgt_vocab.to_tokens(words)), weights


def bleu(pred_seq: str, label_seq: str, k: int) -> float:
    """Return the text's BLEU of one sentence: the brevity penalty times p_n^(1 / 2^n) for n from 1 to k.

    >>> round(bleu("he is calm", "he is calm .", k=2), 3)
    0.717
    """
    check_at_least(1, k=k)
    words, wanted = pred_seq.split(" "), label_seq.split(" ")
    score = math.exp(min(0, 1 - len(wanted) / len(words)))
    for n in range(1, k + 1):
        found, reference = (
            Counter(tuple(side[start : start + n]) for start in range(len(side) - n + 1)) for side in (words, wanted)
        )
        score *= ((found & reference).total() / max(1, found.total())) ** (0.5**n)
    return score


class MTFraEng:
    """Sentence pairs of the present English edition: the first ones for training, the next ones for validation.

    Args: path: see `read_data_nmt`.
    Attributes: src_vocab, tgt_vocab. arrays: source, target from `<bos>` on, lengths of sources, labels.
    """

    def __init__(
        self,
        batch_size: int,
        num_steps: int = 9,
        num_train: int = 512,
        num_val: int = 128,
        path: Path | str | None = None,
    ) -> None:
        check_at_least(1, batch_size=batch_size, num_steps=num_steps, num_train=num_train)
        check_at_least(0, num_val=num_val)
        self.batch_size, self.num_steps, self.num_train, self.num_val = batch_size, num_steps, num_train, num_val
        text = preprocess_nmt(read_data_nmt(path))
        sides = [side[: num_train + num_val] for side in tokenize_nmt(text, num_train + num_val)]
        self.src_vocab = Vocab([[*words, "<eos>"] for words in sides[0]], 2, _MARKS)
        self.tgt_vocab = Vocab([["<bos>", *words, "<eos>"] for words in sides[1]], 2, _MARKS)
        self.arrays = self._arrays(*sides)

    def _arrays(self, source: Sequence[Sequence[str]], target: Sequence[Sequence[str]]) -> tuple[Tensor, ...]:
        src, src_valid_len = build_array_nmt(source, self.src_vocab, self.num_steps)
        tgt, _ = build_array_nmt([["<bos>", *words] for words in target], self.tgt_vocab, self.num_steps + 1)
        return src, tgt[:, :-1], src_valid_len, tgt[:, 1:]

    def build(self, src_sentences: Sequence[str], tgt_sentences: Sequence[str]) -> tuple[Tensor, ...]:
        """Return the arrays of other sentences, with the same vocabularies."""
        sides = ([preprocess_nmt(one).split(" ") for one in side] for side in (src_sentences, tgt_sentences))
        return self._arrays(*sides)

    def get_dataloader(self, train: bool) -> Any:
        """Return the batches of a part, shuffled in training."""
        part = slice(0, self.num_train) if train else slice(self.num_train, None)
        return load_array([array[part] for array in self.arrays], self.batch_size, train)

    def train_dataloader(self) -> Any:
        """Return the batches of training."""
        return self.get_dataloader(train=True)

    def val_dataloader(self) -> Any:
        """Return the batches of validation."""
        return self.get_dataloader(train=False)


class Seq2Seq(EncoderDecoder):
    """An encoder and a decoder with their loss and optimiser, of the present English edition."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, tgt_pad: int, lr: float) -> None:
        super().__init__(encoder, decoder, tgt_pad, lr)

    def loss(self, Y_hat: Tensor, Y: Tensor) -> Tensor:  # noqa: N803
        """Return the mean cross-entropy of the targets that are no padding."""
        return F.cross_entropy(Y_hat.flatten(0, 1), Y.flatten(), ignore_index=self.tgt_pad)

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        """Return the loss of a batch of `MTFraEng`."""
        return self.loss(self(*batch[:-1]), batch[-1])

    def validation_step(self, batch: Sequence[Tensor]) -> Tensor:
        """Return the loss of a batch of `MTFraEng`."""
        return self.training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    @torch.no_grad()
    def predict_step(
        self, batch: Sequence[Tensor], device: Any, num_steps: int, save_attention_weights: bool = False
    ) -> tuple[Tensor, list[Any]]:
        """Return num_steps ids for each source of a batch by greedy search, and the decoder's weights on request."""
        source, target, source_lens, _ = (array.to(device) for array in batch)
        state = self.decoder.init_state(self.encoder(source, source_lens), source_lens)
        steps, weights = [target[:, :1]], []
        for _ in range(num_steps):
            Y, state = self.decoder(steps[-1], state)  # noqa: N806
            steps.append(Y.argmax(dim=2))
            if save_attention_weights:
                weights.append(self.decoder.attention_weights)
        return torch.cat(steps[1:], dim=1), weights


class Trainer:
    """Trains a model on the data of an edition's classes. Attributes: board: losses of training and validation."""

    def __init__(self, max_epochs: int, num_gpus: int = 0, gradient_clip_val: float = 0) -> None:
        check_at_least(1, max_epochs=max_epochs)
        if num_gpus not in (0, 1):
            raise also(ConfigError, NotImplementedError)(
                f"num_gpus is {num_gpus!r}; here it is 0 or 1: `manyheads train` trains on several GPUs."
            )
        self.max_epochs, self.gradient_clip_val = max_epochs, gradient_clip_val
        self.device = try_gpu() if num_gpus else torch.device("cpu")
        self.board = Animator("epoch", "loss", ("train_loss", "val_loss"))

    def fit(self, model: Seq2Seq, data: MTFraEng) -> None:
        """Train, and leave the model in the mode of evaluation."""
        model.to(self.device)
        optimizer = model.configure_optimizers()
        for epoch in range(1, self.max_epochs + 1):
            model.train()
            train_losses = []
            for batch in self._batches(data.train_dataloader()):
                optimizer.zero_grad()
                loss = model.training_step(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                if self.gradient_clip_val > 0:
                    grad_clipping(model, self.gradient_clip_val)
                optimizer.step()
                train_losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                val_losses = [model.validation_step(batch).item() for batch in self._batches(data.val_dataloader())]
            losses = (train_losses, val_losses)
            self.board.add(epoch, [sum(one) / len(one) if one else math.nan for one in losses])

    def _batches(self, loader: Iterable[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        return ([array.to(self.device) for array in batch] for batch in loader)


explain(globals())
