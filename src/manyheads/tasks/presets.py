"""Complete runs by name: model, data and training loop.

Runs of language models with the sizes of the papers. `presets.PRESETS` names them.
"""

from __future__ import annotations

from dataclasses import replace

from manyheads.data.settings import DataSettings, SegmentSettings
from manyheads.decoding.settings import DecodingSettings, GenerationSettings
from manyheads.evaluation.reading import Reading
from manyheads.models.decoder.config import PRESETS as DECODERS
from manyheads.models.reformer.config import PRESETS as REFORMERS
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.transformer.config import PRESETS as TRANSFORMERS
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer_xl.config import PRESETS as XLS
from manyheads.tasks.language_modelling.settings import TextConfig, TextValidationSettings
from manyheads.tasks.translation.settings import TrainConfig, ValidationSettings
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import (
    OptimiserSettings,
    ScheduleSettings,
    TokenInitialSettings,
    TrainingSettings,
)


def debug() -> TrainConfig:
    """Every part of a run in under 5 seconds on a CPU: the copy task, two small layers, twenty steps."""
    return TrainConfig(
        run_dir="runs/debug",
        precision="fp32",
        num_threads=1,
        data=DataSettings(
            path="copy-task", max_tokens=512, max_source_len=128, max_target_len=128, accumulate=2, num_train_pairs=500
        ),
        tokenizer=TokenizerSettings(kind="word", vocab_size=32),
        model=TRANSFORMERS["debug"],
        optimiser=OptimiserSettings(learning_rate=3e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="inverse_sqrt", warmup_steps=10),
        training=TrainingSettings(max_steps=20, log_every=5, save_every=10, ema_decay=0.99, keep=2),
        validation=ValidationSettings(every_steps=10, bleu_sentences=8, num_samples=2),
        decoding=DecodingSettings(num_beams=2, max_len_offset=10),
    )


def copy() -> TrainConfig:
    """The copy task (Annotated Transformer): unseen sequences are copied exactly in under a minute on two cores."""
    return TrainConfig(
        run_dir="runs/copy",
        precision="fp32",
        num_threads=1,
        data=DataSettings(path="copy-task", max_tokens=768, max_source_len=32, max_target_len=32),
        tokenizer=TokenizerSettings(kind="word", vocab_size=64),
        model=TransformerConfig(
            d_model=64,
            num_heads=4,
            d_ff=128,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dropout=0.0,
            norm_position="pre",
        ),
        optimiser=OptimiserSettings(learning_rate=5e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="cosine", warmup_steps=50),
        training=TrainingSettings(max_steps=500, label_smoothing=0.0, log_every=20, save_every=250, keep=2),
        validation=ValidationSettings(every_steps=250, bleu_sentences=100, num_samples=3),
        decoding=DecodingSettings(num_beams=1, max_len_offset=10),
    )


