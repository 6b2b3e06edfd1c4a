"""Which precision a run takes, stores and resumes with; and that fp32 means fp32 in every product."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_run import TINY_TEXT, changed
from torch.utils._python_dispatch import TorchDispatchMode

import manyheads.training.run.device
from manyheads.catalogue import PRESETS, SIZED_BY_PRECISION
from manyheads.data.language.prepared import NOVEL
from manyheads.data.settings import DUPLICATION
from manyheads.errors import ConfigError
from manyheads.extras.classification.labelled_files import Labelled, LabelledList
from manyheads.extras.classification.prepare import prepare_labelled
from manyheads.extras.classification.settings import ClassificationConfig
from manyheads.extras.parsing.span_task.prepare import prepare_spans
from manyheads.extras.parsing.span_task.settings import SpanConfig
from manyheads.extras.parsing.tokenizer import ParsingTask, TreeFile
from manyheads.extras.parsing.trees import ParsingSettings
from manyheads.extras.planning.first_step import first_step
from manyheads.models.reformer.config import ReformerConfig
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.precision import OVERRIDE, PrecisionMeasurement
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.training.run.device import resolve_precision
from manyheads.training.run.loop import train
from manyheads.training.run.step import TrainStep
from manyheads.training.settings import RunConfig

CPU = torch.device("cpu")
Make = Callable[..., TrainConfig]
SLOW_BF16, FAST_BF16 = PrecisionMeasurement(100.0, 1.0), PrecisionMeasurement(100.0, 250.0)
NO_BF16 = PrecisionMeasurement(100.0, 0.0)


class OnProgress:
    """Keeps the messages of a run."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, str]] = []

    def message(self, text: str, level: str = "info") -> None:
        self.texts.append((level, text))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *anything: None

    def of(self, level: str) -> list[str]:
        return [text for kind, text in self.texts if kind == level]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[PrecisionMeasurement | None], None]:
    """Sets what this machine measures; None: it must not be asked."""

    def measures(found: PrecisionMeasurement | None) -> None:
        def measure(device: torch.device) -> PrecisionMeasurement:
            assert found is not None, "nothing is to be measured here"
            return found

        monkeypatch.setattr(manyheads.nn.kernels.precision, "measure_precision", measure)

    return measures


def stored(config: RunConfig) -> str:
    text = (Path(config.run_dir) / "config.yaml").read_text(encoding="utf-8")
    return str(yaml.safe_load(text)["precision"])


@pytest.mark.parametrize(("found", "choice"), [(SLOW_BF16, "fp32"), (FAST_BF16, "bf16"), (NO_BF16, "fp32")])
def test_auto_is_resolved_and_told(small: Make, machine: Any, found: PrecisionMeasurement, choice: str) -> None:
    machine(found)
    told = OnProgress()
    config = small(precision="auto", training={"max_steps": 1})
    train(config, reporter=told)
    assert stored(config) == choice
    assert [text for text in told.of("info") if text.startswith(f"precision auto: {choice} (bf16 matrix products run")]
    assert told.of("warning") == []


@pytest.mark.parametrize(("first", "later"), [(FAST_BF16, SLOW_BF16), (SLOW_BF16, FAST_BF16)])
def test_a_resumed_run_keeps_its_precision(small, machine, first, later):
    machine(first)
    begun = small(precision="auto", training={"max_steps": 3})
    train(begun)
    machine(later if first.choice == "bf16" else None)  # fp32 is stored: there is nothing to ask
    told = OnProgress()
    resumed = small(precision="auto", training={"max_steps": 6})
    result = train(resumed, reporter=told)
    assert (result.step, stored(resumed)) == (6, first.choice)
    slow = [text for text in told.of("warning") if "precision" in text]
    if first.choice == "bf16":
        assert len(slow) == 1
        assert "resumes in bf16" in slow[0]
        assert "0.01 times the rate" in slow[0]
        assert "--precision fp32" in slow[0]
    else:
        assert slow == []


