"""Marian's own models, as its training writes them: a .npz file of weights with the options of the model in it.

    model.npz             the weights under Marian's names, and the options as YAML under `special:model.yml`
    decoder.yml           which of the files belong together, and the options of the search
    vocab.yml             piece -> id, one file for both languages or one for each; or SentencePiece models, vocab.spm
    source.spm target.spm segmentation of text into the pieces of vocab.yml (OPUS-MT has these)

The decoder starts from a vector of zeros, for which the tables of embeddings get one more row of zeros, the padding and
start token. It has one id on both sides, so the shorter of two tables gets rows up to it, which are never produced.

Positions are those by which CTranslate2 and `transformers` read such files: all sines first, frequencies
10000^(-2i / d_model). Marian's source has 10000^(-2i / (d_model - 2)), and norms with epsilon 1e-6 in place of 1e-5.
"""

from __future__ import annotations

import io
import json
import lzma
import math
import re
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from manyheads.config.build import build
from manyheads.config.files import MAX_BYTES, load_yaml, parse_yaml
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ConfigError, DataError, ModelFileError
from manyheads.extras.peers.marian_tokenizer import MAX_PIECES, MarianOptions, MarianTokenizer
from manyheads.extras.peers.peer import Layout, Rule, transposed
from manyheads.extras.peers.toolkits import PlainTransformer, tie_of
from manyheads.files.safe_open import open_regular, read_limited
from manyheads.installation import needing_extra
from manyheads.models.transformer.config import TransformerConfig
from manyheads.text.pipeline import MAX_FILE_BYTES

if TYPE_CHECKING:
    from manyheads.extras.peers.peer import Options
    from manyheads.models.composites import Seq2Seq

ACTIVATIONS = {"relu": "relu", "swish": "swish", "gelu": "quick_gelu"}  # Marian's gelu is x * sigmoid(1.702 x)
_MODEL_FILE = "special:model.yml"
_MAX_TENSORS = 20_000
_EXPANSION, _MAX_SPARE_BYTES = 4, 64 * 2**20
"""Weights hardly become smaller by compression: a file whose content is so much larger is no model."""
_DAMAGES = (
    *(OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error, lzma.LZMAError),
    ValueError,  # a name that is not UTF-8
)
_BAD_HEADERS = (ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, tokenize.TokenError)
_NEVER = -1e4
"""The bias of rows without a piece."""
_LOGITS, _PADDED = "decoder_ff_logit_out", ("Wemb", "encoder_Wemb", "decoder_Wemb")
_OUTPUT = (f"{_LOGITS}_Wt", f"{_LOGITS}_W")


def _row(ours: str) -> Rule:
    """Return the rule for a vector that is stored as a matrix of one row."""
    return Rule(ours, lambda parts: parts[0].clone()[None], lambda row, _: row.unbind())


