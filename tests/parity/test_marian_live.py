"""Against transformers itself, where it is installed: random Marian models, whole folders, odd texts.

It is no dependency. `pip install transformers` (4.35 or 5) into the environment, and this file runs;
MANYHEADS_LIVE_MODELS is how many models are made (6).
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marian_models import CODES, ENGLISH, GERMAN, write_peer_folder

from manyheads.extras.peers import PEERS
from manyheads.extras.peers.convert import export_folder, import_folder
from manyheads.extras.peers.marian_generation import settings_from_peer
from manyheads.text.of_folder import load_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed, and need not be")
pytestmark = pytest.mark.filterwarnings("ignore")

COUNT = int(os.environ.get("MANYHEADS_LIVE_MODELS", "6"))
RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
RULES: Any = "marian" if RELEASE < (4, 36) else "marian-5"  # those in between have a guess of their own
ACTIVATIONS = ("relu", "gelu", "swish", "silu", "tanh", "gelu_new", "quick_gelu", "sigmoid", "relu6", "mish", "relu2")


def random_model(chance: random.Random, seed: int) -> Any:
    """A MarianMTModel of a shape that no fixture has, with weights that make decoding lively."""
    torch.manual_seed(seed)
    share, size = chance.random() < 0.6, chance.choice([23, 37, 300])
    pad = size - 1 if share else 3
    config = transformers.MarianConfig(
        vocab_size=size,
        decoder_vocab_size=size if share or RELEASE < (5, 0) else chance.choice([size, size + 11]),
        d_model=chance.choice([16, 24, 32]),
        encoder_layers=chance.choice([1, 2, 3]),
        decoder_layers=chance.choice([1, 2, 3]),
        encoder_attention_heads=chance.choice([1, 2, 4]),
        decoder_attention_heads=chance.choice([1, 2, 4]),
        encoder_ffn_dim=chance.choice([20, 40]),
        decoder_ffn_dim=chance.choice([24, 36]),
        max_position_embeddings=64,
        activation_function=chance.choice(ACTIVATIONS),
        scale_embedding=chance.random() < 0.6,
        pad_token_id=pad,
        eos_token_id=0,
        forced_eos_token_id=0,
        decoder_start_token_id=pad,
        share_encoder_decoder_embeddings=share,
        tie_word_embeddings=chance.random() < 0.8,
    )
    model = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(torch.randn_like(parameter) * chance.choice([0.05, 0.1, 0.2]))
        tables = (
            model.model.encoder.embed_tokens.weight,
            model.model.decoder.embed_tokens.weight,
            model.lm_head.weight,
        )
        for table in {id(table): table for table in tables}.values():
            table.normal_(0, chance.choice([1.0, 2.0]) * config.d_model**-0.5)
        model.final_logits_bias.normal_(0, 0.7)
        model.final_logits_bias[0, 0] += chance.choice([0.0, 1.0, 2.0])
    return model


def random_generation(chance: random.Random, pad: int) -> dict[str, Any]:
    beams = chance.choice([1, 2, 3, 4, 5, 8])
    options: dict[str, Any] = {
        "max_length": chance.choice([5, 10, 20, 40]),
        "num_beams": beams,
        "pad_token_id": pad,
        "eos_token_id": 0,
        "decoder_start_token_id": pad,
        "bad_words_ids": [[pad]],
        "forced_eos_token_id": chance.choice([0, 0, 0, None]),
    }
    if beams > 1:
        options["num_return_sequences"] = chance.randint(1, beams)
        options["length_penalty"] = chance.choice([1.0, 0.6, 0.0, 2.0, -0.5])
        options["early_stopping"] = chance.choice([True, False, False, "never"])
    rare = {"renormalize_logits": True, "no_repeat_ngram_size": 2, "min_length": 3, "suppress_tokens": [5, 7]}
    return options | {name: value for name, value in rare.items() if chance.random() < 0.2}


def random_source(chance: random.Random, size: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = chance.choice([1, 2, 5]), chance.choice([3, 7, 12])
    source = torch.randint(1, size - 1, (rows, width))
    source[source == pad] = 1
    lengths = torch.tensor([width] + [chance.randint(1, width) for _ in range(rows - 1)])
    source[torch.arange(rows), lengths - 1] = 0
    mask = torch.arange(width) < lengths[:, None]
    return source.masked_fill(~mask, pad), mask


def test_logits_and_generation(figure: Callable[..., None]) -> None:
    """Every id of every hypothesis is the same, and scores are near."""
    chance = random.Random(7)
    worst, worst_score, runs, hypotheses = 0.0, 0.0, 0, 0
    for seed in range(COUNT):
        theirs = random_model(chance, seed)
        options = {**theirs.config.to_dict()}
        ours: Any = PEERS["transformers/Marian"].from_peer({"model": options}, theirs.state_dict())
        source, mask = random_source(chance, options["vocab_size"], ours.ids.pad)
        target = torch.cat([source.new_full((len(source), 1), ours.ids.pad), source[:, :2]], 1)
        with torch.no_grad():
            logits = theirs(input_ids=source, attention_mask=mask.long(), decoder_input_ids=target).logits
        said = ours.run({"in.src": source, "in.src_mask": mask, "in.decoder_input_ids": target})["out.logits"]
        worst = max(worst, (said - logits).abs().max().item())
        for _ in range(6):
            generation = random_generation(chance, ours.ids.pad)
            theirs.generation_config = transformers.GenerationConfig(**generation)
            theirs.config.forced_eos_token_id = generation["forced_eos_token_id"]
            settings = replace(settings_from_peer(generation, ours.ids), rules=RULES)
            wanted = theirs.generate(
                input_ids=source, attention_mask=mask.long(), return_dict_in_generate=True, output_scores=True
            )
            found = [one for rows in ours.generate(source, mask, settings) for one in rows]
            ids = [[*one.ids, *[0] * one.ended] for one in found]
            expected = [[i for i in row[1:] if i != ours.ids.pad] for row in wanted.sequences.tolist()]
            assert ids == expected, (seed, generation)
            if settings.num_beams > 1:
                apart = [
                    abs(one.score - score) for one, score in zip(found, wanted.sequences_scores.tolist(), strict=True)
                ]
                worst_score = max(worst_score, *apart)
            runs, hypotheses = runs + 1, hypotheses + len(ids)
    figure(
        "parity", f"Marian models against transformers {transformers.__version__}", models=COUNT, runs=runs,
        hypotheses=hypotheses, different=0, worst_logit=worst, worst_score=worst_score,
    )  # fmt: skip
    assert worst < 2e-5
    assert worst_score < 1e-3


def test_odd_texts(tmp_path: Path, figure: Callable[..., None]) -> None:
    """The same ids for texts of all sorts on both sides, and the same texts for ids of all sorts."""
    write_peer_folder(tmp_path / "peer")
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path / "peer")
    import_folder(tmp_path / "peer", tmp_path / "ours")
    ours = load_tokenizer(tmp_path / "ours")
    chance = random.Random(3)
    heads = [*CODES, ""] if RELEASE < (5, 0) else [*CODES, ">>xyz<<", ">>", ""]  # 4 cut codes out of the middle
    parts = ["</s>", "<pad>", "<unk>", *" aé½▁.日😀", "e\u0301", "\u2028", "\t", "\x00"]
    parts += [*ENGLISH, *GERMAN, "Tee", "ﬁ", "İ", "\u00a0", "\ufeff", "\r"] + (
        [] if RELEASE < (5, 0) else ["<<", ">>", "<s>"]
    )
    texts = ["", *ENGLISH, *GERMAN]
    texts += [chance.choice(heads) + "".join(chance.choices(parts, k=chance.randint(0, 8))) for _ in range(1500)]
    for text in texts:
        assert theirs(text)["input_ids"] == [*ours.source.encode(text), 0], repr(text)
        assert theirs(text_target=text)["input_ids"] == [*ours.target.encode(text), 0], repr(text)
    rows = [chance.choices(range(ours.target.vocab_size), k=chance.randint(0, 20)) for _ in range(1500)]
    cleaned = {"clean_up_tokenization_spaces": False}  # what 4 does where nothing is said
    assert ours.target.decode_batch(rows) == theirs.batch_decode(rows, skip_special_tokens=True, **cleaned)
    name = f"Marian texts against transformers {transformers.__version__}"
    figure("parity", name, encoded=2 * len(texts), decoded=len(rows), different=0)


def test_whole_folders(tmp_path: Path) -> None:
    """Their folder, ours, theirs again: all three translate the same."""
    from manyheads import Translator

    write_peer_folder(tmp_path / "peer", generation={"max_length": 30, "num_beams": 4}, max_position_embeddings=128)
    import_folder(tmp_path / "peer", tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "back", "transformers/Marian")
    texts = [*ENGLISH, ">>fra<< A man", "</s>"]
    found = []
    for name in ("peer", "back"):
        model = transformers.MarianMTModel.from_pretrained(tmp_path / name).eval()
        tokenizer = transformers.MarianTokenizer.from_pretrained(tmp_path / name)
        ids = model.generate(**tokenizer(texts, return_tensors="pt", padding=True))
        found.append(tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    assert (
        found[0]
        == found[1]
        == Translator.from_pretrained(tmp_path / "ours").translate(texts, rules=RULES, keep_words=False)
    )
