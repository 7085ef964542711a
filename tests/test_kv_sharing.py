"""B32, B33, B34, B55, B56, B58: keys and values shared between layers, K = V, and per-layer inputs."""

from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import BFLOAT16, FOUR_BIT, Case, Recorded, Trio, assert_close, assert_same, run

from straightline.runtime import HiddenTap


def taps_of(case: Case, lengths: tuple[int, ...], cached: bool = True) -> list[mx.array]:
    """Logits and every tap of a 12-token run of the generated file, each compared with mlx-lm on the way."""
    trio = Trio(case, None if cached else lambda: None)
    ids = case.tokens(2, sum(lengths))
    parts = []
    for length in lengths:
        logits = trio(ids[:, :length])
        parts.append([logits, *(case.plain.rows[index] for index in case.everything)])
        ids = ids[:, length:]
    return [mx.concatenate(list(one), axis=1) for one in zip(*parts, strict=True)]


def test_no_cache_and_fresh_cache() -> None:
    """B33: without a cache, KV sharing works the same; logits and every tap have the bits of a run with a cache."""
    case = Case(toys.E6)
    assert_same(taps_of(case, (12,), cached=False), taps_of(case, (12,)), "logits and taps")


@pytest.mark.parametrize("lengths", [(1,) * 12, (5, 7), (11, 1), (2, 3, 7)], ids=str)
def test_all_schedules_agree(lengths: tuple[int, ...]) -> None:
    """B33, B34: one pass, no cache, single steps and 5 + 7 agree in logits and every tap.

    Each has mlx-lm's bits at its own schedule (Trio); between schedules matmul shapes, hence rounding, differ.
    """
    case = Case(toys.E6)
    whole = taps_of(case, (12,), cached=False)
    parts = taps_of(case, lengths)
    for index, (found, expected) in enumerate(zip(parts, whole, strict=True)):
        assert_close(found, expected, f"tap {index - 2}")
    assert mx.array_equal(parts[0].argmax(-1), whole[0].argmax(-1)).item()


def test_readers_get_the_offset_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """B34: queries of a reader turn by the source's offset before the update, as the source's own do."""
    case = Case(toys.E6)
    caches = case.model.make_cache()
    recorded = Recorded(mx.fast.rope)
    monkeypatch.setattr(mx.fast, "rope", recorded)
    seen = 0
    for length in (5, 1, 7, 1):
        case.model(case.tokens(1, length), cache=caches)
        calls = recorded.take()
        assert len(calls) == 2 * 3 + 3  # three layers turn keys and queries, three readers queries only
        assert [mx.array(call[1]["offset"]).item() for call in calls] == [seen] * 9
        seen += length


def test_readers_use_their_own_source() -> None:
    """A sliding reader reads the last sliding owner, a full reader the last full one, and no earlier layer."""
    case = Case(toys.E6)
    text = case.model.model.layers
    assert [layer.self_attn.has_kv for layer in text] == [True] * 3 + [False] * 3
    ids = case.tokens(1, 6)

    def changed_taps(layer: int) -> set[int]:
        """Taps that change at position 0 when only keys and values of a layer do: attention to one key is its value."""
        before, after = HiddenTap(case.everything), HiddenTap(case.everything)
        case.model(ids, tap=before)
        attention = case.model.model.layers[layer].self_attn
        kept = attention.v_proj.weight
        attention.v_proj.weight = mx.random.normal(kept.shape, key=mx.random.key(5))
        case.model(ids, tap=after)
        attention.v_proj.weight = kept
        return {i for i in case.everything if not mx.array_equal(before.captured[i], after.captured[i]).item()}

    assert changed_taps(2) == {2, 3, 4, 5, 6}
    assert changed_taps(1) == {1, 2, 3, 4, 5, 6}
    run(case, (6, 1))


def test_where_values_fork() -> None:
    """B32: V is the scale-free norm of the raw k_proj output, without RoPE, transposed once."""
    for length in (1, 8):
        case = Case(toys.D6)
        assert case.config["attention_k_eq_v"]
        caches, tap = case.model.make_cache(), HiddenTap(case.everything)
        case.model(case.tokens(2, length), cache=caches, tap=tap)
        for index in (2, 5):
            layer = case.model.model.layers[index]
            raw = layer.self_attn.k_proj(layer.input_layernorm(tap.captured[index - 1])).reshape(2, length, 1, 64)
            values = mx.fast.rms_norm(raw, None, 1e-6).transpose(0, 2, 1, 3)
            keys = mx.fast.rms_norm(raw, layer.self_attn.k_norm.weight, 1e-6).transpose(0, 2, 1, 3)
            assert_same(caches[index].values[..., :length, :], values, f"values of layer {index}")
            assert_same(caches[index].keys[..., :length, :], layer.self_attn.rope(keys), f"keys of layer {index}")
        run(case, (length, 1), batch=2)


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("quantize", [None, FOUR_BIT], ids=["plain", "4-bit"])
def test_per_layer_inputs_in_a_batch(length: int, quantize: Any) -> None:
    """B55: each row of a batch is its solo run (close: a batch is a larger matmul, which may round differently)."""
    case = Case(toys.E6, quantize=quantize)
    ids = case.tokens(3, length)
    together = Trio(case)(ids)
    for row in range(3):
        assert_close(together[row : row + 1], Trio(case)(ids[row : row + 1]), f"row {row}")


