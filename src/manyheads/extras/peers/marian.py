"""Marian and Pegasus models of `transformers`, such as OPUS-MT: weights, computation and generation.

Differs from ours: a query that may attend to nothing attends to all keys equally; a bias on the logits that is not a
parameter; a table of positions in the file, which is normally sinusoidal (another table is kept as learned positions);
embeddings under up to four names, of which a file may lack some. Unknown options in a config.json have no effect in the
peer and none here. Rules of generation: `marian_generation`, `decoding.search_problem`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.catalogue import build_model
from manyheads.config.files import to_json
from manyheads.decoding.search import search_steps
from manyheads.decoding.search_problem import run_to_end
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.extras.peers import hf_tokenizer
from manyheads.extras.peers.marian_generation import (
    MarianIds,
    generation_to_peer,
    never_produced,
    settings_from_peer,
)
from manyheads.extras.peers.marian_tokenizer import MarianOptions, MarianTokenizer, file_names, read_bytes, read_json
from manyheads.extras.peers.peer import (
    TRANSFORMER,
    Holds,
    Layout,
    Options,
    Peer,
    Rule,
    decode,
    encode,
    export_weights,
    require,
)
from manyheads.models.pretrained import load_portable_state, portable_state
from manyheads.models.transformer.config import TransformerConfig
from manyheads.nn.attention.settings import DotProductAttentionConfig
from manyheads.nn.positions import sinusoidal_table

if TYPE_CHECKING:
    from manyheads.decoding.inputs_and_results import Hypothesis
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.models.composites import Seq2Seq
    from manyheads.text.sides import TranslationTokenizer
    from manyheads.text.tokenizer import Tokenizer


SPECIAL_IDS = {
    "pad_token_id": 58100,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
    "decoder_start_token_id": 58100,
}
"""MarianConfig's options for generation, and its defaults."""
ACTIVATIONS = {
    **{"relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "swish": "swish", "silu": "swish", "tanh": "tanh"},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
    **{name: name for name in ("quick_gelu", "relu6", "leaky_relu", "mish", "sigmoid", "linear")},
    "relu2": "squared_relu",
}
_ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # tolerance for a table saved in low precision; otherwise 1e-5

_ROWS = re.compile(r"(.*\.)?(norm|out_proj)\.(weight|bias)")  # the first axis is the residual stream
_APART = re.compile(r".*_proj\.bias|head\.bias")  # outside the residual stream

_BIAS, _SHARED = "final_logits_bias", "model.shared.weight"


class Marian(Peer):
    """The translation model. Sources to translate must be padded on the right.

    A config holds MarianConfig's options under `model`, and generation options beside it if it has `max_length`.
    """

    name = "Marian"
    kinds = ("hf_marian",)
    origin = "transformers[ /]Marian"
    model_type: ClassVar[str] = "marian"
    model_class: ClassVar[str] = "MarianMTModel"
    # Options of earlier versions that change the computation.
    refused: ClassVar[tuple[str, ...]] = (
        "normalize_before",
        "normalize_embedding",
        "add_final_layer_norm",
        "tie_encoder_decoder",
    )
    special_ids: ClassVar[Mapping[str, int]] = SPECIAL_IDS
    options: ClassVar[Options] = {
        "model_type": "marian",
        "vocab_size": 58101,
        "decoder_vocab_size": int | None,
        "d_model": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "max_position_embeddings": 1024,
        "activation_function": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "scale_embedding": False,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
    }
    """MarianConfig's options for the model, and its defaults."""
    ignores_others = True
    same: ClassVar[Mapping[str, str]] = {
        "vocab_size": "source_vocab_size",
        "d_model": "d_model",
        "encoder_layers": "num_encoder_layers",
        "decoder_layers": "num_decoder_layers",
        "encoder_attention_heads": "num_heads",
        "encoder_ffn_dim": "d_ff",
        "max_position_embeddings": "max_len",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "activation_dropout": "feed_forward_dropout",
        "scale_embedding": "scale_embedding",
    }
    holds: ClassVar[Holds] = {
        **TRANSFORMER,
        "activation": tuple(ACTIVATIONS.values()),
        "attention": (DotProductAttentionConfig(),),
        "norm": ("layer",),
        "norm_eps": (1e-5,),
        "norm_position": ("post",),
        "positions": ("sinusoidal", "sinusoidal_halves", "learned"),  # the first by `fitted`
    }
    head = r"model\.|lm_head\.|final_logits_bias"
    inputs = ("src", "src_mask", "decoder_input_ids", "decoder_mask", "labels")
    layout: ClassVar[Layout] = {
        _SHARED: "body.source_embedding.weight",
        "model.{encoder,decoder}.embed_tokens.weight": "body.{source,target}_embedding.weight",
        "model.{encoder,decoder}.embed_positions.weight": "body.{source,target}_positions.weight",
        "model.*.layers.*.self_attn.*.*": "body.*.layers.*.self_attn.*.*",
        "model.*.layers.*.self_attn_layer_norm.*": "body.*.layers.*.self_attn_residual.norm.*",
        "model.*.layers.*.encoder_attn.*.*": "body.*.layers.*.cross_attn.*.*",
        "model.*.layers.*.encoder_attn_layer_norm.*": "body.*.layers.*.cross_attn_residual.norm.*",
        "model.*.layers.*.fc{1,2}.*": "body.*.layers.*.feed_forward.{in,out}_proj.*",
        "model.*.layers.*.final_layer_norm.*": "body.*.layers.*.feed_forward_residual.norm.*",
        "lm_head.weight": "head.weight",
        _BIAS: Rule("head.bias", lambda parts: parts[0].clone()[None], lambda row, _: row.unbind()),
    }

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Peer.read`; with the special ids, whose types only generation checks."""
        options = super().read(config)
        for name in cls.refused:
            if config["model"].get(name):
                raise ConfigError(
                    f"{name} is set in {cls.name}'s config; the layers that it asks for are not known here."
                )
        return options | {name: config["model"].get(name, default) for name, default in cls.special_ids.items()}

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerConfig:
        """See `Peer.config_of`; positions are sinusoidal unless the weights have another table."""
        if options["activation_function"] not in ACTIVATIONS:
            raise ConfigError(
                f"activation_function is {options['activation_function']!r}; known are"
                f" {', '.join(sorted(ACTIVATIONS))}."
            )
        is_shared = options["share_encoder_decoder_embeddings"]
        target_size = options["vocab_size"] if is_shared else options["decoder_vocab_size"] or options["vocab_size"]
        config = TransformerConfig(
            **cls.fields_of(options),
            target_vocab_size=target_size,
            num_decoder_heads=options["decoder_attention_heads"],
            decoder_d_ff=options["decoder_ffn_dim"],
            activation=ACTIVATIONS[options["activation_function"]],  # type: ignore[arg-type]
            positions="sinusoidal_halves",
            tie_embeddings=_tie(options, weights),
            head_bias=True,
        )
        positions = _positions(weights)
        if any(not _is_formula(table, config.d_model, side) for side, table in positions.items()):
            config = replace(config, positions="learned", max_len=max(table.shape[0] for table in positions.values()))
        return config

    @classmethod
    def layout_of(cls, module: Seq2Seq) -> Layout:
        shares_embeddings = module.config.tie_embeddings in ("all", "embeddings")
        return {name: ours for name, ours in cls.layout.items() if name != _SHARED or shares_embeddings}

    @classmethod
    def prepare(cls, weights: Mapping[str, Tensor], module: Seq2Seq) -> dict[str, Tensor]:
        """See `Peer.prepare`. A missing bias is zero; a missing table of positions is sinusoidal."""
        config, positions = module.config, _positions(weights)
        prepared = {name: tensor for name, tensor in weights.items() if not name.endswith("embed_positions.weight")}
        if config.positions == "learned":
            formula = sinusoidal_table(torch.arange(float(config.max_len)), config.d_model, "halves")
            prepared |= {
                f"model.{side}.embed_positions.weight": positions.get(side, formula) for side in ("encoder", "decoder")
            }
        if config.tie_embeddings == "none":
            prepared.pop(_SHARED, None)  # an unused leftover
        prepared[_BIAS] = prepared.get(_BIAS, torch.zeros(config.target_vocab_size)).reshape(1, -1)
        return prepared

    @classmethod
    def form_of(cls, model: Seq2Seq) -> Seq2Seq:
        return fitted(model)

    @classmethod
    def to_peer(cls, module: Seq2Seq) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Peer.to_peer`; without special ids. Tied matrices occur once, as transformers saves them; the table of
        positions only if it is not sinusoidal.
        """
        config, options = module.config, cls.describe(module)
        # With a separate output, versions of the peer differ in what else is tied, so all names are written.
        weights = export_weights(module, cls.layout_of(module), all_names=config.tie_embeddings == "embeddings")
        if not config.head_bias:
            weights[_BIAS] = torch.zeros(1, config.target_vocab_size)
        return {"model": options}, weights

    @classmethod
    def describe(cls, module: Seq2Seq) -> dict[str, Any]:
        config = module.config
        cls.check(config)
        cls.demand(
            config,
            {
                "has_final_norm": cls.holds["norm_position"] == ("pre",),
                "bias": True,  # as of `fitted`
                "positions": "learned" if config.positions == "learned" else "sinusoidal_halves",
            },
        )
        activation = next(peer for peer, ours in ACTIVATIONS.items() if ours == config.activation)
        return {
            **cls.options_of(config),
            "decoder_vocab_size": config.target_vocab_size,
            "decoder_attention_heads": config.heads_of("decoder"),
            "decoder_ffn_dim": config.d_ff_of("decoder"),
            "activation_function": activation,
            "share_encoder_decoder_embeddings": config.tie_embeddings in ("all", "embeddings"),
            "tie_word_embeddings": config.tie_embeddings in ("all", "decoder"),
        }

    @property
    def ids(self) -> MarianIds:
        """The special ids."""
        return MarianIds.of(self.chosen)

    @classmethod
    def read_files(cls, folder: Path, config: Mapping[str, Any], ours: TransformerConfig) -> MarianFiles:
        """Read tokenizer and generation options of a peer's folder.

        Args:
            config: its config.json.
            ours: the model's config.

        Raises: ConfigError, ModelFileError, DataError: files are damaged, contradict each other, or need unsupported
            features. MissingExtraError: sentencepiece is not installed.
        """
        path = folder / "generation_config.json"
        generation = read_json(read_bytes(path), str(path)) if path.is_file() else None
        # A generation_config.json need not repeat the special ids; a config.json none of MarianConfig's defaults.
        whole = {**cls.special_ids, **config}
        names = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
        ids = MarianIds.of(
            {**whole, **{name: generation[name] for name in names if generation and generation.get(name) is not None}}
        )
        options = whole if generation is None else generation
        notes = []
        if options.get("max_length") is None and options.get("max_new_tokens") is None:
            notes.append(
                "No max_length was given; as in transformers, translations end after 19 tokens (--max-new-tokens)."
            )
        notes += never_produced(options, ids)
        has_pieces = (folder / "source.spm").is_file()
        tokenizer = _tokenizer(folder, ids, ours) if has_pieces else hf_tokenizer.from_folder(folder)
        return MarianFiles(tokenizer, settings_from_peer(options, ids), generation, notes)

    @classmethod
    def export_files(
        cls,
        options: Mapping[str, Any],
        settings: DecodingSettings,
        tokenizer: TranslationTokenizer | None,
        kept: Mapping[str, Any],
        ours: TransformerConfig,
    ) -> PeerFiles:
        """Return the peer's files for one of our models.

        Args:
            options: its config's, from `to_peer`.
            settings: the model's decoding options.
            tokenizer: its tokenizer, if any.
            kept: the peer's files in peer.json, if the model came from there.
            ours: the model's config.

        Raises: ConfigError: the special ids are unknown, or an option has no counterpart.
        """
        before = kept.get("config")
        before = before if isinstance(before, dict) else {}
        notes: list[str] = []
        files: dict[str, bytes] = {}
        if before:
            ids = MarianIds.of({**cls.special_ids, **before})
        elif tokenizer is not None:
            ids = MarianIds(pad=tokenizer.target.pad_id, eos=tokenizer.target.eos_id, start=tokenizer.target.bos_id)
        else:
            raise ConfigError(
                "this model has no tokenizer, so the ids of padding, EOS and start, which Marian needs, are unknown."
            )
        pieces = None if tokenizer is None else tokenizer.in_pieces
        if isinstance(tokenizer, MarianTokenizer):
            files |= {name: content for name, content in tokenizer.files().items() if name != "tokenizer_config.json"}
            files["tokenizer_config.json"] = to_json(tokenizer.options.to_peer()).encode("utf-8")
        elif pieces is not None:
            files |= hf_tokenizer.to_files(pieces, ours.max_len)
            notes += hf_tokenizer.notes_of(pieces)
        elif tokenizer is not None:
            notes.append(f"The peer has no tokenizer of our kind {tokenizer.kind}; the folder takes ids, not text.")
        generation, differs = generation_to_peer(settings, ids, ours.max_len)
        notes += [f"Generation differs: {what}." for what in differs]
        own = {
            "model_type": cls.model_type,
            "architectures": [cls.model_class],
            "is_encoder_decoder": True,
            "pad_token_id": ids.pad,
            "eos_token_id": ids.eos,
            "decoder_start_token_id": ids.start,
            "forced_eos_token_id": generation["forced_eos_token_id"],
        }
        config = {**before, **_changed(cls, options, before)} if before else {**own, **options}
        said = kept.get("generation")
        if (
            before
            and _settings_or_none(said if isinstance(said, dict) else {**cls.special_ids, **before}, ids) == settings
        ):
            generation = said if isinstance(said, dict) else {}  # unchanged: use the peer's own file
        if generation:
            files["generation_config.json"] = json.dumps(generation, indent=2).encode("utf-8") + b"\n"
        return PeerFiles(config, files, notes)

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        [source], labels = require(inputs, "src"), inputs.get("in.labels")
        source_mask = inputs.get("in.src_mask", torch.ones_like(source)) != 0
        if "in.decoder_input_ids" not in inputs and labels is not None:
            inputs = {**inputs, "in.decoder_input_ids": self._shifted(labels)}
        [target] = require(inputs, "decoder_input_ids")
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()[None, None]
        memory_allowed = source_mask[:, None, None]
        memory = encode(self.module, source, memory_allowed)
        hidden = decode(self.module, target, memory, causal, memory_allowed)
        logits = self.module.head.logits(hidden)
        answer = {"out.encoder_last_hidden": memory, "out.decoder_last_hidden": hidden, "out.logits": logits}
        if "in.decoder_mask" in inputs:
            allowed = causal & (inputs["in.decoder_mask"] != 0)[:, None, None]
            masked = decode(self.module, target, memory, allowed, memory_allowed)
            answer["out.logits_with_decoder_mask"] = self.module.head.logits(masked)
        if labels is not None:
            answer["out.loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if "max_length" in self.config:
            answer |= self._generate(source, source_mask)
        return answer

    def generate(self, source: Tensor, mask: Tensor, settings: DecodingSettings) -> list[list[Hypothesis]]:
        """Translate with our search.

        Raises: RequestError: a source has padding before its end.
        """
        lengths = mask.sum(dim=1)
        if not torch.equal(mask, torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]):
            raise RequestError("a source has padding before its end; pad on the right to translate.")
        steps = search_steps(
            self.module,
            source,
            lengths,
            settings,
            pad_id=self.ids.pad,
            bos_id=self.ids.start,
            eos_id=self.ids.eos,
        )
        return run_to_end(steps)

    def _generate(self, source: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the fixtures' results: greedy, and all four beams for each length penalty."""
        generation = {
            "max_length": self.config["max_length"],
            "bad_words_ids": [[self.ids.pad]],
            "early_stopping": self.config.get("early_stopping", False),
            "forced_eos_token_id": self.chosen["forced_eos_token_id"],
        }
        greedy = settings_from_peer({**generation, "num_beams": 1}, self.ids)
        found = self.generate(source, mask, greedy)
        answer = {"out.greedy_ids": self._peer_ids([rows[0] for rows in found])}
        for penalty in self.config.get("length_penalties", ()):
            more = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": penalty}
            found = self.generate(source, mask, settings_from_peer({**generation, **more}, self.ids))
            ids = self._peer_ids([hypothesis for rows in found for hypothesis in rows])
            answer[f"out.beam4_lp{penalty}_ids"] = ids.view(len(found), 4, -1)
            answer[f"out.beam4_lp{penalty}_scores"] = torch.tensor([[one.score for one in rows] for rows in found])
        return answer

    def _peer_ids(self, hypotheses: Sequence[Hypothesis]) -> Tensor:
        """Return the ids in the peer's format: the start token, EOS if generated, padding."""
        rows = [[self.ids.start, *one.ids, *([self.ids.eos] if one.ended else [])] for one in hypotheses]
        width = max(map(len, rows))
        return torch.tensor([row + [self.ids.pad] * (width - len(row)) for row in rows])

    def _shifted(self, labels: Tensor) -> Tensor:
        """Return the decoder inputs of labels, in which -100 is padding."""
        start = labels.new_full((labels.shape[0], 1), self.ids.start)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, self.ids.pad)], dim=1)