def test_tf32_is_a_word(small: Make, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stored, resumed, in force during steps and not after them, and never chosen."""
    machine(None)
    config = small(precision="tf32", training={"max_steps": 2})
    with pytest.raises(ConfigError, match=r"precision is tf32, .* and cpu is none; use fp32"):
        train(config)
    monkeypatch.setattr(manyheads.training.run.device, "tf32_lack", lambda device: None)
    monkeypatch.setattr(policy, "tf32_lack", lambda device: None)
    seen: list[str] = []
    run = TrainStep.run

    def spied(self: TrainStep, *given: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        return run(self, *given)

    monkeypatch.setattr(TrainStep, "run", spied)
    train(config)
    assert stored(config) == "tf32"
    train(small(precision="auto", training={"max_steps": 4}))
    assert (stored(config), seen) == ("tf32", ["high"] * 4)
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_remedy_works(machine: Any, tmp_path: Path) -> None:
    """A run that was begun in bf16 goes on in fp32 if that is asked for by name, memories included."""
    machine(FAST_BF16)
    config = replace(TINY_TEXT, run_dir=str(tmp_path / "run"), precision="auto")
    train(changed(config, training={"max_steps": 3}))
    machine(None)
    told = OnProgress()
    result = train(changed(config, precision="fp32", training={"max_steps": 6}), reporter=told)
    assert (result.step, stored(config)) == (6, "fp32")
    assert any("precision was 'bf16', is 'fp32'" in text for text in told.of("warning"))


def test_bf16_by_name_on_a_slow_machine_is_warned_of_once(small: Make, machine: Any) -> None:
    machine(SLOW_BF16)
    told = OnProgress()
    config = small(precision="bf16", training={"max_steps": 2})
    assert train(config, reporter=told).step == 2
    assert stored(config) == "bf16"
    (warning,) = told.of("warning")
    assert "0.01 times the rate of fp32" in warning
    assert "--precision auto or fp32" in warning


@pytest.mark.parametrize(("asked", "before"), [("bf16", None), ("auto", "bf16"), ("bf16", "bf16")])
def test_a_device_without_bf16(small: Make, machine: Any, asked: str, before: Any) -> None:
    machine(NO_BF16)
    with pytest.raises(ConfigError, match=r"bf16, and cpu has no bf16 matrix products; use --precision") as caught:
        resolve_precision(small(precision=asked), CPU, stored=before)
    assert ("The checkpoint was trained in bf16" in str(caught.value)) == (before == "bf16")


def test_a_dry_run_measures_too(small: Make, machine: Any) -> None:
    machine(SLOW_BF16)
    assert first_step(small(precision="auto")).config.precision == "fp32"


class NoProductsInBfloat16(TorchDispatchMode):
    """Fails at any matrix product of bfloat16 tensors on a CPU."""

    PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "einsum", "attention", "convolution")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(word in name for word in self.PRODUCTS):
            for value in torch.utils._pytree.tree_leaves((args, kwargs)):
                low = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dtype is torch.bfloat16
                assert not low, f"{name} of bfloat16"
        return func(*args, **(kwargs or {}))


def made_small(name: str, corpus: Path, run_dir: Path) -> RunConfig:
    """A preset with all that makes it what it is, but for its sizes: two steps, then a validation with samples."""
    config = PRESETS[name]()
    training = {"max_steps": 2, "max_minutes": 0.0, "plots": False, "tensorboard": False}
    common: dict[str, Any] = {"precision": "auto", "run_dir": str(run_dir), "num_threads": 1, "training": training}
    sizes: dict[str, Any] = {"d_model": 32, "num_heads": 2, "d_ff": 64}
    if isinstance(config, TrainConfig):
        layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
        return changed(  # type: ignore[no-any-return]
            config,
            **common,
            data={"path": str(corpus), "max_tokens": 256, "max_source_len": 16, "max_target_len": 16, "accumulate": 1},
            model={**sizes, **layers},
            validation={"every_steps": 2, "bleu_sentences": 2},
            decoding={"max_len_offset": 2},
        )
    if isinstance(config, ClassificationConfig):
        reformer = {"max_len": 64, "chunk_len": 8, "local_chunk_len": 8}
        return changed(  # type: ignore[no-any-return]
            config,
            **common,
            data={"path": str(labelled(corpus)), "max_tokens": 128, "max_len": 16, "accumulate": 1},
            model={**sizes, **(reformer if isinstance(config.model, ReformerConfig) else {}), "num_layers": 3},
            validation={"every_steps": 2},
        )
    if isinstance(config, SpanConfig):
        return changed(  # type: ignore[no-any-return]
            config,
            **common,
            data={"path": str(trees(corpus)), "max_tokens": 128, "max_len": 16, "accumulate": 1},
            model={**sizes, "num_layers": 1},
            validation={"every_steps": 2},
        )
    assert isinstance(config, TextConfig)
    if isinstance(config.model, ReformerConfig):
        sizes |= {"head_dim": 16, "max_len": 64, "chunk_len": 8, "ff_chunk_len": 16}
        sizes |= {"local_chunk_len": 8}
        if config.model.positions == "axial":
            sizes |= {"axial_shape": (8, 8), "axial_dims": (16, 16)}
    else:
        sizes["num_layers"] = min(config.model.num_layers, 4)
    path = config.data.path if config.data.path == DUPLICATION else NOVEL
    return changed(  # type: ignore[no-any-return]
        config,
        **common,
        data={"path": path, "lanes": 2, "segment_len": 64, "accumulate": 1, "documents": "joined", "order": "text"},
        reading={"segment_len": 64, "max_tokens": 200, "documents": "joined"},
        model=sizes,
        validation={"every_steps": 2, "sample_tokens": 4},
    )


def labelled(corpus: Path) -> Path:
    """Prepared texts with labels, beside the corpus."""
    folder = corpus.parent / "labelled"
    if not folder.exists():
        rows = LabelledList("made", [Labelled(f"label {number % 2}", f"word {number % 7}") for number in range(40)])
        tokenizer = TokenizerSettings(kind="word", vocab_size=20)
        prepare_labelled(folder, train=rows, valid=rows, tokenizer=tokenizer)
    return folder


def trees(corpus: Path) -> Path:
    """Prepared trees, beside the corpus."""
    folder = corpus.parent / "trees"
    if not folder.exists():
        file = corpus.parent / "trees.ptb"
        file.write_text(
            "".join(f"(ROOT (S (NP (NN word{number % 7})) (VP (VB is) (ADJ new))))\n" for number in range(40))
        )
        read = TreeFile(path=file, task=ParsingTask(ParsingSettings(tags="keep")))
        prepare_spans(folder, train=read, valid=read, tokenizer=TokenizerSettings(vocab_size=300))
    return folder


def one_of_each_kind() -> list[Any]:
    """All presets; `make test` takes the first of each task, class of model and optimiser."""
    found, kinds = [], set()
    for name in PRESETS:
        config = PRESETS[name]()
        kind = type(config), type(config.model), config.optimiser.name
        found.append(pytest.param(name, marks=[pytest.mark.slow] * (kind in kinds)))
        kinds.add(kind)
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", one_of_each_kind())
def test_fp32_means_fp32_in_every_product(name, corpus, tmp_path, monkeypatch):
    """Training, Muon, validation, samples: of every preset, made small."""
    monkeypatch.setenv(OVERRIDE, "fp32")
    with NoProductsInBfloat16():
        assert train(made_small(name, corpus, tmp_path / "run")).step == 2


def test_bfloat16_would_be_seen(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, "bf16")
    with pytest.raises(AssertionError, match="of bfloat16"), NoProductsInBfloat16():
        train(made_small("demo", corpus, tmp_path / "run"))


@pytest.mark.parametrize("name", sorted(SIZED_BY_PRECISION))
def test_a_preset_sized_by_precision_has_settings_for_each(name: str) -> None:
    assert PRESETS[name]("bf16") == PRESETS[name]()
    assert PRESETS[name]("fp32").model != PRESETS[name]("bf16").model
