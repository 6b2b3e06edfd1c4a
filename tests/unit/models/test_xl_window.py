"""Models of segments alone: what they generate is what reading the last tokens anew says."""

import pytest
import torch
from torch.utils import _pytree as pytree

from manyheads.catalogue import build_model
from manyheads.models.composites import LanguageModel
from manyheads.models.transformer_xl.config import Attending, TransformerXLConfig
from manyheads.models.transformer_xl.state import LayerInputs

VIEW = 6


@pytest.fixture(params=["absolute", "absolute_learned"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    torch.manual_seed(0)
    config = TransformerXLConfig(
        vocab_size=31, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=0, attention=request.param
    )
    return build_model(config).eval()


def anew(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """What one reading of the last VIEW tokens says of the next."""
    return model.log_probs(tokens[:, -VIEW:])[:, -1]


@torch.no_grad()
def test_each_step_reads_the_window_anew(model: LanguageModel) -> None:
    tokens = torch.randint(0, 31, (3, 17))
    state = model.start(3, Attending(memory_len=VIEW))
    assert state.memory.are_tokens
    for end in range(1, 18):
        found, state = model.step(tokens[:, end - 1 : end], state)
        assert state.columns <= VIEW - 1
        torch.testing.assert_close(found, anew(model, tokens[:, :end]), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_steps_clamp_distances_as_reading_does(model: LanguageModel) -> None:
    tokens = torch.randint(0, 31, (2, VIEW))
    clamped = Attending(clamp_len=2)
    read = model.read(tokens, None, model.start(2, clamped, projected=False))[0][:, -1]
    found, state = read, model.start(2, Attending(memory_len=VIEW, clamp_len=2))
    for token in tokens.split(1, dim=1):
        found, state = model.step(token, state)
    torch.testing.assert_close(found, read, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_prompts_of_different_lengths_are_as_alone(model: LanguageModel) -> None:
    tokens, lengths = torch.randint(0, 31, (4, 15)), torch.tensor([15, 1, 7, 4])
    found, state = model.step(tokens, model.start(4, Attending(memory_len=VIEW)), lengths)
    more = torch.randint(0, 31, (4, 1))
    after, _ = model.step(more, state)
    for row, length in enumerate(lengths.tolist()):
        alone, mine = model.step(tokens[row : row + 1, :length], model.start(1, Attending(memory_len=VIEW)))
        torch.testing.assert_close(found[row : row + 1], alone, atol=1e-5, rtol=1e-5)
        whole = torch.cat([tokens[row : row + 1, :length], more[row : row + 1]], dim=1)
        torch.testing.assert_close(after[row : row + 1], anew(model, whole), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model.step(more[row : row + 1], mine)[0], after[row : row + 1], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_no_pass_is_longer_than_the_window(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    inner = model.body.hidden_states

    def watched(tokens: torch.Tensor, *rest: object) -> list[torch.Tensor]:
        lengths.append(tokens.shape[1])
        return inner(tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model.body, "hidden_states", watched)
    state = model.start(2, Attending(memory_len=VIEW))
    for new_len in (20, 1, 3, 1):
        _, state = model.step(torch.randint(0, 31, (2, new_len)), state)
    assert max(lengths) == VIEW


@torch.no_grad()
def test_a_window_is_a_state_like_others(model: LanguageModel) -> None:
    tokens = torch.randint(0, 31, (2, 5))
    _, state = model.step(tokens, model.start(2, Attending(memory_len=VIEW)))
    swapped = state.reorder(torch.tensor([1, 0, 1]))
    next_token = torch.tensor([[3], [3], [3]])
    found, _ = model.step(next_token, swapped)
    wanted, _ = model.step(next_token[:2], state.clone())
    torch.testing.assert_close(found, wanted[[1, 0, 1]])
    leaves, structure = pytree.tree_flatten(state)
    again = pytree.tree_unflatten(leaves, structure)
    assert torch.equal(again.memory.layers[0], state.memory.layers[0])
    assert again.attending == state.attending
    forgotten, _ = model.step(next_token[:2], state.reset(torch.tensor([True, False])))
    torch.testing.assert_close(forgotten[:1], anew(model, next_token[:1]))
    torch.testing.assert_close(forgotten[1:], wanted[1:])


def test_segments_without_memory_stay_segments(model: LanguageModel) -> None:
    """Evaluation by segments, and training, keep no window."""
    for state in (model.start(2), model.start(2, Attending(memory_len=VIEW), projected=False)):
        assert isinstance(state.memory, LayerInputs)
        assert not state.memory.are_tokens
