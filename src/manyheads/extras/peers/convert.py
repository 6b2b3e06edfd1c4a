"""Conversion of model folders between other implementations and ours, in both directions.

A peer's folder contains config.json and model.safetensors, and for `transformers/Marian` the other files of
`save_pretrained`: generation_config.json, source.spm, target.spm, vocab.json, tokenizer_config.json. A folder of the
original Transformer-XL contains only model.pt, a module that was saved whole. Our folder keeps the contents of the
peer's two config files as peer.json, so that converting back loses nothing. Folders of toolkits:

    fairseq     checkpoint_best.pt  dict.en.txt  dict.de.txt  [sentencepiece.bpe.model]
    OpenNMT-py  model_step_N.pt
    JoeyNMT     config.yaml  best.ckpt  [src_vocab.txt  trg_vocab.txt  sentencepiece.model]
    Marian      model.npz  decoder.yml  vocab.yml or vocab.spm  [source.spm  target.spm]

Their text is read with a sentencepiece model only; other segmentations are programs of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from manyheads.catalogue import ARCHITECTURES
from manyheads.checkpoint.format import write_tensors
from manyheads.config.files import to_json
from manyheads.decoding.settings import DecodingSettings, load_settings
from manyheads.errors import ConfigError, DataError, ModelFileError
from manyheads.extras.peers import FORMATS, PEERS
from manyheads.extras.peers.legacy_pickle import Saved, read_saved
from manyheads.extras.peers.marian_tokenizer import MarianOptions, MarianTokenizer
from manyheads.extras.peers.tensorflow import find_prefix, read_checkpoint, verifies_data
from manyheads.extras.peers.tf_transformer_xl import (
    CACHE,
    PUBLISHED_LANES,
    CorpusFiles,
    TensorFlowXL,
    find_beside,
    find_checkpoint,
    read_corpus_files,
)
from manyheads.extras.peers.toolkits import options_of_folder
from manyheads.files.commit import write_folder
from manyheads.files.safe_open import read_limited
from manyheads.files.verify import read_object
from manyheads.installation import install_command
from manyheads.models.pretrained import (
    data_notice,
    load,
    read_config,
    save_pretrained,
    usage_example,
    write_notice,
    yaml_list,
)
from manyheads.text.of_folder import load_tokenizer
from manyheads.text.pipeline import MAX_FILE_BYTES, has_tokenizer
from manyheads.text.word_sides import WordSides
from manyheads.text.word_vocabulary import SymbolVocabulary

if TYPE_CHECKING:
    from manyheads.models.composites import LanguageModel, Seq2Seq
    from manyheads.text.sides import TranslationTokenizer

TRAINED_BY = ("fairseq/Transformer", "opennmt-py/Transformer", "joeynmt/Transformer")
_FAIRSEQ, _OPENNMT, _JOEYNMT = TRAINED_BY
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_WHERE = {_FAIRSEQ: ("cfg.model.", "args."), _OPENNMT: ("opt.",)}


def read_options(peer: str, folder: Path, saved: Saved) -> dict[str, Any]:
    """Return the options of the peer's model, from its checkpoint or config.yaml.

    Raises: ModelFileError, ConfigError: the folder has none.
    """
    if peer == _JOEYNMT:
        return options_of_folder(folder)
    for prefix in _WHERE[peer]:
        found = {name.removeprefix(prefix): value for name, value in saved.options.items() if name.startswith(prefix)}
        if found:
            return found
    raise ModelFileError(f"the checkpoint in {folder} has no options of {peer}; is it from another program?")


def read_tokenizer(
    peer: str, folder: Path, options: Mapping[str, Any], sizes: tuple[int, int], notes: list[str]
) -> MarianTokenizer | None:
    """Return a tokenizer of the peer's vocabularies and its sentencepiece model; None: see the notes.

    Args: sizes: numbers of source and target ids.
    Raises: ModelFileError, DataError: a file is damaged, or does not belong to the model.
    """
    if peer == _OPENNMT:
        notes.append("OpenNMT-py reads sources without an end token, which our translation adds.")
        return None
    found = _VOCABULARIES[peer](folder, options)
    spms = sorted(path for path in folder.glob("*.model") if path.is_file())
    if found is None or len(spms) != 1:
        notes.append("A tokenizer needs the two vocabularies and one sentencepiece model (*.model) in the folder.")
        return None
    source, target = found
    for side, vocabulary, size in zip(("source", "target"), found, sizes, strict=True):
        if len(vocabulary) > size:
            raise ModelFileError(
                f"the {side} vocabulary in {folder} has {len(vocabulary):,} pieces, the model {size:,}."
            )
    if any(source[piece] != target[piece] for piece in _SPECIAL):
        raise ModelFileError(f"the special pieces have different ids in the two vocabularies in {folder}.")
    spm = read_limited(spms[0], MAX_FILE_BYTES)
    start = source["</s>"] if peer == _FAIRSEQ else source["<s>"]
    files = {"vocab.json": _json(source), "target_vocab.json": _json(target), "source.spm": spm, "target.spm": spm}
    return MarianTokenizer(files, MarianOptions(separate_vocabs=True, start_id=start), where=str(folder))


def _fairseq_vocabularies(folder: Path, options: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]] | None:
    """Read dict.SOURCE.txt and dict.TARGET.txt: a piece and its count on each line, after four special pieces.

    A flag after the count allows a piece to be there twice, which `_numbered` does not.
    """
    files = [folder / f"dict.{options.get(name)}.txt" for name in ("source_lang", "target_lang")]
    if not all(path.is_file() for path in files):
        return None
    source, target = (
        [line.removesuffix(" #fairseq:overwrite").rpartition(" ")[0] for line in _lines(path)] for path in files
    )
    return _numbered([*_SPECIAL, *source], files[0]), _numbered([*_SPECIAL, *target], files[1])


def _joeynmt_vocabularies(folder: Path, _options: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]] | None:
    """Read src_vocab.txt and trg_vocab.txt: a piece on each line."""
    files = [folder / "src_vocab.txt", folder / "trg_vocab.txt"]
    if not all(path.is_file() for path in files):
        return None
    source, target = (_lines(path) for path in files)
    return _numbered(source, files[0]), _numbered(target, files[1])


def _lines(path: Path) -> list[str]:
    try:
        return read_limited(path, MAX_FILE_BYTES).decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}.") from error


def _numbered(pieces: list[str], path: Path) -> dict[str, int]:
    ids = {piece: index for index, piece in enumerate(pieces)}
    missing = [piece for piece in _SPECIAL if piece not in ids]
    if missing or len(ids) != len(pieces):
        raise DataError(f"{path} has no piece {missing[0]!r}." if missing else f"{path} has a piece twice.")
    return ids


def _json(vocabulary: Mapping[str, int]) -> bytes:
    return json.dumps(vocabulary, ensure_ascii=False).encode("utf-8")


_VOCABULARIES: dict[str, Callable[[Path, Mapping[str, Any]], tuple[dict[str, int], dict[str, int]] | None]] = {
    _FAIRSEQ: _fairseq_vocabularies,
    _JOEYNMT: _joeynmt_vocabularies,
}


def _read_word_sides(folder: Path, config: Mapping[str, Any], sizes: tuple[int, int], notes: list[str]) -> WordSides:
    """Return the words of vocab_src.txt and vocab_tgt.txt, one a line by id; without these files, ids as text.

    Args: config: has `pad`, `start_symbol` and `end_symbol`; by default the text's `<blank>` 2, `<s>` 0 and `</s>` 1.
    Raises: ConfigError: these are no ids of targets. DataError: a file does not belong to the model, or is damaged.
    """
    special = {"pad": config.get("pad", 2), "bos": config.get("start_symbol", 0), "eos": config.get("end_symbol", 1)}
    if any(type(index) is not int or not 0 <= index < sizes[1] for index in special.values()):
        raise ConfigError(
            f"pad, start_symbol and end_symbol are {', '.join(map(repr, special.values()))}; in config.json they must"
            f" be ids of targets, from 0 to {sizes[1] - 1}."
        )
    never = sorted({special["pad"], special["bos"]} - {special["eos"]})
    if never:
        notes.append(
            f"A search never writes padding and the start symbol (here {' and '.join(map(str, never))}), which the"
            " text's greedy_decode can write."
        )
    files = [folder / name for name in WORD_FILES]
    if not any(path.is_file() for path in files):
        notes.append(
            f"There was no vocabulary ({' and '.join(WORD_FILES)}, a word a line by id), so the model translates ids,"
            " with spaces between them."
        )
        return WordSides(*sizes, special)
    words = [_lines(path) for path in files if path.is_file()]
    if len(words) < len(files):
        raise DataError(f"{folder} has only one of {' and '.join(WORD_FILES)}; the model needs both, or none.")
    for path, side, size in zip(files, words, sizes, strict=True):
        if len(side) != size:
            raise DataError(f"{path} has {len(side):,} words, but the model {size:,}; write one word a line, by id.")
    return WordSides(words[0], words[1], special)


SEQUENCE_MODELS = ("transformers/Marian", "transformers/Pegasus")
TENSORFLOW_XL, MARIAN_NMT = "tf/Transformer-XL", "marian-nmt"
PEER_FILE = "peer.json"
TEST_TEXT = "test.txt"
ANNOTATED, WORD_FILES = "annotated-transformer", ("vocab_src.txt", "vocab_tgt.txt")
_FIRST_PICKLES = ("pytorch_model.bin", "model.pt", "best.ckpt", "checkpoint_best.pt")  # of several
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion. next_command: what a user may run next; empty: nothing. notes: messages for the user,
    one sentence each.
    """

    peer: str
    num_parameters: int
    next_command: str
    notes: list[str] = field(default_factory=list)


