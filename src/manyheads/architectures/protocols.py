"""What other rooms may rely on in a model: training needs `Trainable`, search needs `Searchable`, and nothing else.

No search, loop or picture ever asks for a model's class.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor, nn

__all__ = ["LanguageBody", "Output", "Placing", "Scorable", "SearchState", "Searchable"]


class Output(NamedTuple):
    """Sums over a batch, so that micro-batches and ranks can be added before anything is divided.

    loss_sum: the training loss summed over tokens (label smoothing included); carries the gradient.
    nll_sum: the plain negative log-likelihood in nats, summed over the same tokens; no gradient.
    num_tokens: how many tokens were summed, a tensor.
    state: what the next call of a recurrent model needs; None for others.
    """

    loss_sum: Tensor
    nll_sum: Tensor
    num_tokens: Tensor
    state: Any = None


class SearchState(Protocol):
    """What a model remembers between two steps of a search: a value, passed in and returned."""

    def reorder(self, rows: Tensor) -> Self:
        """The state after a step of the search chose which rows live on.

        Args:
            rows: (sentences, beams) ids of the old rows that the new rows continue. Row r of the old state belonged to
                sentence r // old_beams. All entries of one line come from one sentence; sentences keep their order,
                and one that is left out has ended; the number of beams may change (so this also spreads one row over
                many beams).
        Returns: a state of sentences x beams rows, in the order of `rows.flatten()`.
        """
        ...


@runtime_checkable
class Searchable(Protocol):
    """A model that can be searched: `Seq2Seq` today, language models alike."""

    @property
    def max_len(self) -> int | None:
        """Longest source, and longest target from BOS to the last token before EOS; None if there is no limit."""
        ...

    def start(self, source: Tensor, source_lengths: Tensor) -> SearchState:
        """Read the sources. source (batch, source_len) ids padded on the right, lengths (batch,) with EOS."""
        ...

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Append `tokens` (rows, new_len) to every row; the first token ever is BOS.

        Returns: log-probabilities of the token that follows the last one given, (rows, vocab_size) in float32, and the
            new state. The state given is used up: clone it first to branch. The caller may write into the
            log-probabilities.
        """
        ...


@runtime_checkable
class Placing(Protocol):
    """A searchable model whose steps of one token come in two parts, the second of which a compiler can read whole."""

    @property
    def can_place(self) -> bool:
        """Whether this model's steps do."""
        ...

    def place_step(self, tokens: Tensor, state: Any) -> tuple[Any, Any] | None:
        """All of `step` that looks at numbers: makes room, and says what goes where.

        Returns: what `take_step` takes, and the state after it; None where only `step` serves. The state given is used
            up, but for the last case. What is taken has a `kind`: steps of one kind differ in sizes and numbers alone.
        """
        ...

    def take_step(self, placed: Any) -> Tensor:
        """The rest of `step`: log-probabilities, (rows, vocab_size) in float32."""
        ...


@runtime_checkable
class Scorable(Protocol):
    """A model that gives the probability of a known target."""

    def log_probs(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Log-probabilities of the token after each target position, under teacher forcing.

        Shape: target (batch, target_len) begins with BOS; the result is (batch, target_len, vocab_size).
        """
        ...


class LanguageBody(Protocol):
    """A language model without its head: what `LanguageModel` needs of an architecture. A module."""

    @property
    def max_len(self) -> int | None:
        """Longest sequence; None: there is no limit."""
        ...

    def __call__(self, tokens: Tensor, lengths: Tensor | None = None, state: Any = None) -> tuple[Tensor, Any]:
        """Hidden states from which the head predicts the token after each, and the state for what comes next.

        Args: tokens: (lanes, len) ids; lengths: (lanes,) real ones, padding on the right, None: all; state: of `start`,
            which is used up, None: of a beginning.
        """
        ...

    def start(self, lanes: int, attending: Any = None, *, projected: bool = True) -> Any:
        """The state before anything was read, with `reset`, `reorder` and `clone`.

        Args: attending: how to look back, None: as in training; projected: whatever makes generation cheap, for
            evaluation alone; False: what training takes.
        """
        ...

    def tie_weights(self) -> None:
        """Make one parameter of what the body shares within itself."""
        ...

    def tie_head(self, head: nn.Module) -> None:
        """Make one parameter of what the config lets body and head share."""
        ...
