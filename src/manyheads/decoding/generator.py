"""Text generation with a language model: model, vocabulary and options in one object.

Several models of one vocabulary are loaded as an ensemble.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, Unpack, cast, overload

import torch

from manyheads.catalogue import shown_as
from manyheads.decoding.generation import Continuation, Generation, PrefixCache, TextSteps, token_limit
from manyheads.decoding.inputs_and_results import check_texts, cut_batches, map_batches
from manyheads.decoding.model_runner import (
    ModelRunner,
    Precision,
    RunsModel,
    choose_device,
    choose_precision,
    model_folder,
)
from manyheads.decoding.settings import (
    GenerationOverrides,
    GenerationSettings,
    overridden,
    pattern_grammar,
    read_settings,
)
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.models.composites import LanguageModel
from manyheads.models.pretrained import load, save_pretrained, unmixed
from manyheads.text.of_folder import load_vocabulary

if TYPE_CHECKING:
    from manyheads.decoding.inputs_and_results import Stop
    from manyheads.models.ensemble import LanguageEnsemble
    from manyheads.text.vocabulary import Vocabulary


def load_language_models(
    path: str | Path | Sequence[str | Path], device: torch.device, revision: str | None = None
) -> tuple[LanguageModel | LanguageEnsemble, Vocabulary, GenerationSettings]:
    """Load one model, or several as an ensemble. All vocabularies are compared before any weights are read.

    Args: path, revision: see `Generator.from_pretrained`.

    Returns: the model, its vocabulary, and its settings, or those of the first model.
    Raises: ModelFileError: a file is damaged, or a model and its vocabulary do not fit. ConfigError: there is no path,
        or the vocabularies differ. DataError: a vocabulary is damaged.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    if not paths:
        raise ConfigError("an ensemble needs at least one model, but the list of paths is empty.")
    folders = [model_folder(one, "language-modelling", revision) for one in paths]
    vocabulary = load_vocabulary(folders[0])
    for other in folders[1:]:
        _check_alike(folders[0], vocabulary, other, load_vocabulary(other))
    models = [_load_model(folder, vocabulary, device) for folder in folders]
    settings = read_settings(folders[0], GenerationSettings)
    if len(models) == 1:
        return models[0], vocabulary, settings
    from manyheads.models.ensemble import LanguageEnsemble

    return LanguageEnsemble(models), vocabulary, settings


def _load_model(folder: Path, vocabulary: Vocabulary, device: torch.device) -> LanguageModel:
    model = cast(LanguageModel, load(folder, device=device))  # `model_folder` has checked what the folder is for
    if vocabulary.vocab_size > model.config.vocab_size:
        raise ModelFileError(
            f"{folder}: the model knows {model.config.vocab_size:,} ids, its vocabulary has"
            f" {vocabulary.vocab_size:,}; they do not fit."
        )
    return model


def _check_alike(first: Path, vocabulary: Vocabulary, other: Path, others: Vocabulary) -> None:
    """Raises: ConfigError: two models of an ensemble have unlike vocabularies."""
    if others.digest == vocabulary.digest:
        return
    its, mine = _difference(others, vocabulary)
    raise ConfigError(
        f"the vocabulary of {other} has {its}, but that of {first} has {mine}, so their probabilities cannot be"
        " averaged; train the models of an ensemble on data with the same vocabulary."
    )


def _difference(one: Vocabulary, other: Vocabulary) -> tuple[str, str]:
    """Return the first property in which two vocabularies differ, of each of them."""
    if one.kind != other.kind:
        return f"level {one.kind}", f"level {other.kind}"
    if one.documents != other.documents:
        return f"documents {one.documents}", f"documents {other.documents}"
    if one.vocab_size != other.vocab_size:
        return f"{one.vocab_size:,} ids", f"{other.vocab_size:,}"
    for index in range(one.vocab_size):
        [its], [mine] = one.tokens([index]), other.tokens([index])
        if its != mine:
            return f"{its!r} as id {index}", repr(mine)
    return f"other settings ({one.digest[:12]})", f"the settings {other.digest[:12]}"


