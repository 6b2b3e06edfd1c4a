"""What `make bench` measures: for each task the sides that take turns, and which of ours is held against which peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

__all__ = ["TASKS", "Comparison", "Entry", "against_baseline"]


@dataclass(frozen=True)
class Entry:
    """A side; see `harness.Side`.

    Attributes:
        where: in our environment or the peers', in ours with one thread, or in ours with the code of the baseline.
        shares: it leaves something for those after it, or finds it, in a folder, which is its option `folder`.
    """

    name: str
    build: str
    options: Mapping[str, Any] = field(default_factory=dict)
    where: Literal["ours", "peers", "one thread", "baseline"] = "ours"
    shares: bool = False

    @property
    def in_bf16(self) -> bool:
        """Whether its products are in bf16, as its options say."""
        given = self.options
        return bool(given.get("bf16")) or given.get("precision") == "bf16" or given.get("dtype") == "bfloat16"


@dataclass(frozen=True)
class Comparison:
    """Sides that take turns with one another.

    Attributes:
        title: heads its tables.
        unit: what a side does so many of a second.
        entries: the sides, built in this order.
        pairs: (ours, peer) by name: the ratios.
        pace: times the seconds of a turn that were asked for.
        step_seconds: what one step of the slowest side takes on a machine that can do it, if that is longer than a
            turn: a side is too slow by a multiple of the longer of the two.
        has_products: the machine's products take turns with the sides, whose share of them is told.
        other_kind: peers of another architecture, whose parameters need not be within 5% of ours, as others' must.
    """

    title: str
    unit: str
    entries: tuple[Entry, ...]
    pairs: tuple[tuple[str, str], ...] = ()
    pace: float = 1.0
    step_seconds: float = 4.0
    has_products: bool = True
    other_kind: tuple[str, ...] = ()

    @property
    def needs_peers(self) -> bool:
        return any(entry.where == "peers" for entry in self.entries)


def against_baseline(comparison: Comparison, commit: str) -> Comparison:
    """Our sides beside the same sides at another commit, in place of peers.

    A peer stays where our sides need what it leaves in the shared folder.
    """
    ours = [entry for entry in comparison.entries if entry.where == "ours"]
    sources = [entry for entry in comparison.entries if entry.where == "peers" and entry.shares]
    old = {entry.name: replace(entry, name=f"{entry.name}, at {commit}", where="baseline") for entry in ours}
    return replace(
        comparison,
        entries=(*sources, *(side for entry in ours for side in (entry, old[entry.name]))),
        pairs=tuple((name, entry.name) for name, entry in old.items()),
    )


def _peer(task: str, peer: str, precision: str = "fp32", named: str | None = None, **options: Any) -> Entry:
    given = {"task": task, "peer": peer, "bf16": precision == "bf16", **options}
    return Entry(named or f"{peer}, {precision}", "peers_shared:build", given, "peers")


def _seq2seq(precision: str) -> Comparison:
    peers = {
        "torch.nn.Transformer": _peer("seq2seq-train", "torch.nn.Transformer", precision),
        "MarianMT": _peer("seq2seq-train", "transformers MarianMT", precision),
        "x-transformers": Entry(
            f"x-transformers, {precision}", "peer_xtransformers:seq2seq", {"bf16": precision == "bf16"}, "peers"
        ),
    }
    ours = {
        like: Entry(f"manyheads as {like}, {precision}", "ours:seq2seq", {"precision": precision, "like": like})
        for like in peers
    }
    return Comparison(
        title=f"Training an encoder-decoder, {precision}: 3 + 3 layers, 256/1024, 4 heads, vocabulary 8,000,"
        " 64 x 32 tokens, label smoothing 0.1",
        unit="tokens/s",
        entries=tuple(entry for like in peers for entry in (ours[like], peers[like])),
        pairs=tuple((ours[like].name, peers[like].name) for like in peers),
    )


def _xl(task: str, build: str, title: str) -> Comparison:
    """The peer in bf16 is tried, so that the table says what comes of it."""
    peer = "transformers 4.35 TransfoXL"
    theirs = {precision: _peer(task, peer, precision) for precision in ("fp32", "bf16")}
    ours = {precision: Entry(f"manyheads, {precision}", build, {"precision": precision}) for precision in theirs}
    pairs = (("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"))
    return Comparison(
        title=f"{title}; 6 layers, 256/1024, 4 heads of 64, vocabulary 10,000",
        unit="tokens/s",
        entries=(*ours.values(), *theirs.values()),
        pairs=tuple((ours[mine].name, theirs[other].name) for mine, other in pairs),
    )


def _reformer(length: int, precision: str) -> Comparison:
    task = f"reformer-train-{length // 1024}k"
    names = ("transformers Reformer", "reformer-pytorch", "exact SDPA decoder")
    peers = [_peer(task, name, precision) for name in names]
    ours = Entry(f"manyheads, {precision}", "ours:reformer", {"precision": precision, "length": length})
    return Comparison(
        title=f"Training a Reformer on {length:,} tokens, {precision}: 4 layers, 256/1024, 4 heads, chunks of 64,"
        " 4 rounds",
        unit="tokens/s",
        entries=(ours, *peers),
        pairs=tuple((ours.name, peer.name) for peer in peers),
        step_seconds=length / 512,  # of a peer in fp32 on two cores with AVX2
        other_kind=(peers[2].name,),
    )


def _decoder_training(precision: str) -> Comparison:
    ours = Entry(f"manyheads, {precision}", "ours:decoder_training", {"precision": precision})
    peer = Entry(f"transformers GPT-2, {precision}", "peer_gpt2:training", {"bf16": precision == "bf16"}, "peers")
    return Comparison(
        title=f"Training a decoder, {precision}: GPT-2 with 4 layers, 256/1024, 4 heads, vocabulary 10,000, 16 x 128"
        " tokens",
        unit="tokens/s",
        entries=(ours, peer),
        pairs=((ours.name, peer.name),),
    )


def _decoder_generation(rows: int) -> Comparison:
    """Ours with and without compiled steps."""
    ours = [
        Entry(
            f"manyheads, fp32{', compiled' * compiles}", "ours:decoder_generation", {"rows": rows, "compiles": compiles}
        )
        for compiles in (False, True)
    ]
    peer = Entry("transformers GPT-2, fp32", "peer_gpt2:generation", {"rows": rows}, "peers")
    return Comparison(
        title=f"Generating greedily with it, {rows} row{'s' * (rows > 1)}: prompts of 32 tokens, 128 new ones",
        unit="tokens/s",
        entries=(*ours, peer),
        pairs=tuple((side.name, peer.name) for side in ours),
    )


def _decoding(task: str, how: str) -> Comparison:
    marian = replace(_peer(task, "transformers MarianMT"), shares=True)
    ours = [
        Entry(
            f"manyheads, {precision}{', compiled' * compiles}",
            "ours:decode",
            {"precision": precision, "compiles": compiles},
            shares=True,
        )
        for compiles in (False, True)
        for precision in ("fp32", "bf16")
    ]
    others = [_peer(task, f"CTranslate2 {kind}", named=f"CTranslate2, {kind}") for kind in ("float32", "int8")]
    return Comparison(
        title=f"Decoding {how}, MarianMT's weights, in fp32 the same ids: 32 sentences of 32 tokens, 64 tokens forced",
        unit="tokens/s",
        entries=(marian, *ours, *others),
        pairs=tuple((side.name, peer.name) for side in ours for peer in (marian, *others)),
    )


def _shortlist(vocab_size: int) -> Comparison:
    """Without peers: what a shortlist gains."""
    whole, *sides = (
        Entry(
            f"{f'shortlist {count}' if count else 'the whole vocabulary'}, fp32",
            "ours:shortlisted",
            {"vocab_size": vocab_size, "count": count},
        )
        for count in (0, 50, 100)
    )
    return Comparison(
        title=f"Decoding greedily with a shortlist, vocabulary {vocab_size:,}: 3 + 3 layers, 256/1024, 4 heads,"
        " 32 sentences of 32 tokens, 64 tokens forced",
        unit="tokens/s",
        entries=(whole, *sides),
        pairs=tuple((side.name, whole.name) for side in sides),
        has_products=False,
    )


def _attention(batch: int, length: int, precision: str) -> Comparison:
    names = {"ours": "MultiHeadAttention", "torch": "nn.MultiheadAttention", "bare": "a bare block around SDPA"}
    shape = {"precision": precision, "batch": batch, "length": length}
    entries = {kind: Entry(name, "ours:attention", {"kind": kind, **shape}) for kind, name in names.items()}
    return Comparison(
        title=f"Attention alone, {precision}: ({batch}, {length}, 512), 8 heads, forward and backward",
        unit="tokens/s",
        entries=tuple(entries.values()),
        pairs=(("MultiHeadAttention", names["torch"]), ("MultiHeadAttention", names["bare"])),
        pace=0.25,
    )


_PROGRAMS = ("bare interpreter", "manyheads --help")
_PREPARED = ("pairs", "pairs, tokenizer given", "text")

TASKS: dict[str, tuple[Comparison, ...]] = {
    "seq2seq-train": (_seq2seq("bf16"), _seq2seq("fp32")),
    "xl-train": (_xl("xl-train", "ours:xl_training", "Training a Transformer-XL: segment 128, memory 128, 16 lanes"),),
    "xl-eval": (
        _xl("xl-eval", "ours:xl_evaluation", "Evaluating one: segment 64, memory 640, clamp 400, same_length, 8 lanes"),
    ),
    "reformer-train-4k": (_reformer(4096, "bf16"), _reformer(4096, "fp32")),
    "reformer-train-16k": (_reformer(16_384, "bf16"), _reformer(16_384, "fp32")),
    "decoder-train": (_decoder_training("fp32"), _decoder_training("bf16")),
    "decoder-generate": (_decoder_generation(1), _decoder_generation(8)),
    "decode-greedy": (_decoding("decode-greedy", "greedily"),),
    "decode-beam4": (_decoding("decode-beam4", "with 4 beams"),),
    "decode-shortlist": (_shortlist(8000), _shortlist(32_000)),
    "attention": tuple(
        _attention(batch, length, precision)
        for batch, length in ((8, 512), (64, 64), (300, 14))
        for precision in ("fp32", "bf16")
    ),
    "start-up": (
        Comparison(
            title="Starting the program",
            unit="starts/s",
            entries=tuple(Entry(name, "ours_data:start_up", {"program": name}) for name in _PROGRAMS),
            pairs=(("manyheads --help", "bare interpreter"),),
            pace=0.5,
            has_products=False,
        ),
    ),
    "data": (
        Comparison(
            title="Preparing and tokenising the embedded corpora, one thread",
            unit="MB/s",
            entries=(
                *(Entry(f"prepare {what}", "ours_data:prepare", {"what": what}, "one thread") for what in _PREPARED),
                Entry("encode_batch alone", "ours_data:tokenise", {}, "one thread"),
            ),
            pace=0.5,
            has_products=False,
        ),
        Comparison(
            title="Waiting for data: training steps of the preset demo",
            unit="steps/s",
            entries=tuple(
                Entry(f"manyheads, {precision}", "ours_data:data_loading", {"precision": precision})
                for precision in ("bf16", "fp32")
            ),
            has_products=False,
        ),
    ),
}