def demo(precision: str = "bf16") -> TrainConfig:
    """A translator from 60,000 embedded sentence pairs in five minutes on two cores.

    Small batches, two layers, Muon, distances in place of positions, and embeddings that begin from co-occurrence,
    because the time allows only a few passes over the data, so more steps help more than more layers. See
    experiments/demo.md.

    Args: precision: of the run. In fp32 a machine has a quarter of the speed or less, and a smaller model learns more
        in the same time.
    """
    is_fast = precision == "bf16"
    return TrainConfig(
        run_dir="runs/demo",
        data=DataSettings(max_tokens=2048, max_source_len=128, max_target_len=128, pad_to_multiple=2),
        tokenizer=TokenizerSettings(vocab_size=8000, normalize_spaces=True),
        model=TransformerConfig(
            d_model=256 if is_fast else 192,
            num_heads=4,
            d_ff=1024 if is_fast else 768,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dropout=0.0,
            norm_position="pre",
            positions="none",
            relative_bias=16,
        ),
        optimiser=OptimiserSettings(
            name="muon",
            learning_rate=6e-3 if is_fast else 0.01,
            muon_learning_rate=0.02 if is_fast else 0.03,
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        schedule=ScheduleSettings(kind="linear", warmup_steps=50 if is_fast else 20),
        training=TrainingSettings(max_steps=0, max_minutes=5.0, log_every=20, save_every=500, keep=2),
        validation=ValidationSettings(every_steps=500, bleu_sentences=100, num_samples=3),
        # After few steps the model prefers sentences that are too short.
        decoding=DecodingSettings(num_beams=4, length_penalty=1.2, max_len_offset=20),
        initial=TokenInitialSettings(embeddings="cooccurrence"),
    )


def sample() -> TrainConfig:
    """The translator of `manyheads sample-model`: the demo's smaller size and its data, 30 minutes on two cores.

    About ten epochs, so with dropout. Steps, precision, threads and seed are fixed, so that it can be trained again.
    """
    small = demo("fp32")
    return replace(
        small,
        run_dir="runs/sample-model",
        seed=1,
        device="cpu",
        precision="fp32",
        num_threads=2,
        model=replace(small.model, dropout=0.1),
        optimiser=replace(small.optimiser, learning_rate=6e-3, muon_learning_rate=0.02),
        schedule=ScheduleSettings(kind="linear", warmup_steps=100),
        training=replace(small.training, max_steps=2400, max_minutes=0.0, save_every=200),
        validation=replace(small.validation, every_steps=400, bleu_sentences=-1),
    )


def tiny() -> TrainConfig:
    """Multi30k as in Wu et al. 2021 (ACL), sec. 4.1: joint BPE of 10K, Adam at 0.005, 8,000 updates, beam 5.

    data.path must be set to the prepared corpus.
    """
    return TrainConfig(
        run_dir="runs/tiny",
        data=DataSettings(max_tokens=8192, max_source_len=128, max_target_len=128),
        tokenizer=TokenizerSettings(vocab_size=10_000),
        model=TRANSFORMERS["tiny"],
        optimiser=OptimiserSettings(learning_rate=5e-3, beta2=0.98, eps=1e-9),
        schedule=ScheduleSettings(kind="inverse_sqrt", warmup_steps=2000),
        training=TrainingSettings(max_steps=8000, log_every=50, save_every=400, keep=10),
        validation=ValidationSettings(every_steps=400, bleu_sentences=200),
        decoding=DecodingSettings(num_beams=5),
    )


def base() -> TrainConfig:
    """Vaswani et al. 2017, table 3 "base" and sec. 5: 25K + 25K tokens a step, Noam with 4,000, 100K steps."""
    return TrainConfig(
        run_dir="runs/base",
        data=DataSettings(max_tokens=25_000),
        tokenizer=TokenizerSettings(vocab_size=37_000),
        model=TRANSFORMERS["base"],
        training=TrainingSettings(max_steps=100_000, save_every=1500, keep=5),
        validation=ValidationSettings(every_steps=1500),
    )


def big() -> TrainConfig:
    """Vaswani et al. 2017, table 3 "big": 300K steps, the last 20 checkpoints for averaging."""
    small = base()
    training = replace(small.training, max_steps=300_000, keep=20)
    return replace(small, run_dir="runs/big", model=TRANSFORMERS["big"], training=training)


def xl_debug() -> TextConfig:
    """A language model's run in seconds on a CPU: a little Transformer-XL on the bytes of the embedded novel."""
    return TextConfig(
        run_dir="runs/xl-debug",
        precision="fp32",
        num_threads=1,
        data=SegmentSettings(lanes=4, segment_len=16, accumulate=2),
        model=XLS["debug"],
        optimiser=OptimiserSettings(learning_rate=3e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="inverse_sqrt", warmup_steps=10),
        training=TrainingSettings(
            max_steps=20, label_smoothing=0.0, log_every=5, save_every=10, ema_decay=0.99, keep=2
        ),
        validation=TextValidationSettings(every_steps=10, sample_tokens=40, prompt="He "),
        reading=Reading(segment_len=32, memory_len=32, max_tokens=2000),
    )


def xl_demo() -> TextConfig:
    """Crime and Punishment, byte by byte, in ten minutes on two cores; a sample is printed as it learns.

    Muon, as in `demo`. Ten minutes are at most six passes over the novel, too few to overfit: no dropout.
    """
    return TextConfig(
        run_dir="runs/xl-demo",
        data=SegmentSettings(lanes=16, segment_len=128),
        model=XLS["demo"],
        optimiser=OptimiserSettings(name="muon", learning_rate=3e-3, muon_learning_rate=0.02, clip_norm=1.0),
        schedule=ScheduleSettings(kind="linear", warmup_steps=50),
        training=TrainingSettings(
            max_steps=0, max_minutes=10.0, label_smoothing=0.0, log_every=20, save_every=200, keep=2
        ),
        validation=TextValidationSettings(every_steps=400, sample_tokens=300, prompt="Raskolnikov "),
        reading=Reading(segment_len=128, memory_len=256, max_tokens=20_000),
        generation=GenerationSettings(temperature=0.8),
    )


def lm_demo() -> TextConfig:
    """`xl-demo` with a decoder alone, as GPT and Llama: each segment of 256 bytes is read by itself, without memory."""
    return replace(
        xl_demo(),
        run_dir="runs/lm-demo",
        data=SegmentSettings(lanes=8, segment_len=256),
        model=DECODERS["demo"],
        reading=Reading(segment_len=256, max_tokens=20_000),
    )


def reformer_debug() -> TextConfig:
    """A Reformer's run in seconds on a CPU: two small layers, local and hashed, on the bytes of the embedded novel."""
    small = xl_debug()
    return replace(
        small,
        run_dir="runs/reformer-debug",
        data=SegmentSettings(lanes=4, segment_len=48, accumulate=2),
        model=REFORMERS["debug"],
        validation=TextValidationSettings(every_steps=10, sample_tokens=20, prompt="He "),
        reading=Reading(segment_len=64, max_tokens=2000),
    )


def reformer_demo(precision: str = "bf16") -> TextConfig:
    """Crime and Punishment in segments of 16,384 bytes, on two cores; each byte sees the text of its chapter before it.

    Three local layers attend to near positions and a hashed layer to far ones, as in trax's enwik8 model. Scores of
    local layers decrease with the distance, by amounts that are trained. If they did not, the first hundred steps or
    more would learn only which byte follows which.

    Args: precision: of the run. In fp32 the pieces are 4,096 bytes long: ten minutes are enough for only about 180
        steps of 16,384 bytes, and the loss depends mostly on the number of steps.
    """
    length, side = (16_384, 128) if precision == "bf16" else (4_096, 64)
    return TextConfig(
        run_dir="runs/reformer-demo",
        data=SegmentSettings(lanes=1, segment_len=length),
        model=ReformerConfig(
            d_model=192,
            num_heads=4,
            head_dim=48,
            d_ff=768,
            num_layers=4,
            layers=("local", "local", "lsh", "local"),
            max_len=length,
            axial_shape=(side, side),
            axial_dims=(96, 96),
            local_chunk_len=64,
            local_slopes=True,
            train_slopes=True,
            chunk_len=64,
            num_hashes=2,
            ff_chunk_len=4096,
            dropout=0.0,
        ),
        optimiser=OptimiserSettings(name="muon", learning_rate=3e-3, muon_learning_rate=0.02, clip_norm=1.0),
        schedule=ScheduleSettings(kind="linear", warmup_steps=20),
        training=TrainingSettings(
            max_steps=0, max_minutes=10.0, label_smoothing=0.0, log_every=10, save_every=50, keep=2
        ),
        validation=TextValidationSettings(
            every_steps=50 if precision == "bf16" else 200, sample_tokens=300, prompt="Raskolnikov "
        ),
        reading=Reading(segment_len=length, lanes=1, max_tokens=16_384),
        generation=GenerationSettings(temperature=0.8),
    )


def million() -> TextConfig:
    """A Reformer that reads the embedded novel, 1,044,000 bytes, as one sequence. A step takes minutes and 18 GiB.

    That is what `info million --length 1048576` predicts in fp32; in bf16, which it takes where that is faster, it
    predicts 14 GiB, and 14.5 were measured. In fp32, steps of up to 262,144 bytes were measured; docs/long-sequences.md
    has the figures.
    """
    return TextConfig(
        run_dir="runs/million",
        data=SegmentSettings(lanes=1, segment_len=1 << 20),
        model=REFORMERS["million"],
        optimiser=OptimiserSettings(learning_rate=1e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="constant", warmup_steps=10),
        training=TrainingSettings(max_steps=100, label_smoothing=0.0, log_every=1, save_every=5, keep=2),
        validation=TextValidationSettings(every_steps=20, num_samples=0),
        reading=Reading(segment_len=1 << 20, lanes=1),
    )


def enwik8() -> TextConfig:
    """A Reformer for enwik8 in sequences of 65,536 bytes (Kitaev et al. 2020, sec. 5): a batch of 8, 20K steps.

    Set data.path to the prepared corpus. Schedule and optimiser are those of `imagenet64`.
    """
    return TextConfig(
        run_dir="runs/enwik8",
        data=SegmentSettings(path="data/enwik8", lanes=8, segment_len=65_536, accumulate=8),
        model=REFORMERS["enwik8"],
        optimiser=OptimiserSettings(learning_rate=1.0),
        schedule=ScheduleSettings(kind="noam", warmup_steps=8000),
        training=TrainingSettings(max_steps=20_000, label_smoothing=0.0, save_every=1000),
        validation=TextValidationSettings(every_steps=1000),
        reading=Reading(segment_len=65_536, lanes=1),
    )


def imagenet64() -> TextConfig:
    """A Reformer for ImageNet64 (Kitaev et al. 2020, sec. 5): pictures of 12,288 bytes, a batch of 8.

    Set data.path to the prepared pictures. The optimiser and its schedule are those of trax
    (`configs/reformer_imagenet64.gin`).
    """
    return TextConfig(
        run_dir="runs/imagenet64",
        data=SegmentSettings(
            path="data/imagenet64", lanes=8, segment_len=12_288, documents="separate", order="shuffled", accumulate=8
        ),
        model=REFORMERS["imagenet64"],
        optimiser=OptimiserSettings(learning_rate=1.0),
        schedule=ScheduleSettings(kind="noam", warmup_steps=8000),
        training=TrainingSettings(max_steps=500_000, label_smoothing=0.0, save_every=1000),
        validation=TextValidationSettings(every_steps=1000),
        reading=Reading(segment_len=12_288, lanes=8, documents="separate"),
    )