class MarianNmt(PlainTransformer):
    """A config holds the options in `special:model.yml` under `model`."""

    name = "Marian NMT"
    kinds = ("marian_nmt",)
    options: ClassVar[Options] = {
        "type": str,
        "dim-emb": int,
        "enc-depth": int,
        "dec-depth": int,
        "transformer-heads": int,
        "transformer-dim-ffn": int,
        "transformer-decoder-dim-ffn": 0,
        "transformer-ffn-activation": "swish",
        "transformer-preprocess": "",
        "transformer-postprocess": "dan",
        "transformer-postprocess-top": "",
        "transformer-dropout": 0.0,
        "transformer-dropout-attention": 0.0,
        "transformer-dropout-ffn": 0.0,
        "transformer-tied-layers": list[int],
        "tied-embeddings": False,
        "tied-embeddings-src": False,
        "tied-embeddings-all": False,
        "output-omit-bias": False,
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "type": ("transformer",),
        "transformer-decoder-autoreg": ("self-attention",),
        "transformer-no-projection": (False,),
        "transformer-no-bias": (False,),
        "transformer-no-affine": (False,),
        "transformer-ffn-depth": (2,),
        "transformer-decoder-ffn-depth": (0, 2),
        "transformer-postprocess-emb": ("", "d"),
        "transformer-train-position-embeddings": (False,),
        "transformer-train-positions": (False,),
        "right-left": (False,),
        "ulr": (False,),
        "lemma-dim-emb": (0,),
        "input-types": ([], ["sequence", "sequence"]),
    }

    @classmethod
    def is_folder(cls, folder: Path) -> bool:
        return bool(_models(folder)) and not (folder / "config.json").exists()

    @classmethod
    def read_folder(cls, folder: Path) -> MarianFolder:
        """Read weights, options, vocabularies and the options of the search.

        Raises: ModelFileError, ConfigError, DataError: a file is missing or damaged, or asks for what we do not have.
            MissingExtraError: sentencepiece is not installed.
        """
        notes: list[str] = []
        found = _only(sorted(folder.glob("*decoder.yml")), folder, "*decoder.yml", first="decoder.yml")
        decoder = load_yaml(found).values if found else {}
        if found is None:
            notes.append(
                "There is no decoder.yml, so the search has the defaults of marian-decoder: 12 beams, no penalty."
            )
        options, weights = read_npz(_model_file(folder, decoder))
        tokenizer, unknown = _read_tokenizer(folder, _vocabularies(folder, decoder), _rows(weights), notes)
        return MarianFolder(options, weights, tokenizer, _settings(decoder, unknown, notes), notes)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `PlainTransformer.read`. Raises: ConfigError: also, the decoder is recurrent."""
        given = config.get("model")
        if isinstance(given, Mapping) and given.get("transformer-decoder-autoreg") == "rnn":
            raise ConfigError(
                f"transformer-decoder-autoreg is 'rnn' (dec-cell {given.get('dec-cell')!r}, an SSRU in the models made"
                " for speed): the decoder is recurrent, and our Transformer's attends to itself; convert a model with"
                " self-attention, such as the teacher."
            )
        return super().read(config)

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerConfig:
        activation = options["transformer-ffn-activation"]
        if activation not in ACTIVATIONS:
            raise ConfigError(f"transformer-ffn-activation is {activation!r}; known are {', '.join(ACTIVATIONS)}.")
        has_top, position = _norms(options)
        is_joint = options["tied-embeddings-all"] or options["tied-embeddings-src"]
        source, target = cls.vocab_sizes(weights, *(("Wemb", "Wemb") if is_joint else _PADDED[1:]))
        decoder_d_ff = options["transformer-decoder-dim-ffn"]
        return TransformerConfig(
            source_vocab_size=max(source, target) + 1,
            target_vocab_size=max(source, target) + 1,
            d_model=options["dim-emb"],
            num_heads=options["transformer-heads"],
            d_ff=options["transformer-dim-ffn"],
            decoder_d_ff=0 if decoder_d_ff == options["transformer-dim-ffn"] else decoder_d_ff,
            num_encoder_layers=options["enc-depth"],
            num_decoder_layers=options["dec-depth"],
            dropout=options["transformer-dropout"],
            attention_dropout=options["transformer-dropout-attention"],
            feed_forward_dropout=options["transformer-dropout-ffn"],
            activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
            norm_position=position,
            final_norm=None if has_top == (position == "pre") else has_top,
            positions="sinusoidal_halves",
            tie_embeddings=tie_of(
                embeddings=is_joint, output=options["tied-embeddings-all"] or options["tied-embeddings"]
            ),
            head_bias=not options["output-omit-bias"] or target < source,
        )

    @classmethod
    def from_peer(cls, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> MarianNmt:
        """See `Peer.from_peer`; of tied layers our model has one copy each."""
        peer = super().from_peer(config, _untied(state_dict, cls.read(config)))
        assert isinstance(peer, MarianNmt)
        return peer

    @classmethod
    def prepare(cls, weights: Mapping[str, Tensor], module: Seq2Seq) -> dict[str, Tensor]:
        """See `Peer.prepare`, with the row of the start token, of zeros, and those before it, in the tables."""
        prepared = super().prepare(weights, module)
        new, old = _OUTPUT
        if old in prepared:  # before 2020 the matrix lay as those of the layers do
            prepared[new] = prepared.pop(old).t()
        config = module.config
        size = config.target_vocab_size
        for name in (*_PADDED, new):
            if name in prepared:
                prepared[name] = F.pad(prepared[name], (0, 0, 0, size - prepared[name].shape[0]))
        if config.head_bias:
            pieces = _rows(weights)[1]
            bias = prepared.get(f"{_LOGITS}_b", torch.zeros(1, pieces))
            prepared[f"{_LOGITS}_b"] = F.pad(F.pad(bias, (0, size - 1 - bias.shape[-1]), value=_NEVER), (0, 1))
        return prepared

    @classmethod
    def layout_of(cls, module: Seq2Seq) -> Layout:
        """See `Peer.layout_of`. A norm before a sublayer has another name than one after it."""
        config = module.config
        suffix = "_pre" if config.norm_position == "pre" else ""
        is_joint = config.tie_embeddings in ("all", "embeddings")
        layout: dict[str, str | Rule] = {
            **{"Wemb" if is_joint else "encoder_Wemb": "body.source_embedding.weight"},
            **({} if is_joint else {"decoder_Wemb": "body.target_embedding.weight"}),
            **({_OUTPUT[0]: "head.weight"} if config.tie_embeddings in ("embeddings", "none") else {}),
            f"{_LOGITS}_b": _row("head.bias"),
        }

        for stack, count in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
            parts = {"self": "self_attn", "context": "cross_attn"} if stack == "decoder" else {"self": "self_attn"}
            for index in range(count):
                peer, own = f"{stack}_l{index + 1}", f"body.{stack}.layers.{index}"
                for theirs, ours in parts.items():
                    for letter in "qkvo":
                        projection = f"{own}.{ours}.{letter if letter != 'o' else 'out'}_proj"
                        layout[f"{peer}_{theirs}_W{letter}"] = transposed(f"{projection}.weight")
                        layout[f"{peer}_{theirs}_b{letter}"] = _row(f"{projection}.bias")
                    layout |= _norm(f"{peer}_{theirs}_Wo", suffix, f"{own}.{ours}_residual.norm")
                for number, name in ((1, "in"), (2, "out")):
                    layout[f"{peer}_ffn_W{number}"] = transposed(f"{own}.feed_forward.{name}_proj.weight")
                    layout[f"{peer}_ffn_b{number}"] = _row(f"{own}.feed_forward.{name}_proj.bias")
                layout |= _norm(f"{peer}_ffn_ffn", suffix, f"{own}.feed_forward_residual.norm")
            layout |= _norm(f"{stack}_top", "", f"body.{stack}.norm")
        return layout


def _norm(theirs: str, suffix: str, ours: str) -> Layout:
    names = (("scale", "weight"), ("bias", "bias"))
    return {f"{theirs}_ln_{peer}{suffix}": _row(f"{ours}.{own}") for peer, own in names}


def _norms(options: Mapping[str, Any]) -> tuple[bool, Literal["pre", "post"]]:
    """Return whether each stack ends with a norm, and where the norms of the layers stand.

    Raises: ConfigError: the operations around a sublayer are neither of the two orders.
    """
    names = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
    before, after, top = (options[name].replace("d", "") for name in names)
    if (before, after) not in (("n", "a"), ("", "an")) or top not in ("", "n"):
        shown = ", ".join(f"{name} {options[name]!r}" for name in names)
        raise ConfigError(
            f"{shown}: our layers have norms before sublayers ('n', 'da') or after them ('', 'dan'), and 'n' or '' at"
            " the top."
        )
    return top == "n", "pre" if before else "post"


def _untied(weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights with those of tied decoder layers under the name of each layer.

    Raises: ConfigError: there is not one number for each layer.
    """
    tied, depth = options["transformer-tied-layers"], options["dec-depth"]
    if not tied:
        return dict(weights)
    if len(tied) != depth or not all(1 <= number <= depth for number in tied):
        raise ConfigError(
            f"transformer-tied-layers is {tied}; it needs {depth} numbers, one for each layer of the decoder, from 1 to"
            f" {depth}."
        )
    untied = {name: tensor for name, tensor in weights.items() if not re.match(r"decoder_l\d+_", name)}
    for index, number in enumerate(tied, start=1):
        start = f"decoder_l{number}_"
        own = {name: tensor for name, tensor in weights.items() if name.startswith(start)}
        untied |= {f"decoder_l{index}_{name.removeprefix(start)}": tensor for name, tensor in own.items()}
    return untied


