"""Interfaces of models for other packages: training needs `Trainable`, search needs `Searchable`, and nothing else.

No search, loop or plot depends on a model's class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from manyheads.catalogue import ModelTask


class Composite(Protocol):
    """A module with the body and the head of a model: it is trained, saved and loaded."""

    config: Any

    def tie_weights(self) -> None:
        """Tie the parameters that the config shares. Needed again after moving a model off the meta device."""

    def card_text(self) -> str:
        """Return a further paragraph for the README of the model's folder, or an empty text."""


class ModelConfig(Protocol):
    """Facts about an architecture for other packages; its config class, a dataclass, declares them."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def architecture(self) -> str:
        """Its name in ARCHITECTURES."""

    @property
    def task(self) -> ModelTask:
        """The kind of model."""

    @property
    def memory_degree(self) -> int:
        """Degree of the polynomial that gives the memory of a training step as a function of the input length."""

    @property
    def longest_input(self) -> int | None:
        """Maximum length of a sequence or segment, in tokens; None: there is no limit."""

    def lower_bounds(self) -> tuple[int, int]:
        """Return the minimum number of tensors of a model, and the minimum size of its largest tensor."""

    def describe(self) -> str:
        """Return the sizes in one line."""


class Seq2SeqConfig(ModelConfig, Protocol):
    """Facts about an encoder-decoder."""

    @property
    def source_vocab_size(self) -> int:
        """Number of source ids; 0: that of the data."""

    @property
    def target_vocab_size(self) -> int:
        """Number of target ids; 0: that of the data."""

    @property
    def tie_embeddings(self) -> str:
        """`all`, `decoder` or `none`: which tables the head shares."""


class LanguageModelConfig(ModelConfig, Protocol):
    """Facts about a language model."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; 0: that of the data."""

    @property
    def reads_forwards(self) -> bool:
        """Whether no token attends to a later one, so that the model can learn to generate."""

    @property
    def has_adaptive_softmax(self) -> bool:
        """Whether the head clusters the vocabulary."""

    @property
    def has_narrow_embeddings(self) -> bool:
        """Whether rare tokens have narrower embeddings, in tables of their own."""

    @property
    def draws_hashes(self) -> bool:
        """Whether its initial state contains a hash seed (`start(..., hash_seed=...)`)."""

    @property
    def hash_rounds(self) -> int | Literal["full"] | None:
        """Number of hash rounds; `full`: exact attention; None: the architecture does not hash."""

    @property
    def context_settings(self) -> dict[str, int]:
        """Settings besides the segment length that determine the context length of attention. With `memory_len`, the
        body takes `memory_len` in training: the number of positions in memory to attend to.
        """

    @property
    def reads_segments_apart(self) -> bool:
        """Whether nothing of earlier segments reaches a segment, so that their number may change during training."""

    @property
    def positions_from_start(self) -> bool:
        """Whether positions are counted from the start of a segment. The body then takes `first_positions` in training:
        (lanes,), the position of the first token of each lane.
        """

    @property
    def segment_multiple(self) -> int:
        """The number of tokens of which training segments should be a multiple; 1: any number is as good."""


class Output(NamedTuple):
    """Sums over a batch, so that micro-batches and ranks can be added before the division.

    loss_sum: the training loss summed over tokens (label smoothing included); has the gradient.
    nll_sum: the plain negative log-likelihood in nats, summed over the same tokens; no gradient.
    num_tokens: number of summed tokens, a tensor.
    state: the state for the next call of a recurrent model; None for others.
    """

    loss_sum: Tensor
    nll_sum: Tensor
    num_tokens: Tensor
    state: Any = None


class SearchState(Protocol):
    """The state of a model between two steps of a search: a value, passed in and returned."""

    def reorder(self, rows: Tensor) -> Self:
        """Return the state for the rows that a step of the search selected.

        Args:
            rows: (sentences, beams) ids of the old rows that the new rows continue. Row r of the old state belonged to
                sentence r // old_beams. All entries of one line come from one sentence. Sentences keep their order, and
                a missing sentence has ended. The number of beams may change, so one row can be repeated for many beams.
        Returns: a state of sentences x beams rows, in the order of `rows.flatten()`.
        """


