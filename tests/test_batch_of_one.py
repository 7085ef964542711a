"""A lone request in mlx-lm's batch caches: its single tokens go through `decode`, and nobody can tell."""

import copy
import gc
import random
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import assert_same, assert_same_caches
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from pairs import Pair, four_bit, pair
from test_batches import generated_tokens
from test_decode_check import with_decode
from test_in_place import leasing, same_strides

from straightline.runtime import HiddenTap, specialize
from straightline.runtime.in_place import lease_of
from straightline.runtime.in_place.lease import PATIENCE
from straightline.runtime.kv.batch_of_one import sequence_of
from straightline.runtime.kv.borrowed import borrow


class Batch:
    """The same calls to both sides over batch caches; every logit and, when asked, every attribute compared."""

    def __init__(self, pair: Pair, rows: int = 1, empty: bool = False, prompt: int = 3) -> None:
        self.pair, self.rows, self.calls = pair, rows, 0
        self.vocab = pair.plain.args.vocab_size
        solo = [[side.make_cache() for side in (pair.model, pair.plain)] for _ in range(rows)]
        for row, sides in enumerate(solo):
            if not empty:
                ids = toys.tokens(1, prompt + 2 * row, self.vocab, seed=row)
                mx.eval([side(ids, cache=cache) for side, cache in zip((pair.model, pair.plain), sides, strict=True)])
        self.caches = [
            [one.merge([row[side][i] for row in solo]) for i, one in enumerate(solo[0][side])] for side in range(2)
        ]

    def step(self, length: int = 1, **how: Any) -> None:
        self.calls += 1
        ids = toys.tokens(self.rows, length, self.vocab, self.calls)
        ours, theirs = self.pair.model(ids, cache=self.caches[0], **how), self.pair.plain(ids, cache=self.caches[1])
        assert_same(ours, theirs, f"logits of call {self.calls}")

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def each(self, change: Any) -> None:
        for caches in self.caches:
            for cache in caches:
                change(cache)

    def same(self) -> None:
        assert_same_caches(*self.caches)

    @property
    def alone(self) -> bool:
        return sequence_of(self.caches[0]) is not None


@pytest.fixture(params=sorted(toys.SHORT))
def batch(request: pytest.FixtureRequest) -> Batch:
    return Batch(four_bit(toys.SHORT[request.param]))


def decoded(model: Any) -> Counter[str]:
    """Counts the calls of `decode` and `forward` from now on."""
    counts: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        return call

    bound = model._bound
    bound.routes = tuple(
        route._replace(decode=counting("decode", route.decode), forward=counting("forward", route.forward))
        for route in bound.routes
    )
    return counts


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 30])
def test_left_as_mlx_lm_leaves_them(batch: Batch, steps: int) -> None:
    """Before, at and after the wrap of a window of 8, and over growth."""
    counts = decoded(batch.pair.model)
    batch.decode(steps)
    assert batch.alone
    batch.same()
    assert not batch.alone
    assert counts == ({"forward": 1, "decode": steps - 1} if steps > 1 else {"forward": 1})
    batch.decode(5)
    assert batch.alone
    batch.same()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", ["12b", "26b", "e4b"])
def test_in_half_precision(shape: str, dtype: str) -> None:
    batch = Batch(four_bit(toys.SHORT[shape], dtype=getattr(mx, dtype)))
    batch.decode(12)
    assert batch.alone
    batch.same()


def test_from_empty_caches() -> None:
    """As BatchGenerator begins: a prompt in chunks, then steps."""
    batch = Batch(four_bit(toys.SHORT["e4b"]), empty=True)
    for length in (5, 6, 2, 1, 1, 1):
        batch.step(length)
    assert batch.alone
    batch.same()


def test_blocks_and_taps(batch: Batch) -> None:
    """A block needs the mask, so it finds batch caches. A tapped token does not; an edited stream takes `forward`."""
    batch.decode(3)
    batch.step(4)
    assert not batch.alone
    batch.decode(12)
    rows = []
    tap = HiddenTap([0, 2])
    batch.step(tap=tap)
    assert batch.alone and set(tap.captured) == {0, 2}
    batch.step(tap=HiddenTap([1], edit=lambda index, row: rows.append(index) or row))
    assert rows == [1] and not batch.alone
    batch.same()


def test_the_monolith_in_between(batch: Batch) -> None:
    batch.decode(4)
    ids = toys.tokens(1, 1, batch.vocab, 77)
    ours = batch.pair.model.monolith(ids, cache=batch.caches[0])
    assert_same(ours, batch.pair.plain(ids, cache=batch.caches[1]), "logits")
    assert not batch.alone
    batch.decode(9)
    batch.same()