def guess_peer(folder: Path) -> str:
    """Return the peer that wrote a folder, from its config.json.

    Raises: ModelFileError: there is no such file, or it does not name a known peer.
    """
    for peer in FORMATS:
        if PEERS[peer].is_folder(folder):
            return peer
    config = _read_object(folder / "config.json")
    if "format_version" in config:
        raise ModelFileError(f"{folder} is a model of manyheads already; to convert it back, use --to PEER.")
    options = config.get("model")
    for peer, found in FORMATS.items():
        if found.model_type and config.get("model_type") == found.model_type:
            return peer
        if found.options and isinstance(options, dict) and found.options <= options.keys():
            return peer
    kind = f"model_type {config['model_type']!r}" if "model_type" in config else "no model_type"
    known = ", ".join(peer for peer, one in FORMATS.items() if one.is_read)
    raise ModelFileError(f"{folder / 'config.json'} has {kind}; models of these can be converted: {known}.")


def import_folder(
    source: Path, output: Path, *, peer: str | None = None, from_pickle: bool = False, replace: bool = True
) -> Conversion:
    """Read a peer's folder and write ours.

    Args:
        peer: the peer that wrote it; None: use its config.json.
        from_pickle: if there is no model.safetensors, read the tensors from a pickle with an allow-list in a separate
            process.
        replace: replace an existing output folder.

    Raises: ModelFileError, ConfigError, DataError: files are missing, damaged, or need unsupported features.
        MissingExtraError: the tokenizer needs a package. SaveError: our folder could not be written.
    """
    peer = peer or guess_peer(source)
    if not FORMATS[peer].is_read:
        raise ConfigError(f"a model of {peer} is two stacks without embeddings or output: there is nothing to run.")
    notes: list[str] = []
    more: dict[str, bytes] = {}
    tokenizer: TranslationTokenizer | SymbolVocabulary | None = None
    settings: DecodingSettings | None = None
    if peer == MARIAN_NMT:
        marian = PEERS[peer].read_folder(source)
        config, weights = {"model": marian.options}, marian.weights
        tokenizer, settings, notes = marian.tokenizer, marian.settings, marian.notes
    elif peer == TENSORFLOW_XL:
        config, weights = _read_tensorflow(source, notes)
    elif peer in TRAINED_BY:
        saved = _read_weights(source, from_pickle)
        weights, config = saved.tensors, {"model": read_options(peer, source, saved)}
    else:
        saved = _read_weights(source, from_pickle)
        weights = saved.tensors
        config = _read_config(source, peer, saved)
    model = PEERS[peer].from_peer(config, weights).module
    model.data_notice = data_notice(source)
    config = config["model"] if FORMATS[peer].model_type else config
    next_command = ""
    kept: dict[str, Any] = {"peer": peer, "config": config}
    if peer == MARIAN_NMT:
        next_command = _translation(output, marian.tokenizer)
    if peer in SEQUENCE_MODELS:
        files = PEERS[peer].read_files(source, config, model.config)
        tokenizer, settings = files.tokenizer, files.settings
        notes += files.notes
        kept["generation"] = files.generation
        next_command = _translation(output, files.tokenizer)
    if peer == TENSORFLOW_XL and from_pickle:
        corpus = read_corpus_files(find_beside(source, CACHE), model.config.vocab_size)
        tokenizer = corpus.vocabulary
        notes += corpus.notes
        more = {} if corpus.test is None else {TEST_TEXT: corpus.test}
        next_command = _evaluation(output, config, corpus)
    notes += PEERS[peer].notes_of_import(config, model.config)
    if peer in TRAINED_BY:
        sizes = model.config.source_vocab_size, model.config.target_vocab_size
        tokenizer = read_tokenizer(peer, source, config["model"], sizes, notes)
        next_command = _translation(output, tokenizer)
    if peer == ANNOTATED:
        sizes = model.config.source_vocab_size, model.config.target_vocab_size
        tokenizer = _read_word_sides(source, config, sizes, notes)
        next_command = f"manyheads translate {output}" + (" --ids" if tokenizer.kind == "ids" else "")
    if tokenizer is None:
        does = "translates" if ARCHITECTURES[model.config.architecture].task == "translation" else "reads and writes"
        notes.append(f"There was no tokenizer, so the model {does} ids, not text.")
        if peer == TENSORFLOW_XL and find_beside(source, CACHE).is_file():
            notes.append(
                f"{find_beside(source, CACHE)} holds its vocabulary, and is a pickle; --from-pickle reads it by an"
                " allow-list, in a separate process."
            )
    save_pretrained(
        model.float(),
        output,
        tokenizer=tokenizer,
        generation=settings,
        card=_card(model, peer, source.name, _target_languages(tokenizer)),
        more={PEER_FILE: to_json(kept).encode("utf-8"), **more},
        replace=replace,
    )
    return Conversion(peer, _count(model), next_command, notes)