def test_per_layer_inputs_in_chunks() -> None:
    """B56: prompt 20 in steps of 7 gives what one pass gives."""
    case = Case(toys.E6)
    chunks = mx.concatenate(run(case, (7, 7, 6)), axis=1)
    (whole,) = run(case, (20,))
    assert_close(chunks, whole, "logits")
    assert mx.array_equal(chunks.argmax(-1), whole.argmax(-1)).item()


@pytest.mark.parametrize("embedded", [False, True])
def test_a_callers_per_layer_inputs_in_chunks(embedded: bool) -> None:
    """B56: a caller's own inputs, cut as the prompt is, with taps: as plain mlx-lm, and as one pass; then ids go on."""
    case = Case(toys.E6)
    model, inner = case.model, case.plain.model.model
    model.dispatch.strict = False
    ids = case.tokens(2, 20)
    given = {"per_layer_inputs": inner._get_per_layer_inputs(ids) * 2}
    if embedded:
        given["input_embeddings"] = inner.embed_tokens(ids)
    caches, tap = (model.make_cache(), case.plain.model.make_cache()), HiddenTap(case.everything)
    chunks = []
    for start in (0, 7, 14):
        cut = slice(start, start + 7)
        part = {name: value[:, cut] for name, value in given.items()}
        expected = case.plain(ids[:, cut], cache=caches[1], **part)
        chunks.append(model(ids[:, cut], cache=caches[0], tap=tap, **part))
        assert_same(chunks[-1], expected, "logits")
        assert_same({i: tap.captured[i] for i in case.everything}, {i: case.plain.rows[i] for i in case.everything}, "")
    assert_close(mx.concatenate(chunks, axis=1), model(ids, **given), "one pass")
    last = ids[:, :1]
    assert_same(model(last, cache=caches[0]), case.plain(last, cache=caches[1]), "ids alone")
    assert model.dispatch.counts == {"generated": 1, "monolith": 4}
    assert model.dispatch.reasons.keys() == {
        f"{'input_embeddings' if embedded else 'per_layer_inputs'} are given, file "
        f"{'expects token ids' if embedded else 'computes its own'}"
    }


@pytest.mark.parametrize("cached", [False, True])
def test_embeddings_go_to_the_monolith(cached: bool) -> None:
    """B58, B56: embeddings and a caller's per-layer inputs go to mlx-lm's code, with taps, and agree with ids."""
    case = Case(toys.E6)
    model, inner = case.model, case.plain.model.model
    model.dispatch.strict = False
    ids = case.tokens(2, 7)
    embeddings = inner.embed_tokens(ids)
    extra = inner._get_per_layer_inputs(ids)
    for count, given in enumerate(
        ({"input_embeddings": embeddings}, {"input_embeddings": embeddings, "per_layer_inputs": extra}), start=1
    ):
        caches = [model.make_cache() if cached else None for _ in range(3)]
        tap = HiddenTap(case.everything)
        found = model(ids, cache=caches[0], tap=tap, **given)
        assert model.dispatch.counts == {"generated": count - 1, "monolith": count}
        assert model.dispatch.last == ("monolith", "input_embeddings are given, file expects token ids")
        assert_same(found, case.plain(ids, cache=caches[1], **given), "logits")
        assert_same({i: tap.captured[i] for i in case.everything}, {i: case.plain.rows[i] for i in case.everything}, "")
        assert_same(found, model(ids, cache=caches[2]), "ids alone")
    assert_same(model(None, input_embeddings=embeddings), case.plain(None, input_embeddings=embeddings), "no ids")
    assert_same(model(ids, per_layer_inputs=extra * 2), case.plain(ids, per_layer_inputs=extra * 2), "own inputs")
    assert model.dispatch.last == ("monolith", "per_layer_inputs are given, file computes its own")
    assert not mx.array_equal(model(ids, per_layer_inputs=extra * 2), model(ids)).item()


def test_monolith_and_generated_calls_share_a_cache() -> None:
    """One conversation may change path in the middle: embeddings first, then ids."""
    case = Case(toys.E6, dtype=BFLOAT16)
    case.model.dispatch.strict = False
    ids = case.tokens(1, 12)
    embeddings = case.plain.model.model.embed_tokens(ids[:, :9])
    mine, plain = case.model.make_cache(), case.model.make_cache()
    for given in ({"inputs": None, "input_embeddings": embeddings}, {"inputs": ids[:, 9:]}):
        given = dict(given)
        inputs = given.pop("inputs")
        assert_same(case.model(inputs, cache=mine, **given), case.plain(inputs, cache=plain, **given), "logits")
    assert case.model.dispatch.counts == {"generated": 1, "monolith": 1}
