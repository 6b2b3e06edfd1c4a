"""The names of the Annotated Transformer (Harvard NLP), with its arguments, attributes, weights and printed forms.

    >>> from manyheads.extras.texts.annotated_transformer import make_model, subsequent_mask
    >>> model = make_model(11, 11, N=2)
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> model(ids, ids, torch.ones(1, 1, 3), subsequent_mask(3)).shape
    torch.Size([1, 3, 512])

Both editions: that of 2018 (`NoamOpt`, `trg`, a loss function that takes the optimiser's step) and the present one
(`rate` with LambdaLR, `tgt`, `run_epoch` with optimiser and schedule). A checkpoint of the text's model loads with
`load_state_dict`, and under one seed a model has the text's values. `PEERS["annotated-transformer"]` makes a model
of ours of it, with a cache, beam search and text.

Differs from the text, where that is mistaken: the dropout of `make_model` also holds for attention; positions have no
limit and may have an odd width; a probability of 0 that no target has costs nothing in `LabelSmoothing`, not NaN; no
gradient is computed in validation; `greedy_decode` reads every row; `NoamOpt.rate(0)` is that of step 1; `average`
runs. Masks and ids that the text would misread are errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyheads.cli.process import echo
from manyheads.errors import ConfigError, DataError
from manyheads.extras.peers.annotated_transformer import LabelSmoothing as SmoothedTargets
from manyheads.extras.texts.annotated_model import (
    Decoder,
    DecoderLayer,
    Embeddings,
    Encoder,
    EncoderDecoder,
    EncoderLayer,
    Generator,
    IdError,
    InputError,
    LayerNorm,
    MultiHeadedAttention,
    PositionalEncoding,
    PositionwiseFeedForward,
    SublayerConnection,
    attention,
    clones,
    make_model,
    subsequent_mask,
)
from manyheads.extras.texts.common import check_at_least, check_axes, check_rates, explain, shape_of
from manyheads.nn.shapes import check_tensors
from manyheads.training.optim.schedule import noam

__all__ = [
    "Batch",
    "Decoder",
    "DecoderLayer",
    "DummyOptimizer",
    "DummyScheduler",
    "Embeddings",
    "Encoder",
    "EncoderDecoder",
    "EncoderLayer",
    "Generator",
    "LabelSmoothing",
    "LayerNorm",
    "MultiGPULossCompute",
    "MultiHeadedAttention",
    "NoamOpt",
    "PositionalEncoding",
    "PositionwiseFeedForward",
    "SimpleLossCompute",
    "SublayerConnection",
    "TrainState",
    "attention",
    "average",
    "batch_size_fn",
    "clones",
    "data_gen",
    "get_std_opt",
    "greedy_decode",
    "make_model",
    "rate",
    "rebatch",
    "run_epoch",
    "subsequent_mask",
]


class SettingError(ConfigError, ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError):
    """Another setting that the text computes nonsense with, or fails at inside torch."""


class NoBatchError(DataError, ZeroDivisionError):
    """An epoch without batches; the text divides by zero."""


class Batch:
    """Ids of both sides, with masks. In the edition of 2018 tgt is called trg.

    Args: src: (batch, source_len) ids. tgt: (batch, target_len + 1) ids, from the start symbol on. pad: id of padding;
        None: that of the edition, 0 with trg, otherwise 2.
    Attributes: src, src_mask (batch, 1, source_len). With tgt also tgt (without the last id), tgt_y (without the first
        one), tgt_mask (batch, target_len, target_len) and ntokens, the number of ids to predict, a tensor.
    """

    tgt: Tensor
    tgt_y: Tensor
    tgt_mask: Tensor
    ntokens: Tensor

    def __init__(
        self, src: Tensor, tgt: Tensor | None = None, pad: int | None = None, *, trg: Tensor | None = None
    ) -> None:
        for name, ids in {"src": src, "tgt": tgt, "trg": trg}.items():
            if name == "src" or ids is not None:
                check_axes(name, ids, "batch, length", IndexError)
        if pad is None:
            pad = 2 if trg is None else 0
        if not isinstance(pad, int):
            raise SettingError(f"pad is {pad!r}; it must be the id of padding, a whole number.")
        self.src = src
        self.src_mask = (src != pad).unsqueeze(-2)
        tgt = trg if tgt is None else tgt
        if tgt is not None:
            self.tgt, self.tgt_y = tgt[:, :-1], tgt[:, 1:]
            self.tgt_mask = self.make_std_mask(self.tgt, pad)
            self.ntokens = (self.tgt_y != pad).sum()

    @property
    def trg(self) -> Tensor:
        """`tgt` by its older name."""
        return self.tgt

    @property
    def trg_y(self) -> Tensor:
        """`tgt_y` by its older name."""
        return self.tgt_y

    @property
    def trg_mask(self) -> Tensor:
        """`tgt_mask` by its older name."""
        return self.tgt_mask

    @staticmethod
    def make_std_mask(tgt: Tensor, pad: int) -> Tensor:
        """Return the mask that hides padding and later ids: (batch, length, length)."""
        if not shape_of("tgt", tgt, "batch, length"):
            raise InputError("tgt has the shape (); it must be (batch, length).")
        return (tgt != pad).unsqueeze(-2) & subsequent_mask(tgt.shape[-1]).to(tgt.device)


def rebatch(pad_idx: int, batch: Any) -> Batch:
    """Return a batch of torchtext, whose src and trg have the length first, as a `Batch`."""
    return Batch(batch.src.transpose(0, 1), batch.trg.transpose(0, 1), pad_idx)


max_src_in_batch = max_tgt_in_batch = 0


def batch_size_fn(new: Any, count: int, sofar: float) -> int:
    """Return the size in ids, with padding, of a batch that the sentence pair `new` is added to.

    Args: new: has src and trg, lists of words. count: pairs with this one; 1 begins a new batch. sofar: not used.
    """
    global max_src_in_batch, max_tgt_in_batch
    if count == 1:
        max_src_in_batch = max_tgt_in_batch = 0
    max_src_in_batch = max(max_src_in_batch, len(new.src))
    max_tgt_in_batch = max(max_tgt_in_batch, len(new.trg) + 2)  # with the marks of beginning and end
    return count * max(max_src_in_batch, max_tgt_in_batch)


class TrainState:
    """Counters of a run: steps, optimiser steps, sentence pairs and ids to predict."""

    step = 0
    accum_step = 0
    samples = 0
    tokens: int | Tensor = 0


class DummyOptimizer:
    """Takes no step, for validation."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0}]

    def step(self) -> None:
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing."""


class DummyScheduler:
    """Changes no learning rate, for validation."""

    def step(self) -> None:
        """Do nothing."""


@overload
def run_epoch(data_iter: Iterable[Batch], model: nn.Module, loss_compute: Callable[..., Any]) -> Tensor: ...
@overload
def run_epoch(
    data_iter: Iterable[Batch],
    model: nn.Module,
    loss_compute: Callable[..., Any],
    optimizer: Any,
    scheduler: Any,
    mode: Literal["train", "train+log", "eval"] = "train",
    accum_iter: int = 1,
    train_state: TrainState | None = None,
) -> tuple[Tensor, TrainState]: ...
def run_epoch(
    data_iter: Iterable[Batch],
    model: nn.Module,
    loss_compute: Callable[..., Any],
    optimizer: Any = None,
    scheduler: Any = None,
    mode: Literal["train", "train+log", "eval"] = "train",
    accum_iter: int = 1,
    train_state: TrainState | None = None,
) -> Tensor | tuple[Tensor, TrainState]:
    """Train on batches, or only compute their loss, and print every 40th step (2018: every 50th).

    Three arguments are a call of the edition of 2018, in which the loss function takes the optimiser's steps.

    Args:
        loss_compute: output, targets, number of ids -> the summed loss and the mean with a graph (2018: the sum alone).
        mode: "train", "train+log" (the same), or "eval", which computes no gradient.
        accum_iter: batches for each step of the optimiser.
        train_state: counters that go on; None: new ones.

    Returns: the mean loss of an id, and the counters; in the edition of 2018 the loss alone.
    Raises: SettingError: an unknown mode, accum_iter below 1, or a loss function of the other edition. DataError: there
        is no batch.
    """
    is_older = optimizer is None
    if mode not in ("train", "train+log", "eval") or accum_iter < 1:
        raise SettingError(
            f"mode is {mode!r} and accum_iter {accum_iter}; mode must be 'train', 'train+log' or 'eval', and accum_iter"
            " at least 1."
        )
    trains = mode != "eval" and not is_older
    state = TrainState() if train_state is None else train_state
    total_loss: Any = 0
    total_tokens: Any = 0
    tokens: Any = 0
    num_steps, start = 0, time.time()
    for i, batch in enumerate(data_iter):
        with nullcontext() if trains or is_older else torch.no_grad():
            out = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
            result = loss_compute(out, batch.tgt_y, batch.ntokens)
        if not is_older and not isinstance(result, tuple):
            raise SettingError(
                "the loss function takes the optimiser's steps itself, as in the edition of 2018 (it was given opt);"
                " call run_epoch with three arguments, or leave out opt."
            )
        loss, mean = result if isinstance(result, tuple) else (result, None)
        if trains:
            mean.backward()
            state.step += 1
            state.samples += batch.src.shape[0]
            state.tokens += batch.ntokens
            if i % accum_iter == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                num_steps += 1
                state.accum_step += 1
            scheduler.step()
        total_loss += loss
        total_tokens += batch.ntokens
        tokens += batch.ntokens
        if i % (50 if is_older else 40) == 1 and (trains or is_older):
            per_second = tokens / (time.time() - start)
            if is_older:
                echo(f"Epoch Step: {i} Loss: {loss / batch.ntokens:f} Tokens per Sec: {per_second:f}")
            else:
                echo(
                    f"Epoch Step: {i:6d} | Accumulation Step: {num_steps:3d} | Loss: {loss / batch.ntokens:6.2f}"
                    f" | Tokens / Sec: {per_second:7.1f} | Learning Rate: {optimizer.param_groups[0]['lr']:6.1e}"
                )
            start, tokens = time.time(), 0
    if isinstance(total_loss, int):
        raise NoBatchError("data_iter has no batch; a generator can be read once: make a new one for each epoch.")
    mean_loss: Tensor = total_loss / total_tokens
    return mean_loss if is_older else (mean_loss, state)


def rate(step: int, model_size: int, factor: float, warmup: int) -> float:
    """Return the learning rate of a step: `training.optim.schedule.noam`."""
    if warmup <= 0 or model_size <= 0:
        raise SettingError(f"warmup is {warmup} and model_size {model_size}; both must be above 0.")
    return noam(step, factor=factor, d_model=model_size, warmup_steps=warmup)


class NoamOpt:
    """An optimiser whose learning rate is set to `rate` before each step (edition of 2018). optimizer: torch's."""

    def __init__(self, model_size: int, factor: float, warmup: int, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._step = 0
        self.warmup, self.factor, self.model_size = warmup, factor, model_size
        self._rate = 0.0

    def step(self) -> None:
        """Take a step with the learning rate of its number."""
        self._step += 1
        self._rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
        self.optimizer.step()

    def rate(self, step: int | None = None) -> float:
        """Return the learning rate of a step; None: of the last one taken."""
        return rate(self._step if step is None else step, self.model_size, self.factor, self.warmup)


def get_std_opt(model: EncoderDecoder) -> NoamOpt:
    """Return the text's optimiser: Adam, factor 2, a warm-up of 4,000 steps."""
    embeddings: Any = model.src_embed
    adam = torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9)
    return NoamOpt(embeddings[0].d_model, 2, 4000, adam)