def test_joined_by_another_and_left_alone_again(batch: Batch) -> None:
    """A second request joins and ends, and the first goes on; then the other way round, with its padding."""
    for keep in ([0], [1]):
        other = Batch(batch.pair, prompt=5)
        other.decode(3)
        batch.decode(6)
        assert batch.alone and other.alone
        for mine, added in zip(batch.caches, other.caches, strict=True):
            for cache, one in zip(mine, added, strict=True):
                cache.extend(one)
        batch.rows = 2
        batch.decode(2)
        assert not batch.alone
        batch.each(lambda cache, keep=keep: cache.filter(mx.array(keep)))
        batch.rows = 1
        batch.decode(9)
        batch.same()


def test_one_row_with_padding_is_not_taken() -> None:
    batch = Batch(four_bit(toys.SHORT["12b"]), rows=2)
    batch.decode(2)
    batch.each(lambda cache: cache.filter(mx.array([0, 1])))
    for caches in batch.caches:
        for cache in caches:
            cache.keys, cache.values = cache.keys[:1], cache.values[:1]
            cache.offset, cache.left_padding = cache.offset[:1], cache.left_padding[:1]
    batch.rows = 1
    counts = decoded(batch.pair.model)
    batch.decode(5)
    assert not batch.alone and counts == {"forward": 5}
    batch.same()


def test_one_row_given_back(batch: Batch) -> None:
    """As a request ends: extracted into caches of its own, which go on by themselves."""
    batch.decode(11)
    singles = [[cache.extract(0) for cache in caches] for caches in batch.caches]
    assert {type(one) for one in singles[0]} <= {KVCache, RotatingKVCache}
    batch.decode(3)
    for length in (1, 3, 1, 1):
        ids = toys.tokens(1, length, batch.vocab, 5)
        assert_same(batch.pair.model(ids, cache=singles[0]), batch.pair.plain(ids, cache=singles[1]), "logits after it")
    batch.same()


GROWING, RING = BatchKVCache, BatchRotatingKVCache


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (GROWING, "left_padding", [1]),
        (GROWING, "_idx", 5),
        (RING, "left_padding", [1]),
        (RING, "max_size", 6),
        (RING, "step", 2),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_anything_set(kind: type, name: str, value: Any) -> None:
    """Of these caches alone, and of what a batch cache keeps while its rows are lent too."""
    batch = Batch(four_bit(toys.D6))
    batch.decode(4)
    assert batch.alone
    fresh = mx.array if name == "left_padding" else int  # mlx-lm subtracts from that array in place
    batch.each(lambda cache: setattr(cache, name, fresh(value)) if isinstance(cache, kind) else None)
    batch.decode(9)
    batch.same()


def test_numbers_of_another_kind() -> None:
    """Left as they are: int64, and growth by other steps than those of the caches of one sequence."""
    for change in (
        lambda cache: setattr(cache, "offset", cache.offset.astype(mx.int64)),
        lambda cache: setattr(cache, "step", 4),
    ):
        batch = Batch(four_bit(toys.D6))
        batch.each(change)
        batch.decode(7)
        assert not batch.alone
        batch.same()


def test_a_prompt_longer_than_the_window_before() -> None:
    """The next turn of a conversation: mlx-lm counts a merged ring from its rows, not from the tokens it has seen."""
    batch = Batch(four_bit(toys.SHORT["e4b"]), prompt=30)
    counts = decoded(batch.pair.model)
    batch.step(3)
    batch.decode(8)
    assert batch.alone and counts == {"forward": 2, "decode": 7}
    batch.same()
    batch.decode(3)
    batch.each(lambda cache: cache.extend(copy.deepcopy(cache)))
    batch.rows = 2
    batch.decode(2)
    batch.same()


@pytest.mark.parametrize(("steps", "padded"), [(1, 4), (12, 1)])
def test_left_alone_with_padding(steps: int, padded: int) -> None:
    """The shorter of two prompts stays: its ring is taken once no padding is left in it, at the next look."""
    batch = Batch(four_bit(toys.SHORT["12b"]), rows=2)
    batch.decode(steps)
    batch.each(lambda cache: cache.filter([0]))
    batch.rows = 1
    counts = decoded(batch.pair.model)
    batch.decode(20)
    assert batch.alone and counts == {"forward": padded, "decode": 20 - padded}
    batch.same()
    batch.decode(5)
    batch.same()