def _tie(options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Literal["all", "decoder", "embeddings", "none"]:
    if options["tie_word_embeddings"]:
        return "all" if options["share_encoder_decoder_embeddings"] else "decoder"
    source, target = (weights.get(f"model.{side}.embed_tokens.weight") for side in ("encoder", "decoder"))
    # Since version 5 nothing is tied if the output is not tied, whatever the other option says.
    apart = source is not None and target is not None and not torch.equal(source, target)
    return "embeddings" if options["share_encoder_decoder_embeddings"] and not apart else "none"


def _is_formula(table: Tensor, d_model: int, side: str) -> bool:
    """Return whether a table equals the sinusoidal positions that we compute."""
    if table.dim() != 2 or table.shape[1] != d_model:
        raise ModelFileError(
            f"model.{side}.embed_positions.weight has shape {tuple(table.shape)}, d_model is {d_model}."
        )
    formula = sinusoidal_table(torch.arange(float(table.shape[0])), d_model, "halves")
    return bool(((table.float() - formula).abs() <= _ROUNDING.get(table.dtype, 1e-5)).all())


def _positions(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tables of positions that a file has, by side."""
    names = {side: f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
    return {side: weights[name] for side, name in names.items() if name in weights}


def fitted(model: Seq2Seq) -> Seq2Seq:
    """Return a model of the same outputs (up to rounding) with `sinusoidal_halves` positions and with biases.

    Our default positions interleave sines and cosines, those of Marian and Pegasus have all sines first. Both have the
    same frequencies, so one order of the d_model features turns into the other: everything that reads or writes the
    residual stream is reordered, and no value changes. Biases that our model lacks become zeros.

    A model that is in this form already is returned itself.
    """
    config = model.config
    is_interleaved = config.positions == "sinusoidal"
    if config.bias and not is_interleaved:
        return model
    with torch.random.fork_rng(devices=[]):
        made: Seq2Seq = build_model(
            replace(config, bias=True, positions="sinusoidal_halves" if is_interleaved else config.positions)
        )
    ours = portable_state(model)
    state = {name: torch.zeros_like(tensor) for name, tensor in portable_state(made).items()}
    order = halves_order(config.d_model) if is_interleaved else torch.arange(config.d_model)
    load_portable_state(made, state | {name: _reordered(name, tensor, order) for name, tensor in ours.items()})
    return made.eval()


def halves_order(d_model: int) -> Tensor:
    """Return the order of interleaved features in the other layout: the even ones (sines), then the odd ones."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


def _reordered(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    if _ROWS.fullmatch(name):
        return tensor.index_select(0, order)
    return tensor if _APART.fullmatch(name) else tensor.index_select(1, order)


_SIDES = ("decoder_vocab_size", "share_encoder_decoder_embeddings")


class Pegasus(Marian):
    """The summarisation model of Zhang et al. 2020, arXiv:1912.08777, whose class holds any pre-norm Transformer.

    A joint vocabulary, one more norm after each stack; everything else as in Marian.
    """

    name = "Pegasus"
    kinds = ("hf_pegasus",)
    origin = "transformers[ /]Pegasus"
    model_type = "pegasus"
    model_class = "PegasusForConditionalGeneration"
    holds: ClassVar[Holds] = {**Marian.holds, "norm_position": ("pre",)}
    # The published models have normalize_before and add_final_layer_norm: what this class always does.
    refused = ("normalize_embedding", "tie_encoder_decoder")
    options: ClassVar[Options] = {
        **{name: default for name, default in Marian.options.items() if name not in _SIDES},
        "model_type": "pegasus",
        "vocab_size": 50265,
    }
    special_ids: ClassVar[Mapping[str, int]] = {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "forced_eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
    layout: ClassVar[Layout] = {**Marian.layout, "model.*.layer_norm.*": "body.*.norm.*"}

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerConfig:
        sides = {"decoder_vocab_size": None, "share_encoder_decoder_embeddings": True}
        return replace(super().config_of({**options, **sides}, weights), norm_position="pre")

    @classmethod
    def to_peer(cls, module: Seq2Seq) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Marian.to_peer`; always with the tables of positions, which this class expects in the file."""
        config, weights = super().to_peer(module)
        for side in ("encoder", "decoder") if module.config.positions != "learned" else ():
            positions = torch.arange(float(module.config.max_len))
            weights[f"model.{side}.embed_positions.weight"] = sinusoidal_table(
                positions, module.config.d_model, "halves"
            )
        return config, weights

    @classmethod
    def describe(cls, module: Seq2Seq) -> dict[str, Any]:
        tied = module.config.tie_embeddings
        if tied not in ("all", "embeddings"):
            raise ConfigError(
                f"{cls.name} cannot hold a pre-norm model with tie_embeddings {tied!r}; it has one table for both"
                " vocabularies ('all' or 'embeddings'). CTranslate2 and ONNX hold separate ones."
            )
        return {name: value for name, value in super().describe(module).items() if name not in _SIDES}


@dataclass(frozen=True)
class MarianFiles:
    """The files of a peer's folder besides weights. generation: the peer's own options; None if they are in
    config.json.
    """

    tokenizer: MarianTokenizer | Tokenizer | None
    settings: DecodingSettings
    generation: dict[str, Any] | None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PeerFiles:
    """The files to write into a peer's folder besides weights."""

    config: dict[str, Any]
    files: dict[str, bytes]
    notes: list[str]


def _tokenizer(folder: Path, ids: MarianIds, ours: TransformerConfig) -> MarianTokenizer:
    path = folder / "tokenizer_config.json"
    values = read_json(read_bytes(path), str(path)) if path.is_file() else {}
    options = MarianOptions.from_peer(values, str(path), ids.start)
    files = {name: read_bytes(folder / name) for name in file_names(options.separate_vocabs)}
    tokenizer = MarianTokenizer(files, options, where=str(folder))
    for name, id_, own in (("pad", ids.pad, tokenizer.target.pad_id), ("eos", ids.eos, tokenizer.target.eos_id)):
        if id_ != own:
            raise ConfigError(f"{folder}: {name}_token_id is {id_} in config.json, but {own} in vocab.json.")
    sizes = (("source", tokenizer.source, ours.source_vocab_size), ("target", tokenizer.target, ours.target_vocab_size))
    for name, side, size in sizes:
        if side.vocab_size > size:
            raise ModelFileError(
                f"{folder}: the tokenizer's {name} side has ids up to {side.vocab_size - 1}, but the model has only"
                f" {size}; these files do not belong together."
            )
    return tokenizer


def _changed(peer: type[Marian], options: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return our options where they differ from the peer's, or from its defaults; `silu` and `swish` are the same."""
    said = {**peer.options, "decoder_vocab_size": None, **before}
    same = {name for name, value in options.items() if said[name] == value}
    if ACTIVATIONS.get(said["activation_function"]) == ACTIVATIONS[options["activation_function"]]:
        same.add("activation_function")
    if said["decoder_vocab_size"] is None and options.get("decoder_vocab_size") == options["vocab_size"]:
        same.add("decoder_vocab_size")
    return {name: value for name, value in options.items() if name not in same}


def _settings_or_none(generation: Mapping[str, Any], ids: MarianIds) -> DecodingSettings | None:
    try:
        return settings_from_peer(generation, ids)
    except ConfigError:
        return None