@runtime_checkable
class Searchable(Protocol):
    """A model for search, such as `Seq2Seq`; language models have similar methods."""

    @property
    def max_len(self) -> int | None:
        """Maximum length of a source, and of a target from BOS to the last token before EOS; None: no limit."""

    def start(self, source: Tensor, source_lengths: Tensor) -> SearchState:
        """Encode the sources. source (batch, source_len) ids padded on the right, lengths (batch,) with EOS."""

    def step(self, tokens: Tensor, state: Any, *, logits: bool = False) -> tuple[Tensor, Any]:
        """Append `tokens` (rows, new_len) to every row; the very first token is BOS.

        Returns: log-probabilities of the token after the last one, (rows, vocab_size) in float32, and the new state.
            With `logits` the values before the softmax.
            The given state is consumed: clone it first to branch. The caller may modify the log-probabilities.
        """


class PreparedStep(Protocol):
    """A step whose decisions are all made; the rest can be compiled."""

    @property
    def can_compile(self) -> bool:
        """Whether it is a step of one token, not the first one, and attention is not recorded: such steps differ only
        in sizes and numbers.
        """

    @property
    def kind(self) -> tuple[object, ...]:
        """Steps of one kind share one compiled program."""

    def for_compiler(self) -> Self:
        """Return the same step with optional tensors filled in, so that fewer programs serve all steps."""


@runtime_checkable
class PreparesSteps(Protocol):
    """A searchable model whose step is `compute_step(prepare_step(tokens, state))`."""

    @property
    def prepares_steps(self) -> bool:
        """Whether this model has such steps."""

    def prepare_step(self, tokens: Tensor, state: Any) -> tuple[Any, Any]:
        """Make all decisions of a step that depend on values: allocate space, and choose where each value is written.

        Returns: a `PreparedStep`, and the next state. The given state is consumed.
        """

    def compute_step(self, step: Any, logits: bool = False) -> Tensor:
        """Compute the rest of the step and return log-probabilities or logits, (rows, vocab_size) in float32."""


@runtime_checkable
class Restrictable(Protocol):
    """A searchable model that can compute the probabilities of a part of its vocabulary."""

    def restricted(self, ids: Tensor) -> Searchable:
        """Return a model whose target id i is `ids[i]`; probabilities are normalised over these ids. ids: (count,)"""


@runtime_checkable
class Scorable(Protocol):
    """A model that computes the probability of a given target."""

    def log_probs(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Return log-probabilities of the token after each target position, with teacher forcing.

        Shape: target (batch, target_len) begins with BOS; the result is (batch, target_len, vocab_size).
        """


class LanguageBody(Protocol):
    """A language model without its head: the interface that `LanguageModel` needs. A module."""

    @property
    def max_len(self) -> int | None:
        """Maximum sequence length; None: there is no limit."""

    def __call__(self, tokens: Tensor, lengths: Tensor | None = None, state: Any = None) -> tuple[Tensor, Any]:
        """Return hidden states from which the head predicts the token after each, and the next state, without gradient.

        Args: tokens: (lanes, len) ids; lengths: (lanes,) number of real tokens, padding on the right, None: all; state:
            from `start`, which is consumed, None: empty.
        """

    def start(self, lanes: int, attending: Any = None, *, projected: bool = True) -> Any:
        """Return the empty state, with `reset`, `reorder` and `clone`.

        Args: attending: context settings, None: as in training; projected: a state that makes generation fast, for
            evaluation only; False: a state for training.
        """

    def tie_weights(self) -> None:
        """Tie the parameters that the body shares within itself."""

    def tie_head(self, head: Any) -> None:
        """Tie the parameters that body and head share by the config."""
