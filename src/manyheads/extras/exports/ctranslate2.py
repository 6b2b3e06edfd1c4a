"""Transformers for CTranslate2, which translates without torch, also in int8.

The folder holds model.bin, config.json and the vocabularies of CTranslate2, and our tokenizer's files. Tables of
positions are written out, as CTranslate2's own start at position 1 and have other frequencies. Padding and the start
token get a bias of -10,000 on their logits, since CTranslate2 does not ban them; so its log-probabilities are those of
the other tokens alone. Its length penalty is length ** p without EOS.

CTranslate2 as the engine of a `Translator`: `decoding.inputs_and_results.SearchEngine`.

The export is kept beside the model, in MODEL.ctranslate2/CHECKSUM, or in the user's cache if that folder cannot be
written. Only the newest export of a model is kept. Greedy search gives the ids of our own search (up to ties in
rounding). Beams differ: CTranslate2 stops when 2 x num_beams hypotheses have ended (num_beams with early_stopping), so
a later and better one may be missed. It always computes as with `renormalize_logits`, since the export bans padding and
the start token in the logits.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy
import torch
from torch import Tensor

from manyheads.decoding.inputs_and_results import Hypothesis, check_stop, cut_batches
from manyheads.decoding.search_problem import BeamRules, length_limits
from manyheads.decoding.settings import DecodingSettings, unsupported
from manyheads.errors import ConfigError, MissingExtraError, ModelFileError, RequestError, SaveError
from manyheads.extras.exports import Check, ExportOptions, check_architecture
from manyheads.extras.exports.engine import (
    LIMIT,
    MOST_TOKENS,
    never_produced,
    reference,
    sample_sentences,
    tokenizer_of,
)
from manyheads.extras.peers.peer import TRANSFORMER, check_held, demand
from manyheads.files.commit import remove_folder, write_folder
from manyheads.files.verify import file_sha256, is_intact
from manyheads.installation import needing_extra
from manyheads.models.pretrained import load, read_config
from manyheads.nn.attention.settings import DotProductAttentionConfig

if TYPE_CHECKING:
    from manyheads.models.composites import Seq2Seq
    from manyheads.nn.attention.relative_bias import RelativeBias
    from manyheads.text.sides import Side


MIN_POSITIONS = 2048
"""Rows of a table of sinusoidal positions; longer texts fail in CTranslate2."""
_BANNED = -1e4
_ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_tanh": "GELUTanh",
    "swish": "SWISH",
    "quick_gelu": "GELUSigmoid",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}
_FORMAT = "the format ctranslate2"
HOLDS = {
    "transformer": {
        **TRANSFORMER,
        "activation": tuple(_ACTIVATIONS),
        "attention": (DotProductAttentionConfig(),),
        "norm": ("layer",),
        "relative_bias": (),
    }
}
"""See `peers.peer`, for each architecture."""


def runtime() -> Any:
    """Return the package ctranslate2. Raises: MissingExtraError: it is not installed."""
    with needing_extra("CTranslate2 is not installed", "ct2"):
        return importlib.import_module("ctranslate2")


def write(model: Path, target: Path, options: ExportOptions) -> list[str]:
    """See `extras.exports`. Raises: MissingExtraError: CTranslate2 is not installed."""
    runtime()
    config = read_config(model)
    check_architecture("ctranslate2", config.architecture)
    check_held(_FORMAT, config, HOLDS["transformer"], "model.")
    module: Any = load(model)
    if config.num_encoder_layers == 0:
        raise ConfigError(
            "the format ctranslate2 cannot hold a model with model.num_encoder_layers 0; it needs at least 1. Use"
            " --to transformers, or manyheads itself."
        )
    if config.norm_position == "post" and config.has_final_norm:
        demand(_FORMAT, "model.final_norm", True, (False,))
    if config.relative_bias and config.positions != "none":
        raise ConfigError(
            "the format ctranslate2 cannot hold a model with both model.relative_bias and model.positions"
            f" {config.positions!r}: with a relative bias it adds no positions. Train with model.positions none, or use"
            " another format or manyheads itself."
        )
    tokenizer = tokenizer_of(model, "ctranslate2")
    writer = tokenizer.target
    with torch.no_grad():
        spec = _spec(module, banned=never_produced(writer))
    target_pieces = pieces_of(writer, config.target_vocab_size)
    spec.register_source_vocabulary(pieces_of(tokenizer.source, config.source_vocab_size))
    spec.register_target_vocabulary(target_pieces)
    spec.config.unk_token = "<unk>"  # noqa: S105  (a token of text, not a password)
    spec.config.bos_token = spec.config.decoder_start_token = target_pieces[writer.bos_id]
    spec.config.eos_token = target_pieces[writer.eos_id]
    spec.config.add_source_bos, spec.config.add_source_eos = False, True
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.validate()
    spec.optimize(quantization=options.quantization)
    spec.save(str(target))
    for name, content in tokenizer.files().items():
        (target / name).write_bytes(content)
    notes = [f"Sources and translations may have at most {most_positions(config)} tokens."]
    if options.quantization in ("float16", "bfloat16"):
        notes.append(f"CTranslate2 computes in float32 where the processor has no {options.quantization}.")
    return notes


def deviation(model: Path, target: Path, sentences: list[list[int]], options: ExportOptions) -> Check:
    """See `extras.exports`. The log-probabilities of the model's greedy outputs are compared."""
    package = runtime()
    module: Any = load(model)
    tokenizer = tokenizer_of(model, "ctranslate2")
    writer = tokenizer.target
    ours = reference(module, tokenizer, sentences)
    source_pieces = pieces_of(tokenizer.source, module.config.source_vocab_size)
    target_pieces = pieces_of(writer, module.config.target_vocab_size)
    # CTranslate2 adds EOS to sources and to scored targets.
    sources = [[source_pieces[i] for i in ids[:-1]] for ids in ours.sources]
    bodies = [ids[:-1] if ids[-1] == writer.eos_id else ids for ids in ours.outputs]
    translator = package.Translator(str(target), device="cpu")
    limit = min(MOST_TOKENS, (module.max_len or MOST_TOKENS + 1) - 1)
    found = translator.translate_batch(
        sources, beam_size=1, max_input_length=0, max_decoding_length=limit, min_decoding_length=0
    )
    scored = translator.score_batch(sources, [[target_pieces[i] for i in ids] for ids in bodies], max_input_length=0)
    wanted = ours.of_tokens(banned=never_produced(writer))
    largest = max(
        float((torch.tensor(one.log_probs[: len(row)]) - row).abs().max())
        for one, row in zip(scored, wanted, strict=True)
    )
    return Check(
        what="log-probabilities",
        deviation=largest,
        limit=None if options.quantization else LIMIT,
        num_sentences=len(sentences),
        num_equal=sum(
            one.hypotheses[0] == [target_pieces[i] for i in ids] for one, ids in zip(found, bodies, strict=True)
        ),
    )


