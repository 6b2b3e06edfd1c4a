"""The original TensorFlow code of Transformer-XL (kimiyoung/transformer-xl, folder `tf`), in which the paper's models
were published.

Differs from the PyTorch original and from our defaults; the config names each of them:
- layer norms have epsilon 1e-12 (`norm_eps`);
- the memory begins with memory_len zero vectors, to which queries attend (`initial_memory: zeros`);
- with same_length a query attends to memory_len + 1 positions, including itself (`same_length_extra_key`).

Kernels and projections are stored as (in, out). Tables are always shared by embedding and softmax, projections may be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import ConfigError, DataError, ModelFileError
from manyheads.extras.peers.legacy_pickle import Corpus, read_corpus
from manyheads.extras.peers.peer import Layout, Options, Peer, stacked, transposed
from manyheads.extras.peers.transfo_xl import num_segments, sizes_of, tied_projections
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.word_vocabulary import Form, Lines, SymbolVocabulary

if TYPE_CHECKING:
    from manyheads.models.composites import LanguageModel

_READING = {
    "enwik8": {"tgt_len": 128, "mem_len": 3800, "clamp_len": 1000, "same_length": True},
    "text8": {"tgt_len": 128, "mem_len": 3800, "clamp_len": 1000, "same_length": True},
    "wt103": {"tgt_len": 128, "mem_len": 1600, "clamp_len": 1000, "same_length": True},
    "lm1b": {"tgt_len": 32, "mem_len": 128, "clamp_len": -1, "same_length": True},
}
"""The settings with which the original evaluates its published models, by the dataset in corpus-info.json."""
PUBLISHED_LANES = 16
"""The batch size of these evaluations."""
_EMBED, _SOFTMAX, _LAYER = "transformer/adaptive_embed", "transformer/adaptive_softmax", "transformer/layer_*"


def find_checkpoint(folder: Path) -> Path | None:
    """Return the folder with the checkpoint: the folder itself, or `model` in it, as in the published models."""
    return next((place for place in (folder, folder / "model") if any(place.glob("*.index"))), None)


class TensorFlowXL(Peer):
    """The language model on consecutive segments in.ids.0, in.ids.1, ..., with in.target.S, batch-first.

    A config holds the flags of `train_gpu.py` under `flags`, and the content of corpus-info.json under `corpus_info`.
    The variables that an optimiser keeps are ignored.
    """

    name = "tf/Transformer-XL"
    kinds = ("txl_tf",)
    options: ClassVar[Options] = {
        "n_layer": int,
        "d_model": int,
        "d_embed": int,
        "n_head": int,
        "d_head": int,
        "d_inner": int,
        "untie_r": False,
        "div_val": 1,
        "proj_share_all_but_first": False,
        "proj_same_dim": True,
        "dropout": 0.0,
        "dropatt": 0.0,
        "tgt_len": 70,
        "mem_len": 70,
        "same_length": False,
        "clamp_len": -1,
        "eval_batch_size": int | None,
    }
    section = "flags"
    unused = r".*(/Adam(_1)?|(^|/)beta[12]_power|(^|/)global_step)"
    layout: ClassVar[Layout] = {
        f"{_EMBED}/lookup_table": "body.embedding.tables.0",
        f"{_EMBED}/cutoff_*/lookup_table": "body.embedding.tables.*",
        f"{_EMBED}/proj_W": transposed("body.embedding.projections.0"),
        f"{_EMBED}/cutoff_*/proj_W": transposed("body.embedding.projections.*"),
        f"{_SOFTMAX}/bias": "head.bias",
        f"{_SOFTMAX}/b": "head.biases.0",
        f"{_SOFTMAX}/cutoff_*/b": "head.biases.*",
        f"{_SOFTMAX}/cutoff_*/proj": transposed("head.projections.*"),
        f"{_SOFTMAX}/cutoff_0/cluster_{{W,b}}": "head.cluster_{weight,bias}",
        f"{_LAYER}/rel_attn/qkv/kernel": transposed("body.layers.*.attention.{q,k,v}_proj.weight"),
        f"{_LAYER}/rel_attn/{{r,o}}/kernel": transposed("body.layers.*.attention.{position,out}_proj.weight"),
        f"{_LAYER}/rel_attn/LayerNorm/{{gamma,beta}}": "body.layers.*.attention_residual.norm.{weight,bias}",
        f"{_LAYER}/ff/LayerNorm/{{gamma,beta}}": "body.layers.*.feed_forward_residual.norm.{weight,bias}",
        f"{_LAYER}/ff/layer_{{1,2}}/kernel": transposed("body.layers.*.feed_forward.{in,out}_proj.weight"),
        f"{_LAYER}/ff/layer_{{1,2}}/bias": "body.layers.*.feed_forward.{in,out}_proj.bias",
    }
    """The names of all models; `layout_of` chooses those of one."""

    @classmethod
    def is_folder(cls, folder: Path) -> bool:
        return find_checkpoint(folder) is not None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Peer.read`; with vocab_size and cutoffs of the corpus."""
        corpus = config.get("corpus_info")
        if not isinstance(corpus, Mapping):
            raise ConfigError("the config must hold corpus-info.json under 'corpus_info'.")
        sizes = {"vocab_size": _whole(corpus, "vocab_size"), "cutoffs": _inner_cutoffs(corpus)}
        return super().read(config) | sizes

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerXLConfig:
        sizes = sizes_of(options)
        # Without clusters the softmax uses the embedding's projection.
        tied = [not sizes["cutoffs"], *[options["proj_share_all_but_first"]] * len(sizes["cutoffs"])]
        return TransformerXLConfig(
            vocab_size=options["vocab_size"],
            **sizes,
            norm_eps=1e-12,
            share_biases=not options["untie_r"],
            clamp_len=options["clamp_len"] if options["clamp_len"] > 0 else None,
            same_length_extra_key=options["same_length"],
            initial_memory="zeros",
            tie_projections=tied_projections(tied, sizes),
        )

    @classmethod
    def is_weight(cls, name: str) -> bool:
        """Return whether a variable belongs to the model, and not to its optimiser or to the count of steps."""
        return not re.fullmatch(cls.unused, name)

    @classmethod
    def layout_of(cls, module: LanguageModel) -> Layout:
        config = module.config
        by_cluster = config.div_value > 1 and bool(config.cutoffs)
        whole = {f"{_EMBED}/lookup_table", f"{_EMBED}/proj_W", f"{_SOFTMAX}/b"}
        parts = {f"{_EMBED}/cutoff_*/lookup_table", f"{_EMBED}/cutoff_*/proj_W", f"{_SOFTMAX}/cutoff_*/b"}
        rows = {name: ours for name, ours in cls.layout.items() if name not in (whole if by_cluster else parts)}
        if not config.cutoffs and config.has_adaptive_softmax:
            rows[f"{_SOFTMAX}/bias"] = rows.pop(f"{_SOFTMAX}/b")
        for theirs, ours in (("r_w_bias", "content_bias"), ("r_r_bias", "position_bias")):
            name = f"transformer/{theirs}"
            shared = f"body.layers.0.attention.{ours}"
            rows[name] = shared if config.share_biases else stacked(f"body.layers.*.attention.{ours}")
        return rows

    @classmethod
    def prepare(cls, weights: Mapping[str, Tensor], module: LanguageModel) -> dict[str, Tensor]:
        """See `Peer.prepare`; with one bias for one table, and without a missing projection: `proj_same_dim: false`
        leaves out those from d_model to d_model, for which an identity is exact.
        """
        prepared, config = super().prepare(weights, module), module.config
        clusters = len(config.cutoffs) + 1
        if config.cutoffs and config.div_value == 1:
            parts = [prepared.pop(f"{_SOFTMAX}/cutoff_{i}/b", None) for i in range(clusters)]
            if any(part is None or part.dim() != 1 for part in parts):
                raise ModelFileError(f"{_SOFTMAX}/cutoff_0/b to cutoff_{clusters - 1}/b are needed, with one axis.")
            prepared[f"{_SOFTMAX}/b"] = torch.cat([part for part in parts if part is not None])
        if config.has_projections and config.embedding_dim == config.d_model:
            identity = torch.eye(config.d_model)
            if config.div_value > 1:
                prepared.setdefault(f"{_EMBED}/cutoff_0/proj_W", identity)
            if config.cutoffs and not (config.tie_projections and config.tie_projections[0]):
                prepared.setdefault(f"{_SOFTMAX}/cutoff_0/proj", identity)
        return prepared

    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        count = num_segments(inputs, "ids", "target")
        body, head = self.module.body, self.module.head
        logits = "head_logits" if self.module.config.cutoffs else "logits"
        state = self.module.start(inputs["in.ids.0"].shape[0], projected=False)
        answer: dict[str, Tensor] = {}
        with torch.no_grad():
            for i in range(count):
                hidden, state = body(inputs[f"in.ids.{i}"], None, state)
                log_probs = head.log_probs(hidden)
                nll = -log_probs.gather(2, inputs[f"in.target.{i}"][..., None])[..., 0]
                answer |= {
                    f"out.hidden.{i}": hidden,
                    f"out.logprobs.{i}": log_probs,
                    f"out.nll.{i}": nll,
                    f"out.loss.{i}": nll.mean()[None],
                    f"out.{logits}.{i}": _first_logits(self.module, hidden),
                    **{f"out.mems.{i}.{layer}": memory for layer, memory in enumerate(state.memory.layers)},
                }
        return answer

    @staticmethod
    def options_of_checkpoint(weights: Mapping[str, Tensor], corpus: Mapping[str, Any]) -> dict[str, Any]:
        """Return the flags of a checkpoint from the shapes of its variables, and those of evaluation from its dataset.

        Args: weights: the variables of a model. corpus: the content of corpus-info.json.
        Raises: ModelFileError: a variable is missing, so this is not a Transformer-XL. ConfigError: the dataset is not
            one of the published models', so the settings of evaluation are unknown.
        """
        layer = "transformer/layer_0"

        def shape(name: str, dimensions: tuple[int, ...]) -> tuple[int, ...]:
            tensor = weights.get(name)
            if tensor is None or tensor.dim() not in dimensions:
                state = "is missing" if tensor is None else f"has {tensor.dim()} dimensions"
                raise ModelFileError(f"{name} {state}; this is no checkpoint of the original Transformer-XL.")
            return tuple(tensor.shape)

        has_tables = f"{_EMBED}/cutoff_0/lookup_table" in weights
        width = shape(f"{_EMBED}/cutoff_0/lookup_table" if has_tables else f"{_EMBED}/lookup_table", (2,))[1]
        d_inner, d_model = shape(f"{layer}/ff/layer_2/kernel", (2,))
        biases = shape("transformer/r_w_bias", (2, 3))
        narrower = shape(f"{_EMBED}/cutoff_1/lookup_table", (2,))[1] if has_tables else width
        dataset = corpus.get("dataset")
        if dataset not in _READING:
            known = ", ".join(_READING)
            raise ConfigError(
                f"the dataset in corpus-info.json is {dataset!r}, not one of {known}, so memory and segment length are"
                " unknown; add a config.json with the training's 'flags' and 'corpus_info'."
            )
        return {
            "n_layer": sum(bool(re.fullmatch(r"transformer/layer_\d+/rel_attn/o/kernel", name)) for name in weights),
            "d_model": d_model,
            "d_embed": width,
            "n_head": biases[-2],
            "d_head": biases[-1],
            "d_inner": d_inner,
            "untie_r": len(biases) == 3,
            "div_val": max(1, width // max(1, narrower)),
            "proj_share_all_but_first": not any(
                re.fullmatch(rf"{_SOFTMAX}/cutoff_[1-9]\d*/proj", name) for name in weights
            ),
            "proj_same_dim": not has_tables or f"{_EMBED}/cutoff_0/proj_W" in weights,
            **_READING[dataset],
        }


def _inner_cutoffs(corpus: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the cutoffs between clusters; corpus-info.json has 0 before them and the vocabulary's size behind them."""
    cutoffs, vocab_size = corpus.get("cutoffs", []), _whole(corpus, "vocab_size")
    if not isinstance(cutoffs, list) or any(type(one) is not int for one in cutoffs):
        raise ConfigError(f"cutoffs is {cutoffs!r} in the corpus info; it must be a list of whole numbers.")
    if cutoffs and (len(cutoffs) < 3 or cutoffs[0] != 0 or cutoffs[-1] != vocab_size):
        raise ConfigError(f"cutoffs is {cutoffs} in the corpus info; it must go from 0 to vocab_size {vocab_size}.")
    return tuple(cutoffs[1:-1])


def _whole(corpus: Mapping[str, Any], name: str) -> int:
    value = corpus.get(name)
    if type(value) is not int:
        raise ConfigError(f"{name} is {value!r} in the corpus info; it must be a whole number.")
    return value


def _first_logits(module: LanguageModel, hidden: Tensor) -> Tensor:
    """Return the logits of all tokens, or with clusters those of the shortlist and of the other clusters."""
    head: Any = module.head
    if not hasattr(head, "clusters"):
        return cast(Tensor, head.logits(hidden))
    shortlist = head.clusters.sizes[0]
    table, bias = head.tables[0][:shortlist], head.biases[0][:shortlist]
    if head.cluster_weight is not None and head.cluster_bias is not None:
        table, bias = torch.cat([table, head.cluster_weight]), torch.cat([bias, head.cluster_bias])
    projected = hidden if head.projections is None else hidden @ head.projections[0]
    return F.linear(projected, table, bias)


CACHE = "cache.pkl"
_FORMS: dict[str, tuple[Form, Lines, str]] = {
    "enwik8": ("bytes", "dropped", ""),
    "text8": ("characters", "dropped", ""),
    "ptb": ("words", "end", "<eos>"),
    "wt2": ("words", "end", "<eos>"),
    "wt103": ("words", "end", "<eos>"),
    "lm1b": ("words", "around", "<S>"),
}
"""What a symbol is, how lines are marked, and the symbol for it, by dataset."""
_UNKNOWN = "<unk>"


@dataclass(frozen=True)
class CorpusFiles:
    """What a cache.pkl contributes to a model folder. test: the text for testing; None: see notes, which are sentences
    for the user.
    """

    vocabulary: SymbolVocabulary
    test: bytes | None
    notes: list[str]


def find_beside(folder: Path, name: str) -> Path:
    """Return the place of a file of the data: in the folder, in `data` in it, or in `data` beside it.

    If there is none, return the first of these places.
    """
    places = [place / name for place in (folder, folder / "data", folder.parent / "data")]
    return next((place for place in places if place.is_file()), places[0])


def read_corpus_files(cache: Path, vocab_size: int) -> CorpusFiles:
    """Read a cache.pkl in a separate process, by an allow-list.

    Args: vocab_size: the model's.
    Raises: ModelFileError: it is damaged, or belongs to another model. ConfigError: its dataset is unknown.
    """
    corpus = read_corpus(cache)
    if corpus.dataset not in _FORMS:
        raise ConfigError(f"the dataset in {cache} is {corpus.dataset!r}; it must be one of {', '.join(_FORMS)}.")
    if len(corpus.symbols) != vocab_size:
        raise ModelFileError(
            f"{cache} has {len(corpus.symbols):,} words and the model {vocab_size:,}: they do not belong together."
        )
    form, lines, line = _FORMS[corpus.dataset]
    unknown = _UNKNOWN if _UNKNOWN in corpus.symbols else ""
    if corpus.unk_idx is not None and 0 <= corpus.unk_idx < vocab_size:
        unknown = corpus.symbols[corpus.unk_idx]
    try:
        vocabulary = SymbolVocabulary(
            corpus.symbols, form=form, lines=lines, line=line, unknown=unknown, lowercase=corpus.lower_case
        )
    except DataError as error:
        raise ModelFileError(f"{cache} cannot be used: {error}") from error
    notes = ["Line breaks in a text are left out, as in the original's data."] if lines == "dropped" else []
    return CorpusFiles(vocabulary, _test_text(corpus, vocabulary, notes), notes)


def _test_text(corpus: Corpus, vocabulary: SymbolVocabulary, notes: list[str]) -> bytes | None:
    """Return the text of the test split if encoding it gives the same ids again."""
    if not corpus.test:
        notes.append(f"There is no test text in {CACHE}.")
        return None
    text = vocabulary.decode_bytes(corpus.test)
    if vocabulary.encode_content(text) != corpus.test:
        notes.append(f"The test split in {CACHE} has no exact form as text, so no test.txt was written.")
        return None
    return text