def export_folder(source: Path, output: Path, peer: str, *, replace: bool = True) -> Conversion:
    """Read one of our folders and write a peer's. replace: replace an existing output folder.

    Raises: as `write_peer`. SaveError: the folder could not be written.
    """
    done: list[Conversion] = []
    weights = source / "model.safetensors"

    def write(folder: Path) -> None:
        done.append(write_peer(source, folder, peer))
        write_notice(source, folder)

    write_folder(
        output,
        write,
        needed_bytes=weights.stat().st_size if weights.is_file() else 0,
        replace=replace,
    )
    return done[0]


def write_peer(source: Path, folder: Path, peer: str) -> Conversion:
    """Read one of our folders and write a peer's files into an empty folder.

    Raises: ModelFileError, ConfigError, DataError: the model cannot be read, or the peer does not support a part of it.
    """
    if not FORMATS[peer].is_written:
        raise ConfigError(f"models of {peer} can be read, but not written; give another PEER for --to.")
    held, config_of_model = FORMATS[peer].architecture, read_config(source)
    if config_of_model.architecture != held:
        raise ConfigError(f"{peer} cannot hold a {config_of_model.architecture}; it holds {held}.")
    PEERS[peer].check(config_of_model)
    model = load(source)
    kept = _read_object(source / PEER_FILE) if (source / PEER_FILE).is_file() else {}
    kept = kept if kept.get("peer") == peer else {}
    translates = ARCHITECTURES[held].task == "translation"
    tokenizer = load_tokenizer(source) if translates and has_tokenizer(source) else None
    notes: list[str] = []
    if not translates and has_tokenizer(source):
        notes.append(f"The vocabulary was left out; {peer} has no file for it.")
    config, weights = PEERS[peer].to_peer(PEERS[peer].form_of(model))
    files: Mapping[str, bytes] = {}
    if peer in SEQUENCE_MODELS:
        exported = PEERS[peer].export_files(
            config["model"], load_settings(source), tokenizer, kept, read_config(source)
        )
        config, files, notes = exported.config, exported.files, exported.notes
    elif FORMATS[peer].model_type:
        reformer = "ReformerModelWithLMHead" if config["model"].get("is_decoder") else "ReformerForMaskedLM"
        classes = {"transfo-xl": "TransfoXLLMHeadModel", "reformer": reformer, "gpt2": "GPT2LMHeadModel"}
        model_type = FORMATS[peer].model_type
        known = {"model_type": model_type, "architectures": [classes[model_type]]}
        before = kept.get("config", {})
        config = {**known, **before, **config["model"]}
        if before.get("hash_seed", 0) is None and config.get("hash_seed") == 0:
            config["hash_seed"] = None  # the peer's default, for which import chose the seed 0
    elif tokenizer is not None:
        writer = tokenizer.target
        config |= {"pad": writer.pad_id}
        if peer == ANNOTATED:
            config |= {"start_symbol": writer.bos_id, "end_symbol": writer.eos_id}
            files = _word_files(tokenizer)
    notes += PEERS[peer].notes_of_export(model.config)
    write_tensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(to_json(config), encoding="utf-8")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return Conversion(peer, sum(tensor.numel() for tensor in weights.values()), "", notes)