def pieces_of(side: Side, size: int) -> list[str]:
    """Return a unique name for each of a table's rows, in the order of ids; rows without a piece are `<extra_ID>`."""
    pieces = list(getattr(side, "pieces", ())) or [side.tokens([index])[0] for index in range(side.vocab_size)]
    pieces = [*pieces[:size], *(f"<extra_{index}>" for index in range(len(pieces), size))]
    seen: set[str] = set()
    for index, piece in enumerate(pieces):
        if piece in seen:
            raise ModelFileError(
                f"the vocabulary has the piece {piece!r} twice (id {index}); CTranslate2 needs each once."
            )
        seen.add(piece)
    return pieces


def most_positions(config: Any) -> int:
    """Return the rows of an export's tables of positions: the maximum length of a source and of a translation."""
    longest: int = config.longest_input or max(MIN_POSITIONS, config.max_len)
    return longest


def _spec(module: Seq2Seq, banned: Sequence[int]) -> Any:
    """Return the filled `TransformerSpec`. banned: target ids that are never produced."""
    specs = importlib.import_module("ctranslate2.specs")
    layers = importlib.import_module("ctranslate2.specs.transformer_spec")
    config, body = module.config, module.body
    stacks = {}
    for stack in ("encoder", "decoder"):
        made = {"encoder": layers.TransformerEncoderSpec, "decoder": layers.TransformerDecoderSpec}[stack](
            getattr(config, f"num_{stack}_layers"),
            config.heads_of(stack),
            pre_norm=config.norm_position == "pre",
            no_final_norm=not config.has_final_norm,
            activation=getattr(specs.Activation, _ACTIVATIONS[config.activation]),
            relative_attention_bias=bool(config.relative_bias),
        )
        made.scale_embeddings = config.scale_embedding
        side: Literal["source", "target"] = "source" if stack == "encoder" else "target"
        if not config.relative_bias:
            rows = getattr(body, f"{side}_positions").rows(0, most_positions(config))
            made.position_encodings.encodings = rows.clone()
        for spec, layer in zip(made.layer, getattr(body, stack).layers, strict=True):
            _fill_layer(spec, layer)
        if config.has_final_norm:
            _fill_norm(made.layer_norm, getattr(body, stack).norm)
        stacks[stack] = made
    stacks["encoder"].embeddings[0].weight = body.source_embedding.weight
    stacks["decoder"].embeddings.weight = body.target_embedding.weight
    projection = stacks["decoder"].projection
    projection.weight = module.head.weight
    bias = torch.zeros(config.target_vocab_size) if module.head.bias is None else module.head.bias.clone()
    bias[list(banned)] = _BANNED
    projection.bias = bias
    return layers.TransformerSpec(stacks["encoder"], stacks["decoder"])


