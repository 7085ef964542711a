"""B52, B53 (and B51, B55): mlx-lm's batch caches on the generated path: padding, merge, extend, filter, extract.

Every call is compared with mlx-lm's bits (Trio). Rows against solo runs are close: a batch is a larger matmul.
"""

import copy
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import BFLOAT16, FLOAT32, FOUR_BIT, Case, Recorded, Trio, assert_close, assert_same
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from straightline.runtime import StraightlineError

SHAPED = pytest.mark.parametrize("config", [toys.D6, toys.M6, toys.E6], ids=["D6", "M6", "E6"])


def merged(caches: list[list[Any]]) -> list[Any]:
    """As mlx-lm's BatchGenerator joins the caches of separate requests."""
    return [same_layer[0].merge(list(same_layer)) for same_layer in zip(*caches, strict=True)]


def solo(case: Case, ids: mx.array, lengths: list[int]) -> list[mx.array]:
    """The logits of each call of one request alone, on the plain model."""
    caches, logits = case.model.make_cache(), []
    for length in lengths:
        logits.append(case.plain(ids[:, :length], cache=caches))
        ids = ids[:, length:]
    return logits


@SHAPED
@pytest.mark.parametrize("padding", [[0], [0, 5], [3, 0, 5, 1], [5, 4, 3, 2, 1]], ids=str)
def test_left_padding(config: dict[str, Any], padding: list[int]) -> None:
    """B52: prompts padded on the left, a chunk, then steps through the wrap; each row is its solo run."""
    case = Case(config)
    trio = Trio(case, lambda: case.batch_caches(padding))
    lengths = [7, 4, 1, 1, 1, 3, 1]
    ids = case.tokens(len(padding), sum(lengths))
    start, calls = 0, []
    for length in lengths:
        calls.append(trio(ids[:, start : start + length]))
        start += length
    for row, pad in enumerate(padding):
        alone = solo(case, ids[row : row + 1, pad:], [7 - pad, *lengths[1:]])
        assert_close(calls[0][row : row + 1, pad:], alone[0], f"row {row}")
        for index in range(1, len(lengths)):
            assert_close(calls[index][row : row + 1], alone[index], f"row {row}, call {index}")
    assert case.model.dispatch.counts == {"generated": len(lengths), "monolith": 0}


@pytest.mark.parametrize("quantize", [None, FOUR_BIT], ids=["plain", "4-bit"])
@pytest.mark.parametrize("config", [toys.D6, toys.E6], ids=["D6", "E6"])
def test_left_padding_in_bfloat16(config: dict[str, Any], quantize: Any) -> None:
    case = Case(config, dtype=BFLOAT16, quantize=quantize, outer=True)
    trio = Trio(case, lambda: case.batch_caches([2, 0, 5]))
    for length in (6, 1, 9, 1, 1):
        trio(case.tokens(3, length))


def test_queries_turn_by_the_offset_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """B52: a batch cache rebinds its offsets at the update; every layer, readers too, uses those from before."""
    case = Case(toys.E6)
    caches = case.batch_caches([0, 5])
    recorded = Recorded(mx.fast.rope)
    monkeypatch.setattr(mx.fast, "rope", recorded)
    offset = mx.array([0, -5])
    for length in (7, 1, 4, 1):
        case.model(case.tokens(2, length), cache=caches)
        calls = recorded.take()
        assert [call[1]["offset"].tolist() for call in calls] == [offset.tolist()] * 9
        offset = offset + length


@SHAPED
def test_merge_of_separately_filled_caches(config: dict[str, Any]) -> None:
    """B51, B53: requests of 5, 8 and 20 tokens at window 8, each filled alone on the generated path, then together."""
    case = Case(config)
    lengths = [5, 8, 20]
    ids = case.tokens(3, 25)
    singles = [Trio(case) for _ in lengths]
    for row, (single, length) in enumerate(zip(singles, lengths, strict=True)):
        single(ids[row : row + 1, :length])
    trio = Trio(case)
    trio.generated, trio.monolith, trio.plain = (
        merged([single.caches[which] for single in singles]) for which in range(3)
    )
    assert {type(cache) for cache in trio.generated} == {BatchKVCache, BatchRotatingKVCache}
    for step in range(4):
        column = mx.stack([ids[row, length + step] for row, length in enumerate(lengths)])[:, None]
        together = trio(column)
        for row, single in enumerate(singles):
            assert_close(together[row : row + 1], single(column[row : row + 1]), f"row {row}, step {step}")
    trio(case.tokens(3, 3))


@SHAPED
def test_extend_filter_extract(config: dict[str, Any]) -> None:
    """A batch grows by another and by an empty one, loses rows, and gives one row back as a single request."""
    case = Case(config)
    first, second = Trio(case, lambda: case.batch_caches([1, 0])), Trio(case, lambda: case.batch_caches([0, 2, 4]))
    first(case.tokens(2, 4))
    second(case.tokens(3, 11, seed=2))
    second(case.tokens(3, 1, seed=3))
    for mine, other in zip(first.caches, second.caches, strict=True):
        for cache, added in zip(mine, other, strict=True):
            cache.extend(added)
    first(case.tokens(5, 1, seed=4))
    first(case.tokens(5, 1, seed=5))
    first.each(lambda cache: cache.filter(mx.array([0, 2, 4])))
    first(case.tokens(3, 1, seed=6))
    first(case.tokens(3, 4, seed=7))
    single = Trio(case)
    single.generated, single.monolith, single.plain = (
        [cache.extract(1) for cache in caches] for caches in first.caches
    )
    for length in (1, 3, 1):
        single(case.tokens(1, length, seed=8))


