"""lm-evaluation-harness with a task over a local file gives the bits per byte of `manyheads evaluate`.

`make check-lm-eval` installs it apart; `make test` skips this file where it is not installed.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_models import LANGUAGE

from manyheads.catalogue import build_model
from manyheads.data.store import TokenStore
from manyheads.evaluation.likelihood import evaluate_text
from manyheads.evaluation.reading import Reading
from manyheads.models.pretrained import load, save_pretrained
from manyheads.text.vocabulary import ByteVocabulary

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed; make check-lm-eval installs it apart")

WINDOW = 48
# Whole windows: a shorter last one would read more of the text before it again.
TEXT = ("It was the best of times,\nit was the worst of times; " * 9)[: 9 * WINDOW]

TASK = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
metadata: {{version: 1}}
"""


@pytest.mark.parametrize("kind", ["transformer-xl", "reformer"])
def test_bits_per_byte(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    vocabulary = ByteVocabulary()
    model = tmp_path / "model"
    save_pretrained(build_model(replace(LANGUAGE[kind], vocab_size=256)), model, tokenizer=vocabulary)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": TEXT}) + "\n", encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.format(file=tmp_path / "texts.jsonl"), encoding="utf-8")
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={
            "pretrained": str(model),
            "max_length": WINDOW,
            "add_bos_token": False,  # it adds the start itself, before the first window
            "device": "cpu",
            "dtype": "float32",
        },
        tasks=["local_text"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        batch_size=2,
        bootstrap_iters=0,
    )
    # Its windows have no memory, and the start of a text, a line break, before the first.
    store = TokenStore.from_lists([[vocabulary.start_id, *vocabulary.encode(TEXT)]], vocabulary.vocab_size)
    memory = {"memory_len": 0} if kind == "transformer-xl" else {}
    wanted = evaluate_text(load(model), store, Reading(segment_len=WINDOW, lanes=1, **memory), vocabulary)
    assert wanted.num_tokens == len(TEXT.encode())
    assert found["results"]["local_text"]["bits_per_byte,none"] == pytest.approx(
        wanted.nats_per_token / math.log(2), abs=1e-4
    )