def _fill_layer(spec: Any, layer: Any) -> None:
    own = layer.self_attn
    _fill_linear(spec.self_attention.linear[0], own.q_proj, own.k_proj, own.v_proj)
    _fill_linear(spec.self_attention.linear[1], own.out_proj)
    _fill_norm(spec.self_attention.layer_norm, layer.self_attn_residual.norm)
    if own.relative_bias is not None:
        _fill_relative_bias(spec.self_attention, own.relative_bias)
    if hasattr(layer, "cross_attn"):
        cross = layer.cross_attn
        _fill_linear(spec.attention.linear[0], cross.q_proj)
        _fill_linear(spec.attention.linear[1], cross.k_proj, cross.v_proj)
        _fill_linear(spec.attention.linear[2], cross.out_proj)
        _fill_norm(spec.attention.layer_norm, layer.cross_attn_residual.norm)
    _fill_linear(spec.ffn.linear_0, layer.feed_forward.in_proj)
    _fill_linear(spec.ffn.linear_1, layer.feed_forward.out_proj)
    _fill_norm(spec.ffn.layer_norm, layer.feed_forward_residual.norm)


def _fill_relative_bias(spec: Any, bias: RelativeBias) -> None:
    """Fill T5's table (buckets, heads). As many distances have a bucket of their own as in ours, and all farther ones
    get the same number, so that the growing buckets make no difference. In an encoder the second half of the table is
    for keys after the query.
    """
    numbers, own = bias.numbers(), bias.reach + 1
    sides = [numbers[:, :own].flip(1), numbers[:, bias.reach :]] if numbers.shape[1] > own else [numbers.flip(1)]
    farther = [side[:, -1:].expand(-1, own) for side in sides]
    buckets = [part for side, far in zip(sides, farther, strict=True) for part in (side, far)]
    spec.relative_attention_bias = torch.cat(buckets, 1).T.contiguous()
    spec.relative_attention_max_distance = numpy.dtype("int32").type(4 * own)


def _fill_linear(spec: Any, *layers: Any) -> None:
    """Fill one linear layer with several side by side."""
    spec.weight = torch.cat([layer.weight for layer in layers])
    if layers[0].bias is not None:
        spec.bias = torch.cat([layer.bias for layer in layers])


def _fill_norm(spec: Any, norm: Any) -> None:
    gamma: Tensor = norm.weight
    spec.gamma = gamma
    spec.beta = torch.zeros_like(gamma) if norm.bias is None else norm.bias


_NUM_TIMED = 16
_NAME_LEN = 16  # hexadecimal digits of a checksum
_IS_EXPORT = re.compile(rf"[0-9a-f]{{{_NAME_LEN}}}")
# A search stops when this many times num_beams hypotheses have ended; our own search without early_stopping is exact.
_PATIENCE = 2
_READ_FILES = ("config.json", "model.safetensors", "tokenizer.json", "source.spm", "target.spm", "vocab.json")


def open_for(name: str, folder: Path, runs_plainly: str, is_int8: bool) -> CTranslate2Engine | Declined:
    """See `decoding.inputs_and_results.open_engine`."""
    try:
        if runs_plainly:
            kind = "int8" if is_int8 else "float32"
            raise RequestError(
                f"the engine ctranslate2 runs on the CPU in {kind}; this translator {runs_plainly}. Change it, or use"
                f" {_instead(is_int8)}."
            )
        return CTranslate2Engine(folder, is_automatic=name == "auto", is_int8=is_int8)
    except (ConfigError, MissingExtraError, RequestError) as error:
        if name == "auto":
            return Declined(str(error))
        raise