def test_an_empty_batch_extended_by_a_filled_one() -> None:
    case = Case(toys.D6)
    empty, filled = Trio(case, lambda: case.batch_caches([0])), Trio(case, lambda: case.batch_caches([0, 3]))
    filled(case.tokens(2, 10))
    for mine, other in zip(empty.caches, filled.caches, strict=True):
        for cache, added in zip(mine, other, strict=True):
            cache.extend(added)
    for length in (1, 1, 2):
        empty(case.tokens(3, length))


@SHAPED
def test_right_padding(config: dict[str, Any]) -> None:
    """B53: prompts padded on the right between prepare and finalize, in chunks, as BatchGenerator's prompt phase."""
    case = Case(config)
    lengths = [13, 4, 9]
    padding = [13 - length for length in lengths]
    ids = case.tokens(3, 13)
    trio = Trio(case, lambda: case.batch_caches([0, 0, 0]))
    trio.each(lambda cache: cache.prepare(lengths=lengths, right_padding=padding))
    for start, stop in ((0, 6), (6, 11), (11, 13)):
        trio(ids[:, start:stop])
    trio.each(lambda cache: cache.finalize())
    for step in range(3):
        trio(case.tokens(3, 1, seed=step))
    assert case.model.dispatch.counts["monolith"] == 0


@SHAPED
def test_right_padded_rows_equal_solo_runs(config: dict[str, Any]) -> None:
    case = Case(config)
    lengths = [12, 4, 9]
    ids = case.tokens(3, 12)
    trio = Trio(case, lambda: case.batch_caches([0, 0, 0]))
    trio.each(lambda cache: cache.prepare(lengths=lengths, right_padding=[12 - length for length in lengths]))
    trio(ids[:, :6])
    trio(ids[:, 6:])
    trio.each(lambda cache: cache.finalize())
    following = case.tokens(3, 3, seed=9)
    calls = [trio(following[:, step : step + 1]) for step in range(3)]
    for row, length in enumerate(lengths):
        whole = mx.concatenate([ids[row : row + 1, :length], following[row : row + 1]], axis=1)
        alone = solo(case, whole, [length, 1, 1, 1])
        for step in range(3):
            assert_close(calls[step][row : row + 1], alone[step + 1], f"row {row}, step {step}")


def generated_tokens(
    model: Any, prompts: list[list[int]], limits: list[int], completion: int = 3, prefill: int = 2
) -> list[list[int]]:
    """mlx-lm's continuous batching: requests join and leave as they come and end.

    completion, prefill: how many are generated for, and how many prompts are read, at a time.
    """
    batch = BatchGenerator(
        model,
        prefill_step_size=5,
        completion_batch_size=completion,
        prefill_batch_size=prefill,
        stream=mx.default_stream(mx.cpu),
    )
    uids = batch.insert(copy.deepcopy(prompts), limits)
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := batch.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    batch.close()
    return [found[uid] for uid in uids]


@SHAPED
def test_batch_generator(config: dict[str, Any]) -> None:
    """mlx-lm's BatchGenerator takes a specialized model unchanged, on the generated path throughout (strict)."""
    case = Case(config)
    ids = case.tokens(5, 24)
    prompts = [ids[row, :length].tolist() for row, length in enumerate([3, 12, 7, 21, 1])]
    limits = [6, 11, 3, 9, 12]
    found = generated_tokens(case.model, prompts, limits)
    assert found == generated_tokens(case.plain.model, prompts, limits)
    assert [len(one) for one in found] == limits
    assert case.model.dispatch.counts["generated"] > 20
    assert case.model.dispatch.counts["monolith"] == 0


@SHAPED
def test_generate_step(config: dict[str, Any]) -> None:
    """mlx-lm's own generation loop: tokens and log probabilities equal, prompt in steps of 7, past three windows."""
    case = Case(config)
    prompt = case.tokens(1, 20)[0]
    mine, plain = (
        list(generate_step(prompt, model, max_tokens=14, prefill_step_size=7))
        for model in (case.model, case.plain.model)
    )
    for (token, logprobs), (expected, expected_logprobs) in zip(mine, plain, strict=True):
        assert token == expected
        assert_same(logprobs, expected_logprobs, "log probabilities")
    assert case.model.dispatch.counts["monolith"] == 0
    assert case.model.dispatch.counts["generated"] >= 16


def test_a_batch_cache_of_one_kind() -> None:
    """Batch caches in the full layers, plain rings in the others: served, with mlx-lm's numbers."""
    case = Case(toys.D6, dtype=FLOAT32)

    def make() -> list[Any]:
        plain, batch = case.plain.model.make_cache(), case.batch_caches([0])
        return [batch[i] if kind == toys.FULL else plain[i] for i, kind in enumerate(toys.D6["layer_types"])]

    trio = Trio(case, make)
    for length in (4, 1, 9, 1):
        trio(case.tokens(1, length))


def test_mixed_layouts_in_one_kind() -> None:
    """One mask serves all layers of a kind, so their caches must be of one layout; refused on either path."""
    case = Case(toys.D6)
    plain, batch = case.model.make_cache(), case.batch_caches([0])
    caches = [plain[0], batch[1], *plain[2:]]
    reason = (
        "cache 1 is BatchRotatingKVCache, but cache 0 is RotatingKVCache, and one mask serves all sliding layers; "
        "expected caches of one make_cache"
    )
    for strict, message in ((True, f"strict: the generated file cannot serve this call: {reason}"), (False, reason)):
        case.model.dispatch.strict = strict
        with pytest.raises(StraightlineError) as error:
            case.model(case.tokens(1, 4), cache=caches)
        assert str(error.value) == message
    assert case.model.dispatch.counts["generated"] == 0
    assert all(cache.keys is None for cache in caches)
