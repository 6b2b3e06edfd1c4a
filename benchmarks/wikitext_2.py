"""WikiText-2 at equal wall-clock: the recipe's run with `transformers` 4.35.2's TransfoXL in the model's place.

Everything but the model is the recipe's: the data and their lanes, the optimiser, the schedule, the averaging of
weights, the minutes, and how validation and test are read. Only the precision differs: the peer fails under bf16
autocast, so it trains in float32. Run it where transformers 4.35.2 and this package are installed, after the recipe, on
the same machine:

    manyheads train --config recipes/wikitext-2.yaml
    python benchmarks/wikitext_2.py --config recipes/wikitext-2.yaml --out runs/wikitext-2-peer.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.cli.process import set_up_machine
from manyheads.config.build import resolve
from manyheads.config.files import load_yaml
from manyheads.evaluation.likelihood import bits_per, evaluate_text
from manyheads.models.protocols import Output
from manyheads.models.transformer_xl.config import Attending, TransformerXLConfig
from manyheads.tasks.language_modelling.objective import LanguageObjective
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.training.optim.optimiser import MovingAverage, build_optimiser
from manyheads.training.optim.schedule import learning_rate
from manyheads.training.run.clock import RunClock
from manyheads.training.run.state import Memory
from manyheads.training.run.step import TrainStep


class Peer(nn.Module):
    """TransfoXLLMHeadModel behind the interface that training and evaluation know.

    Args: config: sizes; what the peer cannot do (bf16, learned kinds) is not asked of it.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        from transformers import TransfoXLConfig, TransfoXLLMHeadModel

        self.config = config
        self.model = TransfoXLLMHeadModel(
            TransfoXLConfig(
                vocab_size=config.vocab_size,
                cutoffs=list(config.cutoffs),
                d_model=config.d_model,
                d_embed=config.embedding_dim,
                n_head=config.num_heads,
                d_head=config.width_of_heads,
                d_inner=config.d_ff,
                div_val=config.div_value,
                n_layer=config.num_layers,
                mem_len=config.memory_len,
                clamp_len=config.clamp_len or -1,
                same_length=config.same_length,
                dropout=config.dropout,
                dropatt=config.attention_dropout,
                pre_lnorm=config.norm_position == "pre",
            )
        )

    def start(self, lanes: int, attending: Attending | None = None, *, projected: bool = True) -> Any:
        """Its way of looking back is an attribute; its memory begins as positions of zeros."""
        attending = attending or self.config.attending
        inner = self.model.transformer
        inner.mem_len, inner.same_length = attending.memory_len, attending.same_length
        inner.clamp_len = attending.clamp_len or -1
        return inner.init_mems(lanes)

    def forward(self, batch: Any, state: Any = None, **_: Any) -> Output:
        """Summed loss of a segment; the peer's criterion shifts its labels, so one column is put in front."""
        if state is None:
            state = self.start(len(batch.lengths))
        read = self.model.transformer(batch.tokens, mems=state)
        hidden = torch.cat([read.last_hidden_state, read.last_hidden_state[:, -1:]], dim=1)
        losses: Tensor = self.model.crit(
            hidden, torch.cat([batch.tokens[:, :1], batch.targets], dim=1), keep_order=True
        )
        counted = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        total = (losses.view(counted.shape) * counted).sum()
        return Output(loss_sum=total, nll_sum=total.detach(), num_tokens=counted.sum(), state=read.mems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the recipe")
    parser.add_argument("--out", type=Path, required=True, help="a line a look, as JSON")
    parser.add_argument("--minutes", type=float, help="in place of the recipe's")
    options = parser.parse_args()
    config = resolve(TextConfig, [load_yaml(options.config)])
    if options.minutes:
        config = replace(config, training=replace(config.training, max_minutes=options.minutes))
    config = replace(config, precision="fp32")
    objective = LanguageObjective(config, Path("runs/data"))
    torch.manual_seed(config.seed)
    model = Peer(objective.model_config)
    print(f"{sum(one.numel() for one in model.parameters()):,} parameters", flush=True)
    optimiser = build_optimiser(model, config.optimiser)
    average = MovingAverage(dict(model.named_parameters()), config.training.ema_decay)
    memory = Memory()
    train_step = TrainStep(model, optimiser, config, torch.device("cpu"), memory)
    pace = RunClock(config.training, 0.0)
    step = epoch = 0
    spent = time.monotonic()
    with options.out.open("w") as out:

        def tell(**record: Any) -> None:
            print(record, flush=True)
            out.write(json.dumps(record) + "\n")
            out.flush()

        def look(split: str, reading: Any) -> None:
            store = getattr(objective.data, split)
            with average.applied():
                found = evaluate_text(model, store, reading, objective.data.vocabulary)
            assert found is not None
            model.train()
            bits = bits_per(found.nll_sum, objective.data.counts(split)["bytes"])
            tell(step=step, split=split, nll=found.nats_per_token, perplexity=found.perplexity, bits_per_byte=bits,
                 elapsed_seconds=pace.elapsed())  # fmt: skip

        while not pace.is_over():
            memory.forget()
            for row in range(objective.stream.rows(epoch)):
                rate = learning_rate(
                    config.schedule, peak=config.optimiser.learning_rate, d_model=0, step=step + 1,
                    progress=pace.progress(step),
                )  # fmt: skip
                result = train_step.run(objective.stream.at(epoch, row), step + 1, rate)
                step += 1
                average.update(step)
                if step % config.training.log_every == 0:
                    tell(step=step, loss=result.nll_sum / result.num_tokens, elapsed_seconds=pace.elapsed())
                if step % config.validation.every_steps == 0:
                    look("valid", config.reading)
                if pace.is_over():
                    break
            epoch += 1
        look("valid", config.reading)
        longer = replace(config.reading, segment_len=64, memory_len=640, clamp_len=400, same_length=True)
        for split in ("valid", "test"):
            look(split, longer)
    print(f"{(time.monotonic() - spent) / 60:.1f} minutes in all, evaluation after the end included")


if __name__ == "__main__":
    set_up_machine()
    main()