class Generator(RunsModel["LanguageModel | LanguageEnsemble"]):
    """A language model, or an ensemble of several, that continues text.

        generator = Generator.from_pretrained("runs/xl-demo")
        generator("It was ", temperature=0.7)  # a text for a text, a list for a list; the same as `generate`

    Args:
        model: a composite, or a `LanguageEnsemble`; it is put into evaluation mode.
        vocabulary: the model's vocabulary.
        settings: default options of all calls; default `GenerationSettings()`.
        device: the device of the model; `auto` chooses one.
        precision: `fp32`; `bf16` by autocast; `auto`: the faster one of these on the device; `tf32` (NVIDIA GPUs).
        compile_steps: compile a step with torch's compiler (see `decoding.model_runner`): slow at first, then faster.
            The model's weights must not change.
        plain: compute with torch's own operations alone, for example to compare; see `kernels.fast`.

    Raises: RequestError: no such device or precision, or this model's steps cannot be compiled on this machine.
    """

    task: Literal["language-modelling"] = "language-modelling"
    _repr_mimebundle_ = shown_as("model")

    def __init__(
        self,
        model: LanguageModel | LanguageEnsemble,
        vocabulary: Vocabulary,
        settings: GenerationSettings | None = None,
        device: str | torch.device = "auto",
        precision: Precision = "fp32",
        *,
        compile_steps: bool = False,
        plain: bool = False,
    ) -> None:
        self.runner = ModelRunner(model, device, precision, compile_steps=compile_steps, plain=plain)
        self.vocabulary = vocabulary
        self.settings = GenerationSettings() if settings is None else settings

    def __repr__(self) -> str:
        ids = f"{self.vocabulary.kind}, {self.vocabulary.vocab_size:,} ids"
        return f"Generator({self.model.config.architecture}, {ids}, {self.device}, {self.precision})"

    @property
    def single_model(self) -> LanguageModel:
        """The model. Raises: RequestError: it is an ensemble."""
        from manyheads.models.ensemble import averaged_models

        model, *others = averaged_models(self.model)
        if others:
            raise RequestError(f"this needs one model, but {1 + len(others)} are averaged; load one of them.")
        return cast(LanguageModel, model)

    @classmethod
    @unmixed
    def from_pretrained(
        cls,
        path: str | Path | Sequence[str | Path],
        device: str | torch.device = "auto",
        precision: Precision = "fp32",
        *,
        compile_steps: bool = False,
        plain: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Load a generator from a model folder, a run folder, or `owner/name` on the Hugging Face hub.

        Several paths are an ensemble, which averages the models' probabilities of each token (see
        `models.ensemble`). Their vocabularies must be equal. Settings are those of the first one.

        `revision` is a branch, tag or commit of a model on the hub.
        With `bf16` its linear layers are cast permanently (see `device.narrow`): the model cannot be trained or saved.
        On a CPU a second copy of their weights may be kept in a faster layout (see `device.pack`).

        Raises: ModelFileError: a file is missing, damaged or refused, or the model is not a language model.
            ConfigError, DataError: the content of a file is invalid, or the models cannot be averaged.
            RequestError: see the class.
        """
        chosen = choose_device(device)
        choose_precision(precision, chosen)  # its errors come before weights are read
        model, vocabulary, settings = load_language_models(path, chosen, revision)
        made = cls(model, vocabulary, settings, chosen, precision, compile_steps=compile_steps, plain=plain)
        made.runner.prepare_weights()
        return made

    def save_pretrained(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write weights, vocabulary and settings for `from_pretrained`; an existing folder is replaced, at once.

        Args: dtype: round the weights to this type, such as torch.bfloat16, which halves the file; None: as they are.

        Raises: RequestError: it is an ensemble, or dtype is no floating type. SaveError: it could not be
            written, or its weights were rounded by `precision` bf16.
        """
        save_pretrained(self.single_model, path, tokenizer=self.vocabulary, generation=self.settings, dtype=dtype)

    def options(self, **overrides: Unpack[GenerationOverrides]) -> GenerationSettings:
        """Return the settings of a call.

        Raises: ConfigError: an option is unknown, of the wrong type, out of range or without effect. RequestError: an
            id is not in the vocabulary.
        """
        settings = self.settings
        if overrides:
            settings = overridden(settings, overrides, "the options")
        for token in settings.banned_ids:
            if not 0 <= token < self.vocabulary.vocab_size:
                raise RequestError(
                    f"banned_ids holds {token}; ids of this vocabulary are 0 to {self.vocabulary.vocab_size - 1}."
                )
        pattern_grammar(settings, self.vocabulary, check=True)
        return settings

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self, prompts: str, *, stop_asked: Stop | None = None, **overrides: Unpack[GenerationOverrides]
    ) -> str: ...
    @overload
    def generate(
        self, prompts: Sequence[str], *, stop_asked: Stop | None = None, **overrides: Unpack[GenerationOverrides]
    ) -> list[str]: ...
    def generate(
        self, prompts: str | Sequence[str], *, stop_asked: Stop | None = None, **overrides: Unpack[GenerationOverrides]
    ) -> str | list[str]:
        """Return a continuation of each prompt, in order; a string for a string. An empty prompt begins a text.

        Args:
            prompts: one text or several, of any lengths.
            stop_asked: called before each step; if it returns true, SearchStopped is raised.
            overrides: any field of `GenerationSettings`, for this call.

        Raises: ConfigError, RequestError: a bad option or prompt. DataError: a prompt is not valid Unicode.
        """
        if isinstance(prompts, str):
            return self.generate([prompts], stop_asked=stop_asked, **overrides)[0]
        return [found[0].text for found in self.continuations(prompts, stop_asked=stop_asked, **overrides)]

    __call__ = generate

    @overload
    def continuations(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self, prompts: str, *, stop_asked: Stop | None = None, first: int = 0, **overrides: Unpack[GenerationOverrides]
    ) -> list[Continuation]: ...
    @overload
    def continuations(
        self,
        prompts: Sequence[str],
        *,
        stop_asked: Stop | None = None,
        first: int = 0,
        **overrides: Unpack[GenerationOverrides],
    ) -> list[list[Continuation]]: ...
    def continuations(
        self,
        prompts: str | Sequence[str],
        *,
        stop_asked: Stop | None = None,
        first: int = 0,
        **overrides: Unpack[GenerationOverrides],
    ) -> list[Continuation] | list[list[Continuation]]:
        """Return `num_return_sequences` continuations of each prompt, with tokens and log-probabilities; one list for a
        string.

        The samples of a prompt depend on its number, the seed and the options, not on its batch (up to rounding).

        Args: first: number of the first prompt; with it, several calls draw the same samples as one call. Others as for
            `generate`.
        """
        if isinstance(prompts, str):
            return self.continuations([prompts], stop_asked=stop_asked, first=first, **overrides)[0]
        settings = self.options(**overrides)
        return self._continue(self.encode_prompts(prompts), settings, first, stop_asked)

    def continue_ids(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        stop_asked: Stop | None = None,
        first: int = 0,
        **overrides: Unpack[GenerationOverrides],
    ) -> list[list[Continuation]]:
        """Do the same as `continuations` for prompts given as ids, for models of data that is not text.

        Raises: as `continuations`, and RequestError: an id is outside the vocabulary.
        """
        settings = self.options(**overrides)
        return self._continue(self.begin_ids(prompts), settings, first, stop_asked)

    def _continue(
        self, encoded: list[list[int]], settings: GenerationSettings, first: int, stop_asked: Stop | None
    ) -> list[list[Continuation]]:
        paths = settings.num_return_sequences

        def write(batch: list[int]) -> list[list[Continuation]]:
            written: dict[tuple[int, int], Continuation] = {}
            prompts, numbers = [encoded[place] for place in batch], [first + place for place in batch]
            for new in self.steps(prompts, settings, numbers=numbers, stop_asked=stop_asked):
                written |= {(token.prompt, token.path): token.ended for token in new if token.ended is not None}
            return [[written[prompt, path] for path in range(paths)] for prompt in range(len(batch))]

        batches = cut_batches([len(ids) for ids in encoded], rows_each=paths, max_rows=settings.max_rows)
        return map_batches(write, batches, None)

    def stream(
        self, prompt: str, *, stop_asked: Stop | None = None, number: int = 0, **overrides: Unpack[GenerationOverrides]
    ) -> Iterator[str]:
        """Yield the continuation of one prompt during generation, in complete characters, at a constant cost per token.

        Args: number: number of the prompt, for sampling; others as for `generate`.
        """
        overrides["num_return_sequences"] = 1
        settings = self.options(**overrides)
        [ids] = self.encode_prompts([prompt])
        for new in self.steps([ids], settings, numbers=[number], stop_asked=stop_asked):
            if shown := "".join(token.text for token in new):
                yield shown

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each prompt after the token that is read before a text, as in scoring.

        Raises: RequestError: a prompt is not a string. DataError: a prompt is not valid Unicode.
        """
        if isinstance(prompts, str):
            raise RequestError("give a list of prompts, not one string.")
        check_texts(prompts, "prompt")
        return [[self.vocabulary.start_id, *ids] for ids in self.vocabulary.encode_batch(list(prompts))]

    def begin_ids(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return prompts given as ids as `encode_prompts` does.

        Raises: RequestError: an id is outside the vocabulary.
        """
        for place, prompt in enumerate(prompts):
            wrong = next((index for index in prompt if not 0 <= index < self.vocabulary.vocab_size), None)
            if wrong is not None:
                raise RequestError(
                    f"prompt {place + 1} holds the id {wrong}; ids are 0 to {self.vocabulary.vocab_size - 1}."
                )
        return [[self.vocabulary.start_id, *prompt] for prompt in prompts]

    def most_new_tokens(self, prompt_len: int, settings: GenerationSettings) -> int:
        """Return how many tokens can follow a prompt of this length; less than 1 if the prompt is too long."""
        return token_limit(self.model, self.vocabulary, prompt_len, settings)[0]

    def steps(
        self,
        prompts: Sequence[list[int]],
        settings: GenerationSettings,
        *,
        numbers: Sequence[int] | None = None,
        each: Sequence[GenerationSettings] | None = None,
        num_top: int = 0,
        cache: PrefixCache | None = None,
        stop_asked: Stop | None = None,
    ) -> TextSteps:
        """Return the generation of one batch of `num_return_sequences` continuations for each prompt; see `TextSteps`.

        Args:
            prompts: ids, as of `encode_prompts`; at least one.
            numbers: of the prompts, for sampling; default 0, 1, 2 ...
            each: settings of each prompt, of which only max_new_tokens, stop and seed are read; default `settings`.
            num_top: number of alternatives of each token.
            cache: of parts of READ_AT_ONCE tokens; only a single prompt is looked up and stored.
            stop_asked: see `generate`.

        Raises: RequestError: a prompt is too long.
        """
        generation = Generation(
            self.runner,
            self.vocabulary,
            prompts,
            settings,
            numbers=numbers,
            each=each,
            num_top=num_top,
            cache=cache,
            stop_asked=stop_asked,
        )
        return generation.steps()