@pytest.mark.parametrize("layers", [0, 2, 5])
def test_interrupted(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is in some layers only: mlx-lm's masks no longer fit all of them, and ours neither."""
    batch = Batch(four_bit(toys.D6))
    batch.decode(4)
    assert batch.alone
    for model, caches in zip((batch.pair.model, batch.pair.plain), batch.caches, strict=True):
        with monkeypatch.context() as patch:
            interrupt(patch, layers)
            with pytest.raises(KeyboardInterrupt):
                model(toys.tokens(1, 1), cache=caches)
    outcomes = [
        outcome(lambda model=model, caches=caches: model(toys.tokens(1, 1), cache=caches))
        for model, caches in zip((batch.pair.model, batch.pair.plain), batch.caches, strict=True)
    ]
    assert_same(*outcomes, "what the next token gives")
    batch.same()


def test_interrupted_while_rows_are_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is in; no cache has lost its rows."""
    batch, calls = Batch(four_bit(toys.D6)), iter(range(2))

    def interrupting(*arguments: Any) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        borrow(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("straightline.runtime.kv.batch_of_one.borrow", interrupting)
        batch.pair.model(toys.tokens(1, 1), cache=batch.caches[0])
    batch.pair.plain(toys.tokens(1, 1), cache=batch.caches[1])
    batch.same()
    batch.decode(9)
    assert batch.alone
    batch.same()


def interrupt(patch: pytest.MonkeyPatch, layers: int) -> None:
    """After so many updates of caches, of whatever class."""
    calls = iter(range(layers))

    def interrupting(update: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return update(*arguments)

        return call

    for kind in (KVCache, RotatingKVCache, BatchKVCache, BatchRotatingKVCache):
        patch.setattr(kind, "update_and_fetch", interrupting(kind.update_and_fetch))


def outcome(call: Any) -> Any:
    """What it gives, or the message it fails with."""
    try:
        logits = call()
        mx.eval(logits)
    except ValueError as error:
        return str(error)
    return logits


def test_read_from_a_file(tmp_path: Path) -> None:
    """mlx-lm's own lack what `__init__` alone sets, and go on without."""
    batch = Batch(four_bit(toys.config(layer_types=[toys.FULL] * 6)))
    batch.decode(3)
    for number, caches in enumerate(batch.caches):
        save_prompt_cache(str(tmp_path / f"{number}.safetensors"), caches)
        batch.caches[number] = load_prompt_cache(str(tmp_path / f"{number}.safetensors"))
    batch.decode(3)
    assert batch.alone
    batch.same()


def test_dropped_caches_are_freed() -> None:
    batch = Batch(four_bit(toys.D6))
    batch.decode(4)
    sequence = sequence_of(batch.caches[0])
    assert sequence is not None
    left = [weakref.ref(cache) for cache in [*batch.caches[0], *sequence]]
    gc.disable()
    try:
        del sequence
        batch.caches[0].clear()
        assert not any(cache() for cache in left)
    finally:
        gc.enable()


def test_copies(batch: Batch) -> None:
    batch.decode(6)
    copied = copy.deepcopy(batch.caches[0])
    assert [type(one) for one in copied] == [type(one) for one in batch.caches[1]]
    expected = copy.deepcopy(batch.caches[1])
    batch.decode(3)
    assert_same_caches(copied, expected)
    assert type(batch.caches[0][0]).__name__ == type(batch.caches[1][0]).__name__


def test_in_another_order_or_in_part() -> None:
    batch = Batch(four_bit(toys.SHORT["12b"]))
    batch.decode(4)
    caches = batch.caches[0]
    assert sequence_of(list(caches)) is not None
    assert sequence_of(caches[::-1]) is None
    assert sequence_of(caches[:-1]) is None
    assert sequence_of(tuple(caches)) is None
    swapped = [list(side) for side in batch.caches]
    for side in swapped:
        side[0], side[1] = side[1], side[0]
    ids = toys.tokens(1, 1, batch.vocab, 4)
    assert_same(batch.pair.model(ids, cache=swapped[0]), batch.pair.plain(ids, cache=swapped[1]), "logits")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", sorted(toys.SHAPES))
def test_anything_in_any_order(shape: str, seed: int) -> None:
    """In all their layers."""
    draw = random.Random(seed)
    batch = Batch(four_bit(toys.SHAPES[shape]), prompt=draw.choice([1, 3, 8, 20]))
    model = batch.pair.model

    def look(name: str) -> None:
        for caches in batch.caches:
            getattr(draw.choice(caches[-1:]), name)

    for _ in range(12):
        do = draw.choice(["decode", "decode", "block", "read", "trim", "copy", "order", "save", "extend", "monolith"])
        if do == "decode":
            batch.decode(draw.randrange(1, 12))
        elif do == "block":
            batch.step(draw.choice([2, 5, 9]))
        elif do == "read":
            look(draw.choice(["keys", "offset", "left_padding", "_idx", "state", "nbytes"]))
        elif do == "trim":
            if all(cache.is_trimmable() for cache in batch.caches[1]):
                batch.each(lambda cache: cache.trim(2))
        elif do == "copy":
            batch.caches = [copy.deepcopy(caches) for caches in batch.caches]
        elif do == "order":
            batch.each(lambda cache: cache.filter(mx.array([0])))
        elif do == "save":
            batch.each(lambda cache: setattr(cache, "state", cache.state))
        elif do == "extend":
            batch.each(lambda cache: cache.extend(copy.deepcopy(cache)))
            batch.rows = 2
            batch.decode(draw.randrange(1, 4))
            batch.each(lambda cache: cache.filter(mx.array([1])))
            batch.rows = 1
        else:
            ids = toys.tokens(1, 1, batch.vocab, 3)
            assert_same(
                model.monolith(ids, cache=batch.caches[0]), batch.pair.plain(ids, cache=batch.caches[1]), "monolith"
            )
    batch.same()
    batch.decode(3)
    batch.same()


@pytest.mark.parametrize("shape", ["12b", "e4b"])
def test_in_place_too(shape: str) -> None:
    """The sequence behind a batch of one is leased as any other."""
    batch = Batch(leasing(shape))
    batch.decode(PATIENCE + 12)
    sequence = sequence_of(batch.caches[0])
    assert sequence is not None and lease_of(sequence) is not None
    batch.same()
    batch.decode(PATIENCE + 3)
    batch.step(3)
    batch.decode(PATIENCE + 3)
    batch.same()


@pytest.mark.usefixtures("keys_as_values")
@pytest.mark.parametrize(("prompt", "by_token"), [(20, True), (8, True), (7, False)])
@pytest.mark.parametrize("shape", ["12b", "e4b"])
def test_rows_as_the_model_gave_them_stay_as_they_lie(shape: str, prompt: int, by_token: bool) -> None:
    """A ring of a batch keeps a first call of its size and more so."""
    batch = Batch(leasing(shape), empty=True)
    batch.step(prompt)
    for _ in range(2):
        batch.decode(PATIENCE + 12)
        sequence = sequence_of(batch.caches[0])
        assert sequence is not None
        lease = lease_of(sequence)
        assert lease is not None and lease.by_token == by_token
        batch.same()
        same_strides(*batch.caches)
    batch.step(3)
    batch.decode(PATIENCE + 3)
    batch.same()


@pytest.mark.parametrize("shape", sorted(toys.SHORT))
def test_batch_generator(shape: str) -> None:
    """A lone request is decoded but for its first token; so are those who are left alone."""
    models = four_bit(toys.SHORT[shape])
    vocab = models.plain.args.vocab_size
    for prompts, limits, least in (([9], [20], 19), ([3, 12], [4, 25], 10)):
        ids = [toys.tokens(1, length, vocab, length)[0].tolist() for length in prompts]
        counts = decoded(models.model)
        found = generated_tokens(models.model, ids, limits, completion=2, prefill=1)
        assert found == generated_tokens(models.plain, ids, limits, completion=2, prefill=1)
        assert counts["decode"] >= least
    assert models.model.dispatch.counts["monolith"] == 0


@pytest.mark.usefixtures("on_a_gpu")
def test_what_a_mask_changes_is_seen_at_load() -> None:
    """On a device where a mask that masks nothing moves a bit, batch caches go through `forward` as before."""
    base = toys.build(toys.D6)
    file = pair(toys.D6).model._bound.files[0]

    def forward(w: Any, ids: Any, caches: Any, tap: Any) -> Any:
        logits = file.forward(w, ids, caches, tap)
        return logits if hasattr(caches[0], "keep") else logits * 1.0000001

    module = with_decode(file, file.decode)
    module.forward = forward  # type: ignore[attr-defined]
    model = specialize(base, module, strict=True)
    assert model.dispatch.decode_reason == ""
    assert model.dispatch.batch_reason.startswith("its logits differ from those of forward at step 0: ")
    caches = [one.merge([one]) for one in model.make_cache()]
    for length in (3, 1, 1, 1):
        model(toys.tokens(1, length), cache=caches)
    assert sequence_of(caches) is None
    right = specialize(base, file, strict=True)
    assert right.dispatch.batch_reason == ""
    right(toys.tokens(1, 1), cache=caches)
    assert sequence_of(caches) is not None
    model(toys.tokens(1, 1), cache=caches)  # lent by the other, and no decode here
    assert sequence_of(caches) is None


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("straightline.runtime.bound.on_gpu", lambda: True)