def _word_files(tokenizer: TranslationTokenizer) -> dict[str, bytes]:
    """Return the files that `_read_word_sides` reads; none of a tokenizer without words."""
    sides = [getattr(side, "words", None) for side in (tokenizer.source, tokenizer.target)]
    if not all(isinstance(words, list) for words in sides):
        return {}
    contents = ["".join(f"{word}\n" for word in words or ()).encode() for words in sides]
    return dict(zip(WORD_FILES, contents, strict=True))


def _read_config(source: Path, peer: str, saved: Saved) -> dict[str, Any]:
    """Return the options under `model`: from config.json; or from the checkpoint, of a module that was saved whole or
    with its options beside it.
    """
    if not (source / "config.json").exists():
        options = PEERS[peer].options_of_saved(saved)
        if options is not None:
            return {"model": options}
    config = _read_object(source / "config.json")
    if FORMATS[peer].model_type:
        return {"model": config}  # a config.json of transformers consists of the options
    if not isinstance(config.get("model"), dict):
        raise ConfigError(f"{source / 'config.json'} must hold the options of {peer} under 'model'.")
    return config


def _read_tensorflow(folder: Path, notes: list[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the weights of a folder of the TensorFlow original.

    config.json holds `flags` and `corpus_info`; without it, both follow from the variables and corpus-info.json.
    Raises: ModelFileError: there is no checkpoint, or no corpus-info.json.
    """
    weights = read_checkpoint(find_prefix(find_checkpoint(folder) or folder), TensorFlowXL.is_weight)
    if not verifies_data():
        notes.append(f"The checksums of the data were not compared; `{install_command('tf')}` makes that possible.")
    if (folder / "config.json").is_file():
        return _read_object(folder / "config.json"), weights
    corpus = _read_object(find_beside(folder, "corpus-info.json"))
    flags = TensorFlowXL.options_of_checkpoint(weights, corpus)
    reading = ", ".join(f"{name} {flags[name]}" for name in ("mem_len", "clamp_len", "same_length"))
    notes.append(
        "A checkpoint does not record how text is read; these are the settings of the published model of"
        f" {corpus['dataset']}: {reading}."
    )
    return {"flags": flags, "corpus_info": corpus}, weights


def _evaluation(output: Path, config: Mapping[str, Any], corpus: CorpusFiles) -> str:
    """Return the command that evaluates as the original's scripts do; memory and clamping are in the model's config."""
    text = output / TEST_TEXT if corpus.test is not None else "FILE"
    flags = config["flags"]
    lanes = flags.get("eval_batch_size") or PUBLISHED_LANES
    return f"manyheads evaluate {output} --text {text} --segment-len {flags['tgt_len']} --lanes {lanes}"


def _read_object(path: Path) -> dict[str, Any]:
    """Raises: ModelFileError: the file is missing or not one JSON object."""
    try:
        return read_object(path)
    except FileNotFoundError as error:
        raise ModelFileError(f"{path.parent} is not a model's folder: it has no {path.name}.") from error


def _read_weights(folder: Path, from_pickle: bool) -> Saved:
    """Return tensors, and the settings and options in a pickle.

    Raises: ModelFileError: there are none, they are damaged, or there is only a pickle and it was not requested.
    """
    file = folder / "model.safetensors"
    if file.is_file():
        try:
            return Saved(load_file(file), {}, {})
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file} is not an intact safetensors file: {error}.") from error
    pickles = sorted(path for path in folder.iterdir() if path.suffix in _PICKLES and path.is_file())
    if len(pickles) > 1:
        pickles = [path for path in pickles if path.name in _FIRST_PICKLES] or pickles
    if not pickles:
        shards = " (its weights in several files are not read)" if list(folder.glob("*.index.json")) else ""
        raise ModelFileError(
            f"{folder} has no model.safetensors{shards}. On the hub there may be one in a pull request (--revision"
            " refs/pr/N); download a pytorch_model.bin by hand and use --from-pickle."
        )
    if not from_pickle:
        raise ModelFileError(
            f"{folder} has no model.safetensors, only {pickles[0].name}, a pickle, which can run code when it is opened"
            " in the usual way. With --from-pickle its tensors are read by an allow-list, in a separate process."
        )
    if len(pickles) > 1:
        names = ", ".join(path.name for path in pickles)
        raise ModelFileError(f"{folder} has several pickles: {names}; keep the one that holds the model.")
    return read_saved(pickles[0])


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _target_languages(tokenizer: TranslationTokenizer | SymbolVocabulary | None) -> Sequence[str]:
    """Return the languages that have a tag. A peer's folder does not record the languages of the sources."""
    return () if tokenizer is None or isinstance(tokenizer, SymbolVocabulary) else tokenizer.target_languages


def _translation(output: Path, tokenizer: TranslationTokenizer | None) -> str:
    if tokenizer is None:
        return ""
    languages = _target_languages(tokenizer)
    return f"manyheads translate {output}" + (f" --target-lang {languages[0]}" if languages else "")


def _card(model: Seq2Seq | LanguageModel, peer: str, name: str, languages: Sequence[str]) -> str:
    """Return README.md. languages: the target languages of a model that translates into several."""
    task = ARCHITECTURES[model.config.architecture].task
    header = f"language: {yaml_list(languages)}\n" if languages else ""
    into = f"It translates into {', '.join(languages)}. " if languages else ""
    return f"""---
{header}library_name: manyheads
tags: [{task}, {model.config.architecture}]
---
# {name}, converted from {peer}

{into}{_count(model):,} parameters. Licence and origin are those of the model that was converted.

```python
{usage_example(task, into=languages[0] if languages else None)}
```
"""
