"""Every fixture of the folder against our module with the peer's weights: all outputs, all gradients."""

import os
from typing import Any

import pytest
import torch

from manyheads.extras.peers import PEERS


def matching(meta: dict[str, Any]) -> list[str]:
    return [peer for peer, loader in PEERS.items() if loader.matches(meta)]


def expected(tensors: dict[str, torch.Tensor], answer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What must come out. Where a fixture has two right answers, the wrapper chooses one for all of them."""
    wanted = {name: t for name, t in tensors.items() if name.startswith(("out.", "grad."))}
    if any(name.startswith("exact.") for name in answer):
        for name in [name for name in tensors if name.startswith("exact.")]:
            plain = name.removeprefix("exact.")
            wanted.pop(plain if plain.startswith("grad.") else f"out.{plain}", None)
            wanted[name] = tensors[name]
    return wanted


def compare(
    name: str, ours: torch.Tensor, theirs: torch.Tensor, tolerance: dict[str, float], meant: torch.Tensor | None = None
) -> str | None:
    """What is wrong with a tensor, if anything. meant: which of its first axes' places mean something; None: all."""
    if ours.shape != theirs.shape:
        return f"{name}: shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
    if not theirs.is_floating_point():
        same = not ours.is_floating_point() and torch.equal(ours.to(theirs.dtype), theirs)
        return None if same else f"{name}: integers differ"
    exactly = "_exact" if name.startswith("exact.") else ""
    grad = "grad_" if name.removeprefix("exact.").startswith("grad.") else ""
    atol, rtol = tolerance[f"{grad}atol{exactly}"], tolerance[f"{grad}rtol"]
    excess = (ours.double() - theirs.double()).abs() - (atol + rtol * theirs.double().abs())
    if meant is not None and excess.shape[:2] == meant.shape:
        excess = excess[meant]
    if bool((excess <= 0).all()):  # NaN fails
        return None
    return f"{name}: beyond the tolerance by {excess.nan_to_num(float('inf')).max().item():.3g}"


def meant(fixture: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Which positions' outputs mean something, where the fixtures' README says that padding's do not."""
    if fixture.meta["kind"] == "hf_reformer" and "in.attention_mask" in tensors:
        return tensors["in.attention_mask"].bool()
    return None


def check(fixture: Any, tensors: dict[str, torch.Tensor]) -> list[str]:
    (peer,) = matching(fixture.meta)
    weights = {
        name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(("param.", "buffer."))
    }
    wrapper = PEERS[peer].from_peer(fixture.meta["config"], weights)
    assert isinstance(wrapper.module, torch.nn.Module)
    assert type(wrapper.module).__module__.startswith("manyheads.")
    answer = wrapper.run({name: t for name, t in tensors.items() if name.startswith(("in.", "rot."))})
    wanted = expected(tensors, answer)
    problems = [f"{name}: missing" for name in sorted(wanted.keys() - answer.keys())]
    problems += [f"{name}: not in the fixture" for name in sorted(answer.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & answer.keys()):
        problem = compare(name, answer[name], wanted[name], fixture.meta["tolerance"], meant(fixture, tensors))
        problems += [problem] if problem else []
    return problems


def test_fixture(fixture: Any, pending: dict[str, str]) -> None:
    if not matching(fixture.meta) and fixture.meta["kind"] in pending:
        pytest.skip(f"pending: {fixture.meta['kind']} {pending[fixture.meta['kind']]}")
    assert matching(fixture.meta), f"no loader for kind {fixture.meta['kind']}, and it is not listed as pending"
    tensors = fixture.tensors()
    prefixes = {name.partition(".")[0] for name in tensors}
    assert prefixes <= {"param", "buffer", "in", "rot", "out", "exact", "grad"}
    assert check(fixture, tensors) == []


def test_a_converted_reformer_gives_the_peers_logits_by_itself(fixtures: list[Any]) -> None:
    """Without the peer's rotations: they follow from `hash_seed`."""
    problems, lengths = [], set()
    for fixture in [one for one in fixtures if one.meta["kind"] == "hf_reformer"]:
        tensors = fixture.tensors()
        weights = {name.removeprefix("param."): one for name, one in tensors.items() if name.startswith("param.")}
        model = PEERS["transformers/Reformer"].from_peer(fixture.meta["config"], weights).module
        ids, mask = tensors["in.ids"], tensors.get("in.attention_mask")
        with torch.no_grad():
            logits = model.head.logits(model.body(ids, None if mask is None else mask.sum(dim=1))[0])
        wanted = tensors["exact.logits"] if "exact.logits" in tensors else tensors["out.logits"]
        problems.append(compare("out.logits", logits, wanted, fixture.meta["tolerance"], meant(fixture, tensors)))
        lengths |= {ids.shape[1] % 8}
    assert not any(problems)
    assert lengths > {0, 3} or not problems  # whole chunks, and others


def test_pending_is_honest(fixtures: list[Any], pending: dict[str, str]) -> None:
    """Listed kinds occur and have no loader; every fixture is matched by one loader at most."""
    kinds = {one.meta["kind"] for one in fixtures}
    if "MANYHEADS_PARITY_DIR" not in os.environ:  # another folder need not have every kind
        assert set(pending) <= kinds
    assert [one.meta["kind"] for one in fixtures if one.meta["kind"] in pending and matching(one.meta)] == []
    assert [one.path.stem for one in fixtures if len(matching(one.meta)) > 1] == []


@pytest.mark.parametrize("harm", ["moved output", "unknown output", "moved gradient", "lost weight", "moved weight"])
def test_comparison_notices(harm: str, fixtures: list[Any]) -> None:
    """The check itself: each harm to a fixture must be seen."""
    fixture = next((one for one in fixtures if one.path.stem == "torch_transformer_pre_norm"), None)
    if fixture is None:
        pytest.skip("this folder has no torch_transformer_pre_norm")
    tensors = fixture.tensors()
    assert check(fixture, tensors) == []
    gradient = next(name for name in tensors if name.startswith("grad."))
    weight = next(name for name in tensors if name.startswith("param."))
    if harm == "moved output":
        tensors["out.memory"].view(-1)[0] += 1e-3
    elif harm == "unknown output":
        tensors["out.more"] = torch.zeros(1)
    elif harm == "moved gradient":
        tensors[gradient].view(-1)[0] += 1e-2
    elif harm == "moved weight":
        tensors[weight] += 0.1
    else:
        del tensors[weight]
        from manyheads.errors import ModelFileError

        with pytest.raises(ModelFileError, match="is missing"):
            check(fixture, tensors)
        return
    assert check(fixture, tensors) != []
