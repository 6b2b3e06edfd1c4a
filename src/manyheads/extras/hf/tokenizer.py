"""The tokenizers of this package as a tokenizer of transformers: AutoTokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer

from manyheads.decoding.inputs_and_results import encode_texts, with_end
from manyheads.errors import DataError, ModelFileError, RequestError
from manyheads.files.verify import read_object
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import CONFIG, read_config
from manyheads.text.of_folder import PieceVocabulary, tokenizer_of_folder
from manyheads.text.sides import Side, TranslationTokenizer, refuse_untagged
from manyheads.text.vocabulary import Vocabulary

FOLDER = "manyheads"
"""The folder of our files within a folder that `save_pretrained` of transformers wrote: a reader there that does not
know this class finds none of its own names, and would read them in another way.
"""
_OPTIONS = "tokenizer_config.json"
_PADDING = "<pad>"


def padding_id(vocabulary: Vocabulary) -> int:
    """Return the id of padding: of subwords their own, otherwise one more than there are."""
    return vocabulary.tokenizer.pad_id if isinstance(vocabulary, PieceVocabulary) else vocabulary.vocab_size


def folder_of(path: Any, revision: str | None) -> Path:
    """Return the folder of a model. A revision counts for models on the hub only, as in transformers."""
    return resolve_model_path(path, revision=None if Path(path).exists() else revision)


class ManyHeadsTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """A vocabulary of a language model, or the two sides of a translator's tokenizer.

    Ids of a text: of a language model the start of a text and its ids; of a translator its ids and EOS, in `text` those
    of a source, in `text_target` those of a target. Nothing in a text is read as a special token. `decode` gives the
    text of a target, with `use_source_tokenizer` that of a source.

    Args:
        tokenizer: of this package.
        options: of every tokenizer of transformers: `padding_side`, `model_max_length` ...
    """

    vocab_files_names: ClassVar[dict[str, str]] = {}
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]

    def __init__(self, tokenizer: TranslationTokenizer | Vocabulary, **options: Any) -> None:
        self.tokenizer = tokenizer
        self._reads_target = False
        options = {name: value for name, value in options.items() if not name.endswith("_token")}
        self._names: dict[bool, list[str]] = {}
        self._ids: dict[bool, dict[str, int]] = {}
        if isinstance(tokenizer, Vocabulary):
            special = {"bos": tokenizer.start_id, "eos": tokenizer.end_id, "unk": tokenizer.unk_id}
            special["pad"] = padding_id(tokenizer)
            options.setdefault("padding_side", "left")
        else:
            side = tokenizer.target
            special = {"bos": side.bos_id, "eos": side.eos_id, "pad": side.pad_id}
            special["unk"] = getattr(side, "unk_id", None)
        names = {f"{name}_token": self._name(index) for name, index in special.items() if index is not None}
        options["split_special_tokens"] = True
        options["clean_up_tokenization_spaces"] = False
        super().__init__(**names, **options)

    # Files

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *_: Any, **options: Any) -> Any:
        """Load a folder of `save_pretrained`, or a model folder of this package, local or on the hub.

        Raises: ModelFileError: there is no tokenizer. DataError: it is damaged.
        """
        folder = folder_of(pretrained_model_name_or_path, options.get("revision"))
        own = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        tokenizer = tokenizer_of_folder(own)
        if tokenizer is None:
            raise ModelFileError(f"{pretrained_model_name_or_path} has no tokenizer of manyheads.")
        known: dict[str, Any] = {}
        if (folder / _OPTIONS).is_file():
            known = read_object(folder / _OPTIONS)
        elif own == folder and (folder / CONFIG).is_file():
            known = {"model_max_length": read_config(folder).longest_input}
        kept = ("model_max_length", "padding_side", "truncation_side", "chat_template", "model_input_names")
        given = {name: value for name, value in {**known, **options}.items() if name in kept and value is not None}
        return cls(tokenizer, **given, name_or_path=str(pretrained_model_name_or_path))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the tokenizer's files into a folder of their own. Returns: their paths."""
        folder = Path(save_directory) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, content in self.tokenizer.files().items():
            (folder / name).write_bytes(content)
            paths.append(str(folder / name))
        return tuple(paths)

    # Sides

    def _switch_to_input_mode(self) -> None:
        self._reads_target = False

    def _switch_to_target_mode(self) -> None:
        if isinstance(self.tokenizer, Vocabulary):
            raise RequestError("text_target is for translators; a language model has one vocabulary: give text.")
        self._reads_target = True

    def _side(self, is_target: bool | None = None) -> Side | Vocabulary:
        if isinstance(self.tokenizer, Vocabulary):
            return self.tokenizer
        is_target = self._reads_target if is_target is None else is_target
        return self.tokenizer.target if is_target else self.tokenizer.source

    # Ids

    @property
    def vocab_size(self) -> int:
        """Number of ids; of a translator, of sources."""
        return self._side().vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Return readable token -> id."""
        self._load_names()
        return dict(self._ids[self._reads_target])

    def _load_names(self) -> list[str]:
        """Return the readable tokens by id; equal ones have their ids behind them."""
        which = self._reads_target
        if which not in self._names:
            side = self._side()
            names = side.tokens(range(side.vocab_size))
            found: dict[str, int] = {}
            for index, name in enumerate(names):
                names[index] = name = name if name not in found else f"{name}#{index}"
                found[name] = index
            if isinstance(side, Vocabulary) and padding_id(side) == len(names):
                name = _PADDING if _PADDING not in found else f"{_PADDING}#{len(names)}"
                found[name] = len(names)
                names.append(name)
            self._names[which], self._ids[which] = names, found
        return self._names[which]

    def _name(self, index: int) -> str:
        return self._load_names()[index]

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        self._load_names()
        for token in new_tokens:
            if str(token) not in self._ids[self._reads_target]:
                raise RequestError(f"the token {str(token)!r} is not in the vocabulary, which cannot be extended.")
        return 0

    def _convert_token_to_id(self, token: str) -> int:
        self._load_names()
        index = self._ids[self._reads_target].get(token)
        if index is None:
            raise DataError(f"the token {token!r} is not in the vocabulary.")
        return index

    def _convert_id_to_token(self, index: int) -> str:
        names = self._load_names()
        if not 0 <= index < len(names):
            raise DataError(f"id {index} is outside the vocabulary; ids are 0 to {len(names) - 1}.")
        return names[index]

    # Text to ids

    def tokenize(self, text: str, **_: Any) -> list[str]:
        """Return the readable tokens of a text, without special ones."""
        return [self._name(index) for index in self._encoded(text)]

    def _encoded(self, text: str) -> list[int]:
        if isinstance(self.tokenizer, Vocabulary):
            return self.tokenizer.encode(text)
        if not self._reads_target and self.tokenizer.needs_language and self.tokenizer.target_languages:
            refuse_untagged([text], self.tokenizer.target_languages)
        return encode_texts([text], self.tokenizer.target if self._reads_target else self.tokenizer.source)[0]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Return the ids of a text with those around them that the model expects. Raises: RequestError: a pair."""
        if token_ids_1 is not None:
            raise RequestError("a pair of texts is not supported; a translator's target is text_target.")
        side = self._side()
        if isinstance(side, Vocabulary):
            return [side.start_id, *token_ids_0]
        return [*token_ids_0, side.eos_id] if self._reads_target else with_end(token_ids_0, side)

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """Return 1 for each id that was added around the text, otherwise 0."""
        if already_has_special_tokens:
            special = {*self.all_special_ids}
            return [int(index in special) for index in token_ids_0]
        if isinstance(self.tokenizer, Vocabulary):
            return [1, *[0] * len(token_ids_0)]
        return [0] * len(token_ids_0) + [1] * (len(self.build_inputs_with_special_tokens([])))

    def create_token_type_ids_from_sequences(self, token_ids_0: list[int], token_ids_1: Any = None) -> list[int]:
        """Return zeros."""
        return [0] * len(self.build_inputs_with_special_tokens(token_ids_0, token_ids_1))

    # Ids to text

    def _decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(index) for index in token_ids]
        if isinstance(self.tokenizer, Vocabulary):
            return self._decode_text(ids, self.tokenizer, skip_special_tokens)
        side = self._side(is_target=not options.get("use_source_tokenizer", False))
        assert not isinstance(side, Vocabulary)
        if skip_special_tokens:
            return side.decode(ids)
        special = {side.pad_id, side.bos_id, side.eos_id}
        parts: list[str] = []
        run: list[int] = []
        for index in [*ids, side.eos_id]:
            if index in special:
                parts += [side.decode(run)] if run else []
                parts += side.tokens([index])
                run = []
            else:
                run.append(index)
        return " ".join(parts[:-1])

    def _decode_text(self, ids: list[int], vocabulary: Vocabulary, skip_special_tokens: bool) -> str:
        """Return the text. Of special tokens, the start of the text, its end and padding can be left out."""
        padding = padding_id(vocabulary)
        ids = [index for index in ids if index != padding]
        if skip_special_tokens:
            ids = ids[1:] if ids[:1] == [vocabulary.start_id] else ids
            while ids and ids[-1] == vocabulary.end_id:
                ids = ids[:-1]
        return vocabulary.decode(ids)
