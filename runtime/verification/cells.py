"""The cells of `straightline verify`, in order; the last is the control."""

import time
from collections.abc import Iterator

import mlx.core as mx

from ..arrays import same_bits
from ..taps import HiddenTap
from .control import control
from .proof import Proof
from .walks import Row, Walk, more_walks, run_walk, walks

BESIDE_WALKS = 3  # taps, one position, control


def cell_count(proof: Proof, steps: int) -> int:
    return sum(len(walk.cells) for walk in _walks(proof, steps)) + BESIDE_WALKS


def cells(proof: Proof, steps: int, seed: int) -> Iterator[Row]:
    """Each as soon as it is known."""
    for number, walk in enumerate(_walks(proof, steps)):
        model = proof.quantized if walk.caches.startswith("kv") else proof.model
        yield from run_walk(walk, proof.oracle, model, proof.vocabulary, seed + number, proof.kv_config)
    yield _taps(proof, seed, "taps: every layer against untapped", None)
    yield _taps(proof, seed, "taps: one position", -3)
    yield control(proof.oracle, proof.model, proof.vocabulary)


def _walks(proof: Proof, steps: int) -> tuple[Walk, ...]:
    more = more_walks(proof.window, steps, kv=proof.kv_config is not None)
    return walks(proof.window, steps) + more


def _taps(proof: Proof, seed: int, cell: str, position: int | None) -> Row:
    """A tapped forward gives the logits of an untapped one, and one position the rows of all."""
    start = time.perf_counter()
    sentinel = len(proof.oracle.layers)
    ids = mx.random.randint(0, proof.vocabulary, (2, proof.window + 3), key=mx.random.key(seed))
    every, some = HiddenTap(range(-1, sentinel + 1)), HiddenTap(range(-1, sentinel + 1), position)
    expected = proof.oracle(ids)
    logits = proof.model(ids, tap=some)
    proof.model.monolith(ids, tap=every)
    departs = "" if same_bits(expected, logits) else "logits of the tapped forward"
    for index, rows in every.captured.items():
        wanted = rows if position is None else rows[:, ids.shape[1] + position :][:, :1]
        if not departs and not same_bits(wanted, some.captured[index]):
            departs = f"tap {index}"
    return Row(cell, departs, time.perf_counter() - start)