@dataclass
class MarianFolder:
    """A folder of Marian's. options: those in `special:model.yml`. tokenizer: None if the notes say why."""

    options: dict[str, Any]
    weights: dict[str, Tensor]
    tokenizer: MarianTokenizer | None
    settings: DecodingSettings
    notes: list[str] = field(default_factory=list)


def _models(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.npz") if path.is_file() and ".optimizer." not in path.name)


def _model_file(folder: Path, decoder: Mapping[str, Any]) -> Path:
    """Raises: ModelFileError: there is no .npz file, or it is not known which one is the model."""
    listed = _names(decoder, "models")
    if len(listed) > 1:
        raise ModelFileError(
            f"decoder.yml lists {len(listed)} models, an ensemble: {', '.join(listed)}; convert each by itself, in a"
            " folder of its own, and name both with + for the search."
        )
    if listed and not listed[0].endswith(".bin"):
        if not (folder / listed[0]).is_file():
            raise ModelFileError(f"decoder.yml names the model {listed[0]}, which {folder} does not have.")
        return folder / listed[0]
    only = _only(_models(folder) if not listed else [], folder, "*.npz", first="model.npz")
    if only is None:
        binary = listed or [path.name for path in sorted(folder.glob("*.bin"))]
        raise ModelFileError(
            f"{binary[0]} is a .bin file, the memory of a Marian program, often in int8, for one kind of processor;"
            " convert the .npz file that it was made from."
            if binary
            else f"{folder} has no .npz file with a model of Marian."
        )
    return only


def _only(paths: list[Path], folder: Path, pattern: str, first: str) -> Path | None:
    """Return the only file; of several, the one with the usual name. Raises: ModelFileError: no file has it."""
    named = [path for path in paths if path.name == first] if len(paths) > 1 else paths
    if paths and not named:
        listed = ", ".join(path.name for path in paths)
        raise ModelFileError(f"{folder} has several files {pattern}: {listed}; keep one, or name it {first}.")
    return named[0] if named else None


def _names(decoder: Mapping[str, Any], key: str) -> list[str]:
    """Return the names of files that decoder.yml lists. They are looked for in the folder alone: paths are those of the
    machine that trained the model.

    Raises: ConfigError: it is no list of paths.
    """
    paths = decoder.get(key) or []
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise ConfigError(f"decoder.yml: {key} is {paths!r}; it must be a list of paths.")
    return [PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name for path in paths]


def read_npz(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options and the weights of a model.

    No object is unpickled, and no more is read than the file's size explains.

    Raises: ModelFileError: the file is damaged, is no model of Marian, or holds weights that are not floating-point
        numbers. ConfigError: its options are no YAML.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size, most = sum(member.file_size for member in members), _EXPANSION * path.stat().st_size
            if size > most + _MAX_SPARE_BYTES or len(members) > _MAX_TENSORS:
                raise ModelFileError(
                    f"{path} expands to {size:,} bytes in {len(members):,} arrays; the weights in a file of its size"
                    f" have at most {most + _MAX_SPARE_BYTES:,} bytes in {_MAX_TENSORS:,} arrays, so it is no model."
                )
            arrays = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in arrays:
                    raise ModelFileError(f"{path} has the array {name} twice.")
                arrays[name] = _array(archive.read(member), f"{path}: {name}")
    except _DAMAGES as error:
        raise ModelFileError(f"{path} is not an intact .npz file: {error}.") from error
    if _MODEL_FILE not in arrays:
        raise ModelFileError(f"{path} has no {_MODEL_FILE}, the options of a model of Marian; is it another .npz file?")
    raw = arrays.pop(_MODEL_FILE).tobytes()
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: {_MODEL_FILE} has {len(raw):,} bytes; at most {MAX_BYTES:,} are read.")
    try:
        options = parse_yaml(raw.rstrip(b"\0").decode("utf-8"), f"{path}: {_MODEL_FILE}").values
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {_MODEL_FILE} is not UTF-8: {error}.") from error
    arrays = {name: array for name, array in arrays.items() if not name.startswith("special:")}
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            raise ModelFileError(
                f"{path}: {name} has type {array.dtype}: weights in int8 or another integer type are not converted, as"
                " they lack what rounding removed; convert the model in float32 that it was made from."
            )
    return options, {name: torch.from_numpy(array) for name, array in arrays.items()}


def _array(content: bytes, where: str) -> np.ndarray:
    """Return an array of plain numbers in numpy's format. Raises: ModelFileError: it is damaged, or of another kind."""
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read_header is None:
            raise ValueError(f"version {version} of the format is unknown")
        shape, is_transposed, dtype = read_header(stream)
        expected = math.prod(shape) * dtype.itemsize
        is_kind = dtype.kind in "fiub" and dtype.itemsize <= 8
        if dtype.hasobject or not is_kind or len(content) - stream.tell() != expected:
            raise ValueError(f"{len(content) - stream.tell():,} bytes are no array of {dtype} with shape {shape}")
        numbers = np.frombuffer(content, dtype, offset=stream.tell())
        array = numbers.reshape(shape, order="F" if is_transposed else "C")
    except _BAD_HEADERS as error:
        raise ModelFileError(f"{where} is not an intact array of numbers: {error}.") from error
    return np.array(array, dtype=dtype.newbyteorder("="), order="C")


def _rows(weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the numbers of source and target pieces. Raises: ModelFileError: there are no tables of pieces."""
    shared = weights.get("Wemb")
    tables = [weights.get(name, shared) for name in _PADDED[1:]]
    sizes = [table.shape[0] for table in tables if table is not None and table.dim() == 2]
    if len(sizes) != 2:
        raise ModelFileError("the file has no tables of pieces: neither Wemb, nor encoder_Wemb and decoder_Wemb.")
    return sizes[0], sizes[1]


def _vocabularies(folder: Path, decoder: Mapping[str, Any]) -> list[Path]:
    """Return the vocabularies of source and target; empty if the folder has none.

    Raises: ModelFileError: decoder.yml names one that is missing, or it is not known which one is the source's.
    """
    listed = _names(decoder, "vocabs")
    if listed:
        missing = [name for name in listed if not (folder / name).is_file()]
        if missing:
            raise ModelFileError(f"decoder.yml names the vocabulary {missing[0]}, which {folder} does not have.")
        if len(listed) > 2:
            raise ModelFileError(f"decoder.yml lists {len(listed)} vocabularies; our models have one source.")
        return [folder / listed[0], folder / listed[-1]]
    found = sorted({*folder.glob("*vocab*.yml"), *folder.glob("*vocab*.spm")})
    if len(found) > 1:
        raise ModelFileError(
            f"{folder} has several vocabularies: {', '.join(path.name for path in found)}; decoder.yml must list the"
            " source's and the target's under vocabs."
        )
    return found * 2


def _read_tokenizer(
    folder: Path, paths: list[Path], rows: tuple[int, int], notes: list[str]
) -> tuple[MarianTokenizer | None, int | None]:
    """Return a tokenizer, None: see the notes; and the id of unknown pieces among the target's, None: not known.

    Raises: DataError, ModelFileError: a file is damaged. MissingExtraError: sentencepiece is not installed.
    """
    if not paths:
        notes.append("There is no vocabulary: neither decoder.yml names one, nor is there a vocab.yml or vocab.spm.")
        return None, None
    kinds = {path.suffix for path in paths}
    if kinds - {".yml", ".yaml", ".spm"}:
        raise ModelFileError(f"{paths[0].name}, {paths[1].name}: vocabularies are read from .yml and .spm files only.")
    vocabularies = [_read_spm(path) if path.suffix == ".spm" else _read_yaml(path) for path in paths]
    for path, vocabulary, count in zip(paths, vocabularies, rows, strict=True):
        for piece in [piece for piece, index in vocabulary.items() if index >= count]:
            del vocabulary[piece]
            notes.append(f"{path.name}: the piece {piece!r} has no row in the model, and is read as <unk>.")
    if len(notes) > _MAX_NOTES:
        notes[_MAX_NOTES - 1 :] = [f"{len(notes) - _MAX_NOTES + 1} further pieces have no row, and are read as <unk>."]
    for path, vocabulary in zip(paths, vocabularies, strict=True):
        absent = [piece for piece in ("</s>", "<unk>") if piece not in vocabulary]
        if absent:
            raise DataError(f"{path} has no piece {absent[0]!r}, which every vocabulary of Marian has.")
    unknown = vocabularies[1]["<unk>"]
    if any(vocabularies[0][piece] != vocabularies[1][piece] for piece in ("</s>", "<unk>")):
        raise DataError(f"{paths[0].name}, {paths[1].name}: </s> and <unk> must have the same ids in both.")
    models = [
        path if path.suffix == ".spm" else _segmentation(folder, side)
        for path, side in zip(paths, ("source", "target"), strict=True)
    ]
    if None in models:
        notes.append(
            "The folder has a vocabulary and no SentencePiece model (source.spm and target.spm) that divides text into"
            " its pieces."
        )
        return None, unknown
    pad = "<pad>"
    while any(pad in vocabulary for vocabulary in vocabularies):
        pad = f"<{pad}>"
    for vocabulary in vocabularies:
        vocabulary[pad] = max(rows)
    is_joint = vocabularies[0] == vocabularies[1]
    source, target = (read_limited(path, MAX_FILE_BYTES) for path in models if path is not None)
    files = {"source.spm": source, "target.spm": target, "vocab.json": _json(vocabularies[0])}
    if not is_joint:
        files["target_vocab.json"] = _json(vocabularies[1])
    options = MarianOptions(pad_token=pad, separate_vocabs=not is_joint, start_id=vocabularies[1][pad])
    return MarianTokenizer(files, options, where=str(folder)), unknown


def _segmentation(folder: Path, side: str) -> Path | None:
    """Return the SentencePiece model of one side, or the only one of the folder."""
    named = folder / f"{side}.spm"
    found = sorted(path for path in folder.glob("*.spm") if path.is_file())
    return named if named.is_file() else found[0] if len(found) == 1 else None


def _json(vocabulary: Mapping[str, int]) -> bytes:
    return json.dumps(vocabulary, ensure_ascii=False).encode("utf-8")


def _read_spm(path: Path) -> dict[str, int]:
    """Return the pieces of a SentencePiece model, with its unknown piece and end under the usual names."""
    with needing_extra("A vocabulary of the form .spm needs the package sentencepiece", "spm"):
        import sentencepiece
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(read_limited(path, MAX_FILE_BYTES))
    except (RuntimeError, ValueError, OSError) as error:
        raise DataError(f"{path} is not a SentencePiece model, or is damaged: {str(error).strip()}.") from None
    return {processor.id_to_piece(index): index for index in range(processor.get_piece_size())}


def _read_yaml(path: Path) -> dict[str, int]:
    """Return the pieces of a vocabulary in YAML. A key is a text whatever it looks like: `null`, `1`, `on`, `~`.

    The events of the parser are read, not objects: nothing is built, and nothing that is nested or repeated by an alias
    is accepted.

    Raises: DataError: the file is too large, is not YAML, or is no mapping of pieces to different ids.
    """
    try:
        text = read_limited(path, MAX_FILE_BYTES).decode("utf-8-sig")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        begun: list[type] = []
        values: list[str] = []
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.ScalarEvent) and yaml.MappingStartEvent in begun:
                values.append(event.value)
            elif isinstance(event, _ALLOWED) and type(event) not in begun:
                begun.append(type(event))
            else:
                line = event.start_mark.line + 1 if event.start_mark else 1
                raise DataError(f"{path}, line {line}: it must have one `piece: id` on each line.")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}.") from error
    pieces, numbers = values[::2], values[1::2]
    bad = next((number for number in numbers if not re.fullmatch(r"[0-9]{1,7}", number)), None)
    if bad is not None:
        raise DataError(f"{path}: the piece {pieces[numbers.index(bad)]!r} has the id {bad!r}; it must be a number.")
    vocabulary = {piece: int(number) for piece, number in zip(pieces, numbers, strict=True)}
    if len(vocabulary) != len(pieces) or len(set(vocabulary.values())) != len(pieces):
        raise DataError(f"{path} has a piece or an id twice.")
    if not 0 < len(vocabulary) <= MAX_PIECES:
        raise DataError(f"{path} has {len(vocabulary):,} pieces; 1 to {MAX_PIECES:,} are possible.")
    return vocabulary


_ALLOWED = (
    *(yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.MappingStartEvent),
    *(yaml.MappingEndEvent, yaml.DocumentEndEvent, yaml.StreamEndEvent),
)
_MAX_NOTES = 10


def _settings(decoder: Mapping[str, Any], unknown: int | None, notes: list[str]) -> DecodingSettings:
    """Return the options of the search in decoder.yml, with marian-decoder's defaults.

    Args: unknown: the id of <unk>, which Marian never produces unless it is allowed.
    Raises: ConfigError: an option changes the search in a way that ours does not have.
    """
    for name, neutral in (("word-penalty", (0, 0.0)), ("output-sampling", (False, [], ""))):
        value = decoder.get(name)
        if value is not None and value not in neutral:
            raise ConfigError(f"decoder.yml: {name} is {value!r}; our search has no such option, so leave it out.")
    if decoder.get("shortlist"):
        notes.append("The shortlist in decoder.yml was left out: the search looks at the whole vocabulary.")
    if "int8" in str(decoder.get("gemm-precision", "")):
        notes.append(f"gemm-precision {decoder['gemm-precision']} was left out: manyheads computes in float32.")
    exponent, factor = decoder.get("normalize", 0.0), decoder.get("max-length-factor", 3.0)
    options = {
        "rules": "marian",
        "num_beams": decoder.get("beam-size", 12),
        "length_penalty": float(exponent) if isinstance(exponent, int) else exponent,
        "length_penalty_kind": "power" if exponent else "none",
        "early_stopping": True,
        "max_len_ratio": float(factor) if isinstance(factor, int) else factor,
        "max_len_offset": 0,
        "banned_ids": () if decoder.get("allow-unk") or unknown is None else (unknown,),
    }
    return build(DecodingSettings, options, "decoder.yml")
