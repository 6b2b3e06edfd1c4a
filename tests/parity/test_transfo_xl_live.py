"""Against transformers' TransfoXL itself, where a version that has it is installed (4.35): random shapes and weights.

It is no dependency; see test_marian_live.py. MANYHEADS_LIVE_MODELS is how many models are made (6).
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.extras.peers import PEERS
from manyheads.models.pretrained import load
from manyheads.models.transformer_xl.config import Attending

transformers = pytest.importorskip("transformers", reason="transformers is not installed, and need not be")
try:
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel
except ImportError:
    pytest.skip("this version of transformers has no TransfoXL", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")

COUNT = int(os.environ.get("MANYHEADS_LIVE_MODELS", "6"))
LOADER: Any = PEERS["transformers/TransfoXL"]


def random_model(chance: random.Random, seed: int) -> Any:
    torch.manual_seed(seed)
    cutoffs = chance.choice([[], [11], [7, 20], [5, 9, 30]])
    div_val = chance.choice([1, 1, 2, 4 if len(cutoffs) < 3 else 2]) if cutoffs else 1
    config = TransfoXLConfig(
        vocab_size=41,
        cutoffs=cutoffs,
        div_val=div_val,
        d_model=chance.choice([16, 24]),
        d_embed=chance.choice([16, 24, 64]),
        n_head=chance.choice([1, 2, 3]),
        d_head=chance.choice([5, 8]),
        d_inner=20,
        n_layer=chance.choice([1, 2, 3]),
        mem_len=chance.choice([0, 3, 7, 16]),
        clamp_len=chance.choice([-1, 3, 8]),
        pre_lnorm=chance.random() < 0.4,
        untie_r=chance.random() < 0.5,
        proj_share_all_but_first=chance.random() < 0.6,
        tie_word_embeddings=chance.random() < 0.7,
        dropout=0.0,
        dropatt=0.0,
    )
    config.same_length = config.mem_len > 0 and chance.random() < 0.4  # with no memory the peer's is NaN
    model = TransfoXLLMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_log_probabilities_memories_and_gradients(figure: Callable[..., None], tmp_path: Path) -> None:
    """Segments of random lengths from an empty memory; then the folder that save_pretrained writes."""
    from manyheads.extras.peers.convert import import_folder

    chance = random.Random(5)
    worst = worst_grad = 0.0
    for seed in range(COUNT):
        theirs = random_model(chance, seed)
        lengths = [chance.choice([1, 4, 9]) for _ in range(4)]
        segments = [torch.randint(0, 41, (2, length)) for length in lengths]
        config = {"model": theirs.config.to_dict(), "mems": "empty", "grads": True}
        ours = LOADER.from_peer(config, theirs.state_dict())
        inputs = {f"in.ids.{i}": ids for i, ids in enumerate(segments)}
        inputs |= {f"in.target.{i}": ids.flip(1) for i, ids in enumerate(segments)}
        answer = ours.run(inputs)
        mems = [torch.zeros(0, 2, theirs.config.d_model)] * theirs.config.n_layer
        for i, ids in enumerate(segments):
            found = theirs(input_ids=ids, mems=mems)
            mems = found.mems or mems
            distance = (found.prediction_scores.view(2, -1, 41) - answer[f"out.logprobs.{i}"]).abs().max().item()
            worst = max(worst, distance)
            if theirs.config.mem_len:
                for layer, memory in enumerate(mems):
                    assert torch.allclose(memory, answer[f"out.mems.{i}.{layer}"], atol=1e-4), (seed, i, layer)
        loss = -found.prediction_scores.view(2, -1, 41).gather(2, segments[-1].flip(1)[..., None]).mean()
        names = [name for name, _ in theirs.named_parameters()]
        grads = torch.autograd.grad(loss, [parameter for _, parameter in theirs.named_parameters()], allow_unused=True)
        assert {name.removeprefix("grad.") for name in answer if name.startswith("grad.")} == set(names), seed
        for name, grad in zip(names, grads, strict=True):
            wanted = torch.zeros_like(answer[f"grad.{name}"]) if grad is None else grad
            worst_grad = max(worst_grad, (wanted - answer[f"grad.{name}"]).abs().max().item())
        theirs.save_pretrained(tmp_path / f"peer-{seed}", safe_serialization=True)
        import_folder(tmp_path / f"peer-{seed}", tmp_path / f"ours-{seed}")
        again: Any = load(tmp_path / f"ours-{seed}")
        attending: Attending = replace(again.config.attending, initial_memory="empty")
        said = again.read(segments[0], None, again.start(2, attending, projected=False))[0]
        assert torch.allclose(said, answer["out.logprobs.0"], atol=1e-5)
    figure("parity", f"TransfoXL against transformers {transformers.__version__}", models=COUNT, worst_log_prob=worst,
           worst_gradient=worst_grad)  # fmt: skip
    assert worst < 1e-4
    assert worst_grad < 1e-4