class LabelSmoothing(nn.Module):
    """The summed divergence of log-probabilities from smoothed targets; see the class of this name in `extras.peers`.

    Args: size: of the vocabulary. padding_idx: id of padding, which gets nothing; its rows have no loss.
    Attributes: true_dist: the targets of the last call, (rows, size). confidence: the probability of the correct word.
    Raises: SettingError: a size below 3 with smoothing, a padding id outside the vocabulary, or smoothing that is not
        from 0 to 1.
    """

    def __init__(self, size: int, padding_idx: int, smoothing: float = 0.0) -> None:
        super().__init__()
        check_at_least(1, size=size)
        check_rates(smoothing=smoothing)
        if type(padding_idx) is not int or not -size <= padding_idx < size:
            raise SettingError(
                f"padding_idx is {padding_idx!r} for a vocabulary of {size}; it must be an id from 0 to {size - 1}."
            )
        try:
            self._smoothed = (SmoothedTargets(size, padding_idx % size, smoothing),)  # no child: the text has none
        except ConfigError as error:
            raise SettingError(str(error)) from None
        self.criterion = nn.KLDivLoss(reduction="sum")
        self.padding_idx, self.size = padding_idx, size
        self.confidence, self.smoothing = 1.0 - smoothing, smoothing
        self.true_dist: Tensor | None = None

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss. Shape: x (rows, size) log-probabilities, target (rows,) ids -> scalar.

        Raises: InputError: the shapes do not fit. IdError: a target is not in the vocabulary.
        """
        check_tensors(x=x, target=target)
        if x.dim() != 2 or x.shape[1] != self.size or target.shape != x.shape[:1]:
            raise InputError(
                f"log-probabilities of shape {tuple(x.shape)} and targets of shape {tuple(target.shape)} do not fit a"
                f" vocabulary of {self.size}; they must be (rows, {self.size}) and (rows,): call"
                " .contiguous().view(-1, x.size(-1)) and .contiguous().view(-1)."
            )
        try:
            self.true_dist = self._smoothed[0].targets(target, x.dtype)
        except (RuntimeError, IndexError) as error:
            raise IdError(
                f"the targets are of type {target.dtype}, from {target.min()} to {target.max()}; they must be whole"
                f" numbers from 0 to {self.size - 1}."
            ) from error
        # torch multiplies a target of 0 by a log-probability of -inf, which gives NaN; the text's torch did not.
        loss: Tensor = self.criterion(x.masked_fill(self.true_dist == 0, 0.0), self.true_dist)
        return loss


def data_gen(V: int, batch_size: int, nbatches: int) -> Iterator[Batch]:  # noqa: N803
    """Yield batches of the copy task: 10 random ids from 1 to V - 1, the first one 1; padding is 0.

    Raises: SettingError: V is below 2.
    """
    check_at_least(1, batch_size=batch_size)
    check_at_least(0, nbatches=nbatches)
    if not isinstance(V, int) or V < 2:
        raise SettingError(f"V is {V!r}; the copy task needs at least 2 symbols, of which 0 is padding.")
    for _ in range(nbatches):
        ids = torch.randint(1, V, size=(batch_size, 10))
        ids[:, 0] = 1
        yield Batch(ids.clone(), ids.clone(), 0)


_NOT_GIVEN: Any = object()


class SimpleLossCompute:
    """The loss of a batch. With `opt`, also None, as in the edition of 2018: it takes the step, and returns the sum.

    Args: generator, criterion: applied to the output. opt: `NoamOpt` or an optimiser of torch; None: validation.
        lr_scheduler: one step after each of the optimiser.
    """

    def __init__(
        self,
        generator: Callable[[Tensor], Tensor],
        criterion: Callable[[Tensor, Tensor], Tensor],
        opt: Any = _NOT_GIVEN,
        lr_scheduler: Any = None,
    ) -> None:
        self.generator, self.criterion = generator, criterion
        self._is_older = opt is not _NOT_GIVEN
        self.opt = opt if self._is_older else None
        self.lr_scheduler = lr_scheduler

    def __call__(self, x: Tensor, y: Tensor, norm: Tensor | float) -> Tensor | tuple[Tensor, Tensor]:
        """Return the summed loss, and its mean with a graph. Shape: x (batch, length, d_model), y (batch, length)."""
        x = self.generator(x)
        mean = self.criterion(x.reshape(-1, x.shape[-1]), y.reshape(-1)) / norm
        if not self._is_older:
            return mean.detach() * norm, mean
        if self.opt is not None:
            mean.backward()  # type: ignore[no-untyped-call]
            _step(self.opt, self.lr_scheduler)
        return mean.detach() * norm


class MultiGPULossCompute:
    """`SimpleLossCompute` of 2018, with the generator on several devices and for `chunk_size` positions at a time.

    Args: devices: the batch is divided among them; empty: the output's.
    """

    def __init__(
        self,
        generator: nn.Module,
        criterion: Callable[[Tensor, Tensor], Tensor],
        devices: Sequence[Any],
        opt: Any = None,
        chunk_size: int = 5,
        lr_scheduler: Any = None,
    ) -> None:
        self.generator, self.criterion, self.devices = generator, criterion, devices
        self.opt, self.chunk_size, self.lr_scheduler = opt, chunk_size, lr_scheduler

    def __call__(self, out: Tensor, targets: Tensor, normalize: Tensor | float) -> Tensor:
        """Return the summed loss. Shape: out (batch, length, d_model), targets (batch, length)."""
        devices = list(self.devices) or [out.device]
        leaf = out.detach().requires_grad_(self.opt is not None)
        total = torch.zeros((), dtype=out.dtype, device=out.device)
        for device, rows, labels in zip(devices, leaf.chunk(len(devices)), targets.chunk(len(devices)), strict=False):
            weights = {name: weight.to(device) for name, weight in self.generator.named_parameters()}
            for x, y in zip(
                torch.split(rows, self.chunk_size, 1), torch.split(labels, self.chunk_size, 1), strict=True
            ):
                log_probs = functional_call(self.generator, weights, (x.to(device),))
                loss = self.criterion(log_probs.flatten(0, 1), y.to(device).flatten()) / normalize
                if self.opt is not None:
                    loss.backward(retain_graph=device != out.device)  # type: ignore[no-untyped-call]
                total += loss.detach().to(out.device)
        if self.opt is not None:
            out.backward(gradient=leaf.grad)  # type: ignore[no-untyped-call]
            _step(self.opt, self.lr_scheduler)
        return total * normalize


def greedy_decode(
    model: EncoderDecoder, src: Tensor, src_mask: Tensor | None, max_len: int, start_symbol: int
) -> Tensor:
    """Return the most probable ids, one after the other: (batch, max_len), the start symbol first.

    Nothing ends a row before max_len, as in the text. `Translator` stops at the end, and computes each step once.
    """
    check_at_least(1, max_len=max_len)
    memory = model.encode(src, src_mask)
    ids = torch.full((src.shape[0], 1), start_symbol, dtype=src.dtype, device=src.device)
    for _ in range(max_len - 1):
        out = model.decode(memory, src_mask, ids, subsequent_mask(ids.shape[1]).to(src.device))
        ids = torch.cat([ids, model.generator(out[:, -1]).argmax(dim=1, keepdim=True).to(ids)], dim=1)
    return ids


@torch.no_grad()
def average(model: nn.Module, models: Sequence[nn.Module]) -> None:
    """Set the parameters of a model to the mean of those of other models.

    Raises: SettingError: there is no other, or one has parameters of other shapes.
    """
    if not models:
        raise SettingError("models is empty; give the models whose mean is wanted, in a list.")
    if len({tuple(p.shape for p in one.parameters()) for one in (model, *models)}) > 1:
        raise SettingError("the models have parameters of several shapes; a mean needs models of the same sizes.")
    for mean, *several in zip(*(one.parameters() for one in (model, *models)), strict=True):
        mean.copy_(torch.stack(several).mean(dim=0))


def _step(opt: Any, lr_scheduler: Any) -> None:
    opt.step()
    getattr(opt, "optimizer", opt).zero_grad()
    if lr_scheduler is not None:
        lr_scheduler.step()


explain(globals())
