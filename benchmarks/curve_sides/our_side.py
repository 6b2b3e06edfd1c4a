"""Our sides of `curves.py`: the steps of a run of a preset, with its data order, optimiser, schedule and reading.

As the command line: `set_up_machine`, and a schedule by the clock. Log lines, checkpoints and validations of a run are
left out; the quality is looked at while the clock stands still, as for every side.

    translation    preset demo           language    preset xl-demo
    long           preset reformer-demo; `short`, the same in other pieces; `exact`, the decoder with its sizes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from looks import Run, Task, task_of_command_line

from manyheads.cli.process import set_up_machine

set_up_machine()

import torch  # noqa: E402  (the machine is set up before)

from manyheads.catalogue import PRESETS, SIZED_BY_PRECISION  # noqa: E402
from manyheads.data.language.prepared import TextData  # noqa: E402
from manyheads.data.sampler import next_position  # noqa: E402
from manyheads.data.translation.prepared import PreparedData  # noqa: E402
from manyheads.decoding.translator import Translator  # noqa: E402
from manyheads.evaluation.likelihood import evaluate_text, evaluation_mode  # noqa: E402
from manyheads.models.decoder.config import DecoderConfig  # noqa: E402
from manyheads.training.optim.schedule import learning_rate  # noqa: E402
from manyheads.training.run.components import assemble  # noqa: E402
from manyheads.training.run.device import computing, settled  # noqa: E402

CPU = torch.device("cpu")
PRESET_OF = {"translation": "demo", "language": "xl-demo", "long": "reformer-demo"}
SMALL: dict[str, dict[str, Any]] = {
    "translation": {"d_model": 32, "d_ff": 64, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "language": {"d_model": 32, "d_ff": 64, "num_heads": 2, "head_dim": 16, "num_layers": 1},
    "long": {"d_model": 32, "d_ff": 64, "num_heads": 2, "head_dim": 16, "axial_dims": (16, 16), "chunk_len": 16,
             "local_chunk_len": 16},
}  # fmt: skip


def config_of(task: Task) -> Any:
    """The preset for the task's data, precision, minutes and length."""
    what = task.facts["what"]
    preset = PRESET_OF[what]
    config: Any = PRESETS[preset](*([task.sized_for] if preset in SIZED_BY_PRECISION else []))
    model = replace(config.model, **SMALL[what]) if task.small else config.model
    data = replace(config.data, path=task.facts["prepared"])
    if what == "long":
        sizes = {name: getattr(model, name) for name in ("d_model", "num_heads", "head_dim", "d_ff", "num_layers")}
        plain = {"positions": "sinusoidal", "activation": "gelu", "dropout": 0.0, "attention_dropout": 0.0}
        model = (
            DecoderConfig(**sizes, **plain)
            if task.exact
            else replace(model, max_len=task.length, axial_shape=axes(task.length))
        )
        data = replace(data, segment_len=task.length, lanes=task.lanes)
    if what != "translation":
        # All of the held-out text, whatever a run reads of it between its steps.
        length = {"segment_len": task.length, "lanes": 1} if what == "long" else {}
        config = replace(config, reading=replace(config.reading, max_tokens=0, **length))
    training = replace(config.training, max_minutes=task.minutes)
    return replace(
        config, run_dir=str(task.out / "run"), precision=task.precision, seed=task.seed, model=model, data=data,
        training=training,
    )  # fmt: skip


def axes(length: int) -> tuple[int, int]:
    """Two sizes as equal as can be, of axial positions. Their product is the length."""
    low = max(size for size in range(1, int(length**0.5) + 1) if length % size == 0)
    return length // low, low


class Side:
    def __init__(self, task: Task, config: Any) -> None:
        self.task = task
        self.components: Any = assemble(config, CPU, task.out / "data")
        self.config: Any = self.components.config
        self.train_step = self.components.train_step()

    def update(self, run: Run) -> int:
        components, config = self.components, self.config
        counters = components.counters
        if counters.row == 0:
            components.memory.forget()
        batches = components.stream.at(counters.epoch, counters.row)
        counters.step += 1
        rate = learning_rate(
            config.schedule, peak=config.optimiser.learning_rate, d_model=config.model.d_model, step=counters.step,
            progress=run.progress(),
        )  # fmt: skip
        result = self.train_step.run(batches, counters.step, rate)
        if result.fault is not None:
            raise RuntimeError(f"update {counters.step}: {result.fault}")
        rows = components.stream.rows(counters.epoch)
        counters.epoch, counters.row = next_position(counters.epoch, counters.row, rows)
        sources = sum(int(batch.source_lengths.sum()) for batch in batches if hasattr(batch, "source_lengths"))
        return sources + int(result.num_tokens)

    def look(self, name: str) -> Mapping[str, Any]:
        """See `looks.Run`; `own` translates by the preset's search, and greedily otherwise."""
        split = name.partition("-")[0]
        data = self.components.data
        if isinstance(data, TextData):
            store = getattr(data, split)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.task.precision == "bf16"):
                found = evaluate_text(self.components.model, store, self.config.reading, data.vocabulary)
            assert found is not None
            return {"nats": found.nll_sum, "scored_tokens": found.num_tokens}
        assert isinstance(data, PreparedData)
        count = self.task.facts["sentences"][split]
        texts = [source for source, _ in getattr(data, f"{split}_text")[:count]]
        config = self.config
        num_beams = config.decoding.num_beams if name.endswith("own") else 1
        with evaluation_mode(self.components.model):
            translator = Translator(
                self.components.model, data.tokenizer, config.decoding, device=CPU, precision=config.precision
            )
            translations = translator.translate(texts, num_beams=num_beams)
        path = self.task.out / f"{name}.txt"
        path.write_text("".join(f"{text}\n" for text in translations), encoding="utf-8")
        return {"hypotheses": path.name}

    def described(self) -> dict[str, Any]:
        config = self.config
        return {
            "preset": PRESET_OF[self.task.facts["what"]],
            "data": str(replace(config.data, path="data")),
            **{
                name: str(getattr(config, name))
                for name in ("model", "optimiser", "schedule", "decoding", "reading")
                if hasattr(config, name)
            },
        }


def main() -> None:
    task = task_of_command_line()
    config = config_of(task)
    with computing(config, CPU):
        side = Side(task, config)
        run = Run(task, side.look)
        with settled():
            run.train(side.update)
        hows = ("greedy", "own") if task.facts["what"] == "translation" else ("own",)
        test = {how: side.look(f"test-{how}") for how in hows} if task.num_looks else {}
        parameters = sum(one.numel() for one in side.components.model.parameters() if one.requires_grad)
        run.write(parameters, side.described(), test)


if __name__ == "__main__":
    main()