class Declined:
    """The engine of `auto` for a model that CTranslate2 does not run. Args: reason: a sentence."""

    def __init__(self, reason: str) -> None:
        self.choice = f"engine torch: {reason}"
        self.longest_source, self.is_int8 = 0, False

    def takes(self, settings: DecodingSettings, own_search: Any) -> bool:
        """Return False."""
        return False

    def search(self, *sources: Any, **options: Any) -> list[list[Hypothesis]]:
        """Never called."""
        raise AssertionError(self.choice)


class CTranslate2Engine:
    """A search engine; see `decoding.inputs_and_results.SearchEngine`.

    Args:
        is_automatic: take a search only if all options are supported and a measurement shows that it is faster.
        is_int8: round the weights to 8 bits as they are loaded, and rows of their inputs in each product.
    """

    def __init__(self, folder: Path, *, is_automatic: bool, is_int8: bool = False) -> None:
        package = runtime()
        if is_int8 and "int8" not in package.get_supported_compute_types("cpu"):
            raise RequestError(
                "precision is int8, but CTranslate2 has no int8 products on this processor; use fp32, bf16 or auto."
            )
        tokenizer, config = tokenizer_of(folder, "ctranslate2"), read_config(folder)
        export = cached_export(folder)
        self._runtime = package.Translator(
            str(export),
            device="cpu",
            compute_type="int8" if is_int8 else "default",
            intra_threads=torch.get_num_threads(),
        )
        self.is_int8 = is_int8
        self._is_automatic, self._config = is_automatic, config
        self._source_pieces = pieces_of(tokenizer.source, config.source_vocab_size)
        self._target_ids = {
            piece: index for index, piece in enumerate(pieces_of(tokenizer.target, config.target_vocab_size))
        }
        self._source_eos = tokenizer.source.eos_id
        self._most = self.longest_source = most_positions(config)
        self._is_faster: bool | None = None
        self._ratio = 0.0
        self.choice = ""

    def takes(self, settings: DecodingSettings, own_search: Any) -> bool:
        """See `SearchEngine`. The first call with supported settings takes the measurement."""
        reason = unsupported(settings, "ctranslate2")
        if reason and not self._is_automatic:
            instead = _instead(self.is_int8)
            raise RequestError(f"the engine ctranslate2 cannot search with {reason}; change it, or use {instead}.")
        if reason:
            self.choice = f"engine torch: ctranslate2 cannot search with {reason}"
            return False
        if not self._is_automatic:
            self.choice = f"engine ctranslate2{' in int8' * self.is_int8}"
            return True
        if self._is_faster is None:
            self._measure(settings, own_search)
        taken = "ctranslate2" if self._is_faster else "torch"
        self.choice = f"engine {taken}: ctranslate2 took {self._ratio:.2f} times torch's time on {_NUM_TIMED} sources"
        return bool(self._is_faster)

    def search(
        self,
        sources: Sequence[list[int]],
        settings: DecodingSettings,
        *,
        stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[list[Hypothesis]]:
        """See `SearchEngine`. `stop` is called before each batch.

        Raises: RequestError: a source has more tokens than the export has positions.
        """
        longest = max(map(len, sources), default=0)
        if longest > self._most:
            raise RequestError(
                f"a source has {longest} tokens, EOS included; the engine ctranslate2 takes at most {self._most}."
                f" Split the text, or use {_instead(self.is_int8)}."
            )
        limits = length_limits(torch.tensor([len(ids) for ids in sources]), settings, self._most).tolist()
        results: list[list[Hypothesis]] = [[] for _ in sources]
        num_done = 0
        for batch in cut_batches([len(ids) for ids in sources], settings.max_tokens, settings.num_beams):
            check_stop(stop)
            found = self._batch([sources[place] for place in batch], [limits[place] for place in batch], settings)
            for place, hypotheses in zip(batch, found, strict=True):
                results[place] = hypotheses
            num_done += len(batch)
            if on_progress is not None:
                on_progress(num_done)
        return results

    def _batch(self, sources: list[list[int]], limits: list[int], settings: DecodingSettings) -> list[list[Hypothesis]]:
        """Search one batch. CTranslate2 has one limit for all; sentences that pass their own are searched again."""
        largest = max(limits)
        found = self._search_within(sources, largest, settings)
        again: dict[int, list[int]] = {}
        for place, (rows, limit) in enumerate(zip(found, limits, strict=True)):
            if limit < largest and any(len(one.ids) >= limit for one in rows):
                again.setdefault(limit, []).append(place)
        for limit, places in again.items():
            shorter = self._search_within([sources[place] for place in places], limit, settings)
            for place, rows in zip(places, shorter, strict=True):
                found[place] = rows
        return found

    def _search_within(
        self, sources: list[list[int]], limit: int, settings: DecodingSettings
    ) -> list[list[Hypothesis]]:
        # CTranslate2 adds EOS to the sources. Its lengths count the EOS of a hypothesis, as ours do.
        pieces = [[self._source_pieces[index] for index in ids[:-1]] for ids in sources]
        has_penalty = settings.num_beams > 1 and settings.length_penalty_kind == "power"
        found = self._runtime.translate_batch(
            pieces,
            beam_size=settings.num_beams,
            patience=1 if settings.early_stopping else _PATIENCE,
            num_hypotheses=settings.num_return_sequences,
            length_penalty=settings.length_penalty if has_penalty else 0.0,
            max_input_length=0,
            max_decoding_length=limit,
            min_decoding_length=0,
            return_scores=True,
        )
        rules = BeamRules(settings)
        results = []
        for one in found:
            rows = []
            for hypothesis, score in zip(one.hypotheses, one.scores, strict=True):
                ended = len(hypothesis) < limit
                if settings.num_beams == 1:  # CTranslate2 gives the sum
                    score = score / rules.penalty(len(hypothesis) + ended)
                rows.append(Hypothesis([self._target_ids[piece] for piece in hypothesis], score, [], ended))
            results.append(rows)
        return results

    def _measure(self, settings: DecodingSettings, own_search: Any) -> None:
        """Time both searches once, on the same random sources."""
        sources = [[*ids, self._source_eos] for ids in sample_sentences(self._config, _NUM_TIMED)]
        sources = [ids[: self._most - 1] for ids in sources]
        timed = replace(settings, max_new_tokens=min(32, self._most - 1), too_long="truncate")
        seconds = []
        for search in (self.search, own_search):
            search(sources[:2], timed)  # the first call of a runtime is slower
            started = time.perf_counter()
            search(sources, timed)
            seconds.append(time.perf_counter() - started)
        self._ratio = seconds[0] / seconds[1]
        self._is_faster = self._ratio < 1


def _instead(is_int8: bool) -> str:
    return "precision fp32 or bf16" if is_int8 else "engine torch"


def cached_export(folder: Path) -> Path:
    """Return the folder of a model's export, which is written if there is no intact one.

    Once a new export is written, the older ones of this model are deleted. An engine that uses one of them continues,
    because it has already read the files.

    Raises: ConfigError: CTranslate2 cannot hold the model. SaveError: there is no place to write it.
    """
    digest = hashlib.sha256()
    for name in _READ_FILES:
        if (folder / name).is_file():
            digest.update(f"{name} {file_sha256(folder / name)}\n".encode())
    beside = folder.resolve()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "manyheads" / "ctranslate2"
    model_name = hashlib.sha256(os.fsencode(beside)).hexdigest()[:_NAME_LEN]
    places = (beside.with_name(f"{beside.name}.ctranslate2"), caches / model_name)
    exports = [place / digest.hexdigest()[:_NAME_LEN] for place in places]
    for export in exports:
        if is_intact(export):
            return export
    try:
        return _make_export(folder, exports[0])
    except SaveError:  # a model that is read-only
        return _make_export(folder, exports[1])
    except ConfigError:
        with suppress(OSError):  # not empty
            places[0].rmdir()
        raise


def _make_export(folder: Path, export: Path) -> Path:
    size = (folder / "model.safetensors").stat().st_size
    write_folder(export, lambda target: _write(folder, target), needed_bytes=size)
    for old in export.parent.iterdir():
        if old != export and _IS_EXPORT.fullmatch(old.name) and old.is_dir() and not old.is_symlink():
            with suppress(OSError, SaveError):  # another process has deleted it, or we have no permission
                remove_folder(old)
    return export


def _write(folder: Path, target: Path) -> None:
    write(folder, target, ExportOptions(to="ctranslate2"))
