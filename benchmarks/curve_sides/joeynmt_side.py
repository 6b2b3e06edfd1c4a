"""A side of `curves.py translation`: JoeyNMT 2.3, in an environment of its own, by its own training loop.

Sizes are those of the preset `demo`; batches by tokens, dropout, label smoothing, initial weights, tied embeddings and
search are those that JoeyNMT's examples for Transformers give; the warm-up is shortened to what a few minutes have.
Its words are our ids, so its tokens are ours. JoeyNMT turns autocast off on a CPU, and has it only for float16; where
bf16 is asked for, its own option for autocast is set to bfloat16.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from joeynmt.config import BaseConfig, parse_global_args, set_validation_args
from joeynmt.model import Model
from joeynmt.prediction import predict, prepare
from joeynmt.training import TrainManager
from looks import Run, Task, task_of_command_line
from pairs import write_ids

WIDTHS = {"bf16": 256, "fp32": 192}  # of the preset `demo`
SMALL = {"hidden_size": 32, "num_heads": 2, "num_layers": 1, "ff_size": 64}
SETTINGS = {
    "optimizer": "adam",
    "adam_betas": [0.9, 0.98],
    "scheduling": "warmupinversesquareroot",
    "learning_rate": 1e-3,
    "learning_rate_warmup": 200,
    "learning_rate_min": 0.0,
    "label_smoothing": 0.1,
    "loss": "crossentropy",
    "batch_type": "token",
    "batch_size": 4096,
    "batch_multiplier": 1,
    "dropout": 0.1,
}
SEARCH = {"beam_size": 5, "beam_alpha": 1.0}


def sizes_of(task: Task) -> dict[str, int]:
    width = WIDTHS[task.sized_for]
    return SMALL if task.small else {"hidden_size": width, "num_heads": 4, "num_layers": 3, "ff_size": 4 * width}


def configuration(task: Task) -> dict[str, Any]:
    """As its YAML files have it."""
    facts, vocabulary = task.facts, task.out / "vocabulary.txt"
    special = {facts[name] for name in ("pad_id", "bos_id", "eos_id")}
    words = [str(number) for number in range(facts["vocab_size"]) if number not in special]
    vocabulary.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    sizes = sizes_of(task)
    side = {"level": "word", "lowercase": False, "voc_file": str(vocabulary), "max_length": 128}
    layers = {"type": "transformer", "dropout": SETTINGS["dropout"], **sizes}
    layers["embeddings"] = {"embedding_dim": sizes["hidden_size"], "scale": True, "dropout": SETTINGS["dropout"]}
    return {
        "name": "curves",
        "model_dir": str(task.out),
        "use_cuda": False,
        "random_seed": task.seed,
        "data": {
            "dataset_type": "plain",
            "train": str(task.data / "train"),
            "dev": str(task.data / "valid"),
            "test": str(task.data / "test"),
            "src": {"lang": "source", **side},
            "trg": {"lang": "target", **side},
        },
        "testing": {"batch_type": "token", "batch_size": 2048, "max_output_length": -1, "eval_metrics": [], **SEARCH},
        "training": {
            **{name: value for name, value in SETTINGS.items() if name != "dropout"},
            "epochs": 1_000_000,
            "logging_freq": 1_000_000,
            "validation_freq": 1_000_000,
            "shuffle": True,
        },
        "model": {
            "initializer": "xavier_uniform",
            "bias_initializer": "zeros",
            "embed_initializer": "xavier_uniform",
            "tied_embeddings": True,
            "tied_softmax": True,
            "encoder": layers,
            "decoder": dict(layers),
        },
    }  # fmt: skip


class Over(Exception):  # noqa: N818  (the end of the minutes is no error)
    """The minutes are over."""


class Manager(TrainManager):
    """JoeyNMT's loop, with the clock read before each step. It has no end by time, so an exception ends it."""

    run: Run
    tokens_of_last = 0

    def _train_step(self, batch: Any) -> Any:
        if self.stats.steps > self.run.updates:
            self.run.count(self.tokens_of_last)
        if self.run.look_if_due():
            raise Over
        source = int((batch.src != self.model.pad_index).sum())
        self.tokens_of_last = source + int(batch.ntokens)
        return super()._train_step(batch)

    def _save_checkpoint(self, new_best: bool, score: float) -> None:
        """None is kept: the quality is looked at in this process."""


class Side:
    def __init__(self, task: Task) -> None:
        config = configuration(task)
        args = parse_global_args(config, rank=0, mode="train")
        on = task.precision == "bf16"
        self.args: BaseConfig = args._replace(
            autocast={"device_type": "cpu", "enabled": on, "dtype": torch.bfloat16}, model_dir=task.out
        )
        self.task = task
        self.model: Model
        self.model, self.train, self.valid, self.test = prepare(self.args, rank=0, mode="train")

    def manager(self, run: Run) -> Manager:
        args = self.args
        manager = Manager(
            rank=0, model=self.model, model_dir=args.model_dir, device=args.device, n_gpu=0, num_workers=0,
            autocast=args.autocast, seed=args.seed, train_args=args.train, dev_args=set_validation_args(args.test),
        )  # fmt: skip
        manager.run = run
        return manager

    def look(self, name: str) -> Mapping[str, Any]:
        """Translate the sentences of a split; greedily unless the name is of JoeyNMT's own search."""
        search = self.args.test if name.endswith("own") else set_validation_args(self.args.test)
        data = self.test if name.startswith("test") else self.valid
        words = predict(
            model=self.model, data=data, device=self.args.device, n_gpu=0, compute_loss=False, args=search,
            autocast=self.args.autocast,
        )[3]  # fmt: skip
        path = self.task.out / f"{name}.ids"
        write_ids(path, [[int(word) for word in row if word.isdecimal()] for row in words])
        return {"hypotheses": path.name}


def main() -> None:
    task = task_of_command_line()
    logging.disable(logging.INFO)
    side = Side(task)
    run = Run(task, side.look)
    manager = side.manager(run)
    with contextlib.suppress(Over):
        manager.train_and_validate(train_data=side.train, valid_data=side.valid)
    test = {how: side.look(f"test-{how}") for how in ("greedy", "own")} if task.num_looks else {}
    parameters = sum(parameter.numel() for parameter in side.model.parameters() if parameter.requires_grad)
    run.write(parameters, {**SETTINGS, **sizes_of(task), **SEARCH}, test)


if __name__ == "__main__":
    main()
