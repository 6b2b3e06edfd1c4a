"""NaN and infinity, put wherever a step can meet them, stop the step before its update and are named (R12)."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from injections import KINDS, STEPS, Injection, Injector, injections

from manyheads.data.settings import DataSettings
from manyheads.data.translation.prepared import open_data
from manyheads.errors import NonFiniteError
from manyheads.models.transformer.config import TransformerConfig
from manyheads.tasks.translation.settings import TrainConfig, ValidationSettings
from manyheads.text.settings import TokenizerSettings
from manyheads.training.run.loop import train
from manyheads.training.run.step import StepResult, TrainStep
from manyheads.training.settings import OptimiserSettings, ScheduleSettings, TrainingSettings


@pytest.fixture(scope="session")
def copy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = DataSettings(path="copy-task", max_source_len=16, max_target_len=16, num_train_pairs=120)
    return open_data(settings, TokenizerSettings(kind="word", vocab_size=32), 1, tmp_path_factory.mktemp("data")).path


def config_of(case: Injection, data: Path, run_dir: Path) -> TrainConfig:
    return TrainConfig(
        run_dir=str(run_dir),
        seed=case.seed,
        num_threads=1,
        device="cpu",
        precision=case.precision,  # type: ignore[arg-type]
        data=DataSettings(path=str(data), max_tokens=256, accumulate=2, max_source_len=16, max_target_len=16),
        model=TransformerConfig(
            d_model=16, num_heads=2, d_ff=32, num_encoder_layers=1, num_decoder_layers=1, tie_embeddings="none"
        ),
        optimiser=OptimiserSettings(name=case.optimiser, learning_rate=3e-3),  # type: ignore[arg-type]
        schedule=ScheduleSettings(kind="constant", warmup_steps=1),
        training=TrainingSettings(
            max_steps=STEPS,
            save_every=2,
            keep=5,
            plots=False,
            tensorboard=False,
            ema_decay=0.9,
            on_nonfinite="skip" if case.skip else "stop",
        ),
        validation=ValidationSettings(every_steps=0, bleu_sentences=0),
    )


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def check(case: Injection, data: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run it. Returns: "stopped" or "skipped"; anything else fails."""
    config = config_of(case, data, run_dir)
    with monkeypatch.context() as patch:
        injector = Injector(case, patch)
        taken = TrainStep.run
        saved: dict[str, str] = {}

        def run(train_step: TrainStep, batches: Any, step: int, rate: float) -> StepResult:
            if step == case.step:
                saved.update(digests(run_dir / "checkpoints"))
            return taken(train_step, batches, step, rate)

        patch.setattr(TrainStep, "run", lambda *arguments: run(*arguments))
        error = None
        try:
            ended = train(config)
        except NonFiniteError as raised:
            error = str(raised)
    assert injector.changed == [], f"{case}: the bad step changed {injector.changed}"
    fault = injector.result.fault if injector.result else None
    assert fault is not None, case
    assert fault.step == case.step
    assert fault.sample_ids
    assert named(case, injector.target, fault), f"{case}: {injector.target} is not named by: {fault}"
    now = digests(run_dir / "checkpoints")
    kept = {path: digest for path, digest in saved.items() if "step-" in path}  # a run that goes on moves its pointers
    assert {path: now.get(path) for path in kept} == kept, "a checkpoint was touched"
    assert saved
    if case.skip:
        assert error is None
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
        assert [line["step"] for line in lines if "skipped" in line] == [case.step]
        assert ended.step == STEPS
        return "skipped"
    assert error is not None, case
    assert f"Step {case.step}: " in error
    assert "sample ids" in error
    assert "First bad module: " in error
    assert now == saved
    return "stopped"


def named(case: Injection, target: str, fault: Any) -> bool:
    """Whether the fault says where it came from: the very module, or the one around it that computes for it."""
    module = (fault.module or "").partition(" ")[0]
    if case.kind in ("weight", "unused row", "used row"):
        return target in fault.bad_parameters and bool(module)
    if case.kind == "moment":
        return target in fault.bad_moments and target.startswith(module)
    if case.kind == "gradient":
        return target in fault.bad_gradients and fault.micro_batch == case.micro and target.startswith(module)
    if case.kind == "activation":
        return module == target and fault.micro_batch == case.micro
    if case.kind == "loss":
        return module == "the" and fault.micro_batch == case.micro  # the head
    return bool(target.startswith(module) and module)


@pytest.mark.parametrize(
    "case", injections(len(KINDS) + 1), ids=lambda case: f"{case.kind}-{case.optimiser}-{case.precision}"
)
def test_it_stops_before_the_update(case, copy_data, tmp_path, monkeypatch):
    check(case, copy_data, tmp_path / "run", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_fifty_injections(copy_data, tmp_path, monkeypatch, figure, part):
    cases = injections(4 * 54)[54 * part : 54 * (part + 1)]
    outcomes = [check(case, copy_data, tmp_path / str(number), monkeypatch) for number, case in enumerate(cases)]
    figure(
        "R12",
        f"injected NaN and infinity, part {part}",
        injections=len(cases),
        stopped_before_the_update=outcomes.count("stopped"),
        skipped_without_a_trace=outcomes.count("skipped"),
        named=len(outcomes),
        checkpoints_touched=0,
    )
    assert len(outcomes) >= 50


def test_at_most_so_many_in_a_row(copy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two skips are allowed; the third ends the run, and nothing was ever updated by any of them."""
    case = replace(injections(1)[0], skip=True)
    config = config_of(case, copy_data, tmp_path / "run")
    config = replace(config, training=replace(config.training, max_skips=2))
    real = TrainStep.forward

    def forward(self: TrainStep, batch: Any, step: int, micro: int, model: Any = None) -> Any:
        output = real(self, batch, step, micro, model)
        return output._replace(loss_sum=output.loss_sum * float("nan")) if step in (2, 4, 5, 6) else output

    monkeypatch.setattr(TrainStep, "forward", forward)
    with pytest.raises(NonFiniteError, match=r"Step 6: .*The 2 updates before it were skipped"):
        train(config)


def test_weights_that_an_update_made_bad_are_not_saved(copy_data, tmp_path, monkeypatch):
    """The update itself may overflow; then the checkpoint before it stays the last one."""
    config = config_of(injections(1)[0], copy_data, tmp_path / "run")
    real = TrainStep.update

    def update(self: TrainStep, *arguments: Any) -> None:
        real(self, *arguments)
        update.count += 1  # type: ignore[attr-defined]
        if update.count == 4:  # type: ignore[attr-defined]
            with torch.no_grad():
                next(iter(self._parameters)).view(-1)[0] = float("inf")

    update.count = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(TrainStep, "update", update)
    with pytest.raises(NonFiniteError, match=r"After step 4 there is NaN or infinity in model: .*step-00000002"):
        train(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]
