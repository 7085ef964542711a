"""Decoding into the caches' own rows, on the CPU: the kernel is stood in for by one that writes to memory just so.

What is tested is everything around it: that rows are nobody else's, that caches show the right ones at any time and are
mlx-lm's again for whoever asks, and that the bits are those of an untouched model.
"""

import copy
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import toys
from comparing import assert_same
from memory import settled
from mlx_lm.models.cache import can_trim_prompt_cache, load_prompt_cache, save_prompt_cache, trim_prompt_cache
from pairs import Pair, four_bit, text

from straightline.generated import gemma4_e4b
from straightline.runtime import HiddenTap
from straightline.runtime.decode_check import in_place_refused
from straightline.runtime.in_place import lease_of
from straightline.runtime.in_place.lease import PATIENCE
from straightline.runtime.in_place.sites import (
    InPlace,
    _into,
    _over_slots,
    copies_of,
    in_place,
    in_place_sites,
    over_rows_by_token,
)
from straightline.runtime.kernels import Attention, AttentionScores, QKVRope, QKVRopeInto, sites_of
from straightline.runtime.kernels.backends import Backend
from straightline.runtime.kernels.resolve import forget
from straightline.runtime.kv.make import caches_for
from straightline.runtime.taps import no_tap

SHAPES = sorted(toys.SHORT)
WRONG = "its logits differ from those of forward at step {}: at flat index "
pytestmark = pytest.mark.usefixtures("keys_as_values")


def writes_in_place(site: QKVRopeInto) -> Any:
    """What the kernel does: q is a result, k and v go to memory behind MLX's back."""

    def call(*inputs: mx.array) -> mx.array:
        *own, keys, values, ring, after = inputs
        mx.eval(keys, values, after)
        q, k, v = site.rope.plain(*own)
        mx.eval(q, k, v)
        write_heads(own[3], ring, [(np.array(keys, copy=False), k), (np.array(values, copy=False), v)])
        grouped: mx.array = q.reshape(site.shapes(1)[0])
        return grouped

    return call


def write_heads(position: mx.array, ring: mx.array, pairs: Any) -> None:
    """pairs: of keys and of values, a numpy view of the buffer and the heads of the token."""
    at: Any = position.item()
    shift, count, *steps = np.array(ring).tolist()
    row = (at + shift) % count
    for (buffer, heads), head_step, row_step in zip(pairs, steps[::2], steps[1::2], strict=True):
        _, kv_heads, _, head_dim = heads.shape
        buffer.reshape(-1, head_dim)[np.arange(kv_heads) * head_step + row * row_step] = np.array(heads)[0, :, 0]


def writes_nothing(site: QKVRopeInto) -> Any:
    return lambda *inputs: site.plain(*inputs)[0]


def in_one_launch(site: AttentionScores) -> Any:
    def kernel(inputs: tuple[mx.array, ...], output_shapes: tuple[tuple[int, ...], ...], **how: Any) -> list[Any]:
        scores = site.plain(*inputs)
        assert isinstance(scores, mx.array) and output_shapes == (scores.shape,)
        return [scores]

    larger = AttentionScores(site.heads, 2, 256)  # there is no kernel for heads as small as a toy's
    return site.launched(larger.program("cuda"), kernel, mx.bfloat16)


def in_place_calls(route: Any, file: Any) -> InPlace:
    sites = sites_of(file)
    calls = dict(vars(route.sites))
    for name, site in sites.items():
        over = _over_slots(name, site, sites)
        if isinstance(over, QKVRopeInto):
            calls[name] = _into(writes_in_place(over))
        elif isinstance(over, Attention):
            calls[name] = over.over_views(in_one_launch(over.scores))
        elif over is not None:
            calls[name] = over.plain
    del calls["sliding_layer"], calls["full_layer"]
    copies = {name: site.plain for name, site in copies_of(sites).items()}
    by_token = in_place(calls | over_rows_by_token(sites, calls, copies)) if copies else None
    # The stand-in for the kernel evaluates, which nothing can in a trace.
    return in_place(calls)._replace(by_token=by_token).uncompiled()


def leasing(shape: str, window: int = 8, shapes: dict[str, Any] = toys.SHORT, **how: Any) -> Pair:
    """A pair whose specialized side writes in place."""
    pair = four_bit(shapes[shape] | {"sliding_window": window}, **how)
    bound = pair.model._bound
    bound.routes = tuple(
        route._replace(in_place=in_place_calls(route, file))
        for route, file in zip(bound.routes, bound.files, strict=True)
    )
    return pair


class Walk:
    """The same calls to both sides of a pair; every logit compared."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.vocab = text(pair.model).args.vocab_size
        self.caches = pair.model.make_cache(), pair.plain.make_cache()
        self.calls = 0

    def step(self, length: int = 1, **how: Any) -> mx.array:
        ids = toys.tokens(1, length, self.vocab, self.calls)
        self.calls += 1
        ours, theirs = self.pair.model(ids, cache=self.caches[0], **how), self.pair.plain(ids, cache=self.caches[1])
        mx.eval(ours, theirs)
        assert_same(ours, theirs, f"logits of call {self.calls}")
        return ours

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @property
    def leased(self) -> bool:
        return lease_of(self.caches[0]) is not None

    def same_caches(self) -> None:
        """Ends the lease."""
        for index, (mine, other) in enumerate(zip(*self.caches, strict=True)):
            for name, value in zip(("keys", "values"), other.state, strict=False):
                assert_same(getattr(mine, name), value, f"{name} of cache {index}")
            assert mine.state[2:] == other.state[2:]
            assert type(mine).__name__ == type(other).__name__

    def same_strides(self) -> None:
        """Ends the lease."""
        same_strides(*self.caches)


def same_strides(ours: list[Any], theirs: list[Any]) -> None:
    """Of a token's heads, of a head's tokens and within a row: MLX's bits depend on them on CUDA."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in ("keys", "values"):
            one, two = getattr(mine, name), getattr(other, name)
            mx.eval(one, two)
            found = zip(one.shape, memoryview(one).strides, memoryview(two).strides, strict=True)
            assert all(size == 1 or a == b for size, a, b in found), f"{name} of cache {index}"


@pytest.mark.parametrize("prompt", [20, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_layers(shape: str, prompt: int) -> None:
    """Full rings and a kernel that writes nothing: the same token through functions and through compiled ones."""
    walk = Walk(leasing(shape))
    walk.step(prompt)
    walk.decode(PATIENCE + 1)
    lease = lease_of(walk.caches[0])
    bound = walk.pair.model._bound
    calls = dict(vars(bound.routes[0].in_place.moving))
    del calls["sliding_layer"], calls["full_layer"]
    for name, site in vars(bound.files[0]).items():
        if isinstance(site, QKVRope) and site.kv_heads:
            calls[name.lower()] = _into(writes_nothing(QKVRopeInto(site)))
    over = in_place(calls)
    over = over._replace(by_token=over)
    assert lease is not None
    token = mx.array([[3]])
    for _ in range(2):
        slots, chosen = lease.begin(over)
        assert chosen is over.settled
        pair = [bound.routes[0].decode(bound.weights.single, one, token, slots, no_tap) for one in over[:2]]
        assert_same(*pair, "logits")


@pytest.fixture(params=SHAPES)
def walk(request: pytest.FixtureRequest) -> Walk:
    return Walk(leasing(request.param))


@pytest.mark.parametrize("prompt", [1, 5, 7, 8, 9, 20])
def test_decode_before_at_and_after_the_wrap(walk: Walk, prompt: int) -> None:
    walk.step(prompt)
    walk.decode(PATIENCE)
    assert walk.leased
    walk.decode(30)
    assert walk.leased
    walk.same_caches()
    assert not walk.leased


def test_a_prompt_that_fills_the_ring_exactly(walk: Walk) -> None:
    """mlx-lm keeps its rows as the model gives them, on CUDA products with these are other bits, and so they stay."""
    walk.step(8)
    walk.decode(PATIENCE + 3)
    lease = lease_of(walk.caches[0])
    assert lease is not None and lease.by_token == several_kv_heads(walk)
    walk.same_caches()
    walk.same_strides()
    walk.decode(PATIENCE)
    assert walk.leased
    walk.same_strides()
    walk.step(3)
    walk.decode(PATIENCE)
    lease = lease_of(walk.caches[0])
    assert lease is not None and not lease.by_token
    walk.same_caches()
    walk.same_strides()


def test_a_ring_by_token_that_is_not_full(walk: Walk) -> None:
    """mlx-lm's own takes tokens back from a ring that has just become full."""
    plain = walk.pair.plain
    walk.caches = plain.make_cache(), plain.make_cache()
    for caches in walk.caches:
        mx.eval(plain(toys.tokens(1, 8, walk.vocab, 1), cache=caches))
        for cache in caches:
            assert cache.trim(6) == 6
    for steps in (PATIENCE + 1, 3, 12):
        walk.decode(steps)
        assert walk.leased == (steps != 3)
        walk.same_caches()
        walk.same_strides()


def test_rows_that_lie_in_no_known_way_are_not_leased(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are not looked at again at every token."""
    looks = []

    def lying(caches: list[Any]) -> None:
        looks.append(caches)

    with monkeypatch.context() as patch:
        patch.setattr("straightline.runtime.bound.lying", lying)
        walk.step(8)
        walk.decode(PATIENCE + 12)
        assert not walk.leased and len(looks) == 1
        walk.step(2)
        walk.decode(PATIENCE)
        assert not walk.leased and len(looks) == 2
    walk.step(2)
    walk.decode(PATIENCE)
    assert walk.leased
    walk.same_caches()


def test_rings_by_token_that_are_refused_at_load(walk: Walk) -> None:
    """Others are leased as ever."""
    model = walk.pair.model
    bound = model._bound
    bound.in_place_checked = frozenset()
    (route,) = bound.routes
    wrong = {name: lambda q, k, v, call=call: call(q, k, v) + 1 for name, call in attention(route).items()}
    by_token = SimpleNamespace(**vars(route.in_place.moving) | wrong)
    in_place = route.in_place._replace(by_token=InPlace(by_token, by_token))
    route = bound._checked_in_place(bound.files[0], route._replace(in_place=in_place))
    assert bound.in_place_reason == "" and bound.by_token_reason.startswith(WRONG.format(0))
    bound.routes = (route,)
    walk.step(8)
    walk.decode(PATIENCE + 2)
    assert walk.leased != several_kv_heads(walk)
    walk.step(3)
    walk.decode(PATIENCE)
    assert walk.leased
    walk.same_caches()


def several_kv_heads(walk: Walk) -> bool:
    """With one, both ways to lie are the same."""
    return bool(text(walk.pair.model).args.num_key_value_heads > 1)


def attention(route: Any) -> dict[str, Any]:
    return {name: call for name, call in vars(route.in_place.moving).items() if name.endswith("_attention")}


def test_the_rows_of_a_prompt_that_was_cut_back_are_not_leased(walk: Walk) -> None:
    """They lie as the model gave them until the ring moves them, which is when they are full again."""
    walk.step(7)
    for caches in walk.caches:
        assert trim_prompt_cache(caches, 6) == 6
    walk.decode(PATIENCE + 2)
    assert not walk.leased
    walk.decode(PATIENCE)
    assert walk.leased
    walk.same_caches()


def test_growth_as_mlx_lm_grows() -> None:
    walk = Walk(leasing(SHAPES[0]))
    walk.step(250)
    walk.decode(PATIENCE + 280)
    assert walk.leased
    walk.same_caches()


def test_short_runs_are_not_leased(walk: Walk) -> None:
    """Speculation asks for a few single tokens at a time; a copy of all rows would cost more than it gives."""
    walk.step(5)
    for _ in range(3):
        walk.decode(PATIENCE - 1)
        walk.step(3)
    walk.decode(PATIENCE - 1)
    assert not walk.leased


def test_blocks_in_between(walk: Walk) -> None:
    walk.step(3)
    for length in (4, 2, 11, 1):
        walk.decode(PATIENCE + 3)
        assert walk.leased
        walk.step(length)
    walk.decode(PATIENCE + 3)
    walk.same_caches()


def test_caches_copied_in_the_middle_are_not_written_to(walk: Walk) -> None:
    walk.step(6)
    walk.decode(PATIENCE + 1)
    copies = [copy.deepcopy(cache) for cache in walk.caches[0]]
    states = [[np.array(array) for array in copied.state[:2]] for copied in copies]
    walk.decode(PATIENCE + 12)
    assert walk.leased
    for copied, state in zip(copies, states, strict=True):
        assert lease_of([copied]) is None
        for array, before in zip(copied.state[:2], state, strict=True):
            assert (np.array(array) == before).all()


def test_rows_read_in_the_middle_are_not_written_to(walk: Walk) -> None:
    walk.step(6)
    walk.decode(PATIENCE + 1)
    # mlx-lm's caches assign into the very objects that they show: another object for the same rows.
    held = [[array[...] for array in cache.state[:2]] for cache in walk.caches[0]]
    before = [[np.array(array) for array in pair] for pair in held]
    walk.decode(PATIENCE + 12)
    for pair, old in zip(held, before, strict=True):
        for array, one in zip(pair, old, strict=True):
            assert (np.array(array) == one).all()


def test_one_cache_read_while_the_others_are_leased(walk: Walk) -> None:
    walk.step(6)
    walk.decode(PATIENCE + 1)
    assert walk.caches[0][-1].keys is not None
    assert not walk.leased
    walk.decode(3)
    walk.same_caches()


def test_the_offset_may_be_asked_for(walk: Walk) -> None:
    walk.step(6)
    walk.decode(PATIENCE + 1)
    assert [cache.offset for cache in walk.caches[0]] == [cache.offset for cache in walk.caches[1]]
    assert walk.leased


def test_trim(walk: Walk) -> None:
    walk.step(2)
    walk.decode(PATIENCE)
    for caches in walk.caches:
        assert can_trim_prompt_cache(caches)
        assert trim_prompt_cache(caches, 3) == 3
    assert not walk.leased
    walk.decode(PATIENCE + 9)
    walk.same_caches()


@pytest.mark.parametrize("prompt", [6, 8])
def test_save_and_load(walk: Walk, prompt: int, tmp_path: Any) -> None:
    walk.step(prompt)
    walk.decode(PATIENCE + 3)
    for index, caches in enumerate(walk.caches):
        save_prompt_cache(str(tmp_path / f"{index}.safetensors"), caches)
    loaded = tuple(load_prompt_cache(str(tmp_path / f"{index}.safetensors")) for index in range(2))
    walk.decode(3)
    walk.caches = loaded
    walk.decode(PATIENCE + 3)
    walk.same_caches()


def test_the_monolith_in_between(walk: Walk) -> None:
    walk.step(6)
    walk.decode(PATIENCE + 3)
    for length in (1, 3):
        ids = toys.tokens(1, length, walk.vocab, 77)
        ours = walk.pair.model.monolith(ids, cache=walk.caches[0])
        assert_same(ours, walk.pair.plain(ids, cache=walk.caches[1]), "logits")
    walk.decode(PATIENCE + 3)
    walk.same_caches()


def test_taps(walk: Walk) -> None:
    walk.step(6)
    walk.decode(PATIENCE + 1)
    layers = [-1, 0, 2, len(text(walk.pair.model).layers)]
    tap, other = HiddenTap(layers), HiddenTap(layers)
    ids = toys.tokens(1, 1, walk.vocab, 5)
    walk.pair.model(ids, cache=walk.caches[0], tap=tap)
    assert walk.leased
    from straightline.runtime import specialize

    specialize(walk.pair.plain).monolith(ids, cache=walk.caches[1], tap=other)
    for index in layers:
        assert_same(tap.captured[index], other.captured[index], f"tap {index}")
    walk.pair.model(ids, cache=walk.caches[0], tap=HiddenTap([0], edit=lambda index, rows: rows))
    assert not walk.leased


def test_changed_weights_end_the_lease(walk: Walk) -> None:
    walk.step(6)
    walk.decode(PATIENCE + 1)
    for model in (walk.pair.model, walk.pair.plain):
        norm = text(model)["model"]["layers"][0]["input_layernorm"]
        norm.weight = norm.weight * 1.5
    walk.step()
    assert not walk.leased
    walk.decode(3)


def test_another_model_on_leased_caches(walk: Walk) -> None:
    walk.step(6)
    walk.decode(PATIENCE + 1)
    ids = toys.tokens(1, 1, walk.vocab, 3)
    other = copy.deepcopy(walk.pair.model)
    assert_same(other(ids, cache=walk.caches[0]), walk.pair.plain(ids, cache=walk.caches[1]), "logits")
    assert not walk.leased


def test_logits_that_are_never_evaluated(walk: Walk) -> None:
    """A step's rows are written before the next step's, whoever evaluates what."""
    walk.step(6)
    walk.decode(PATIENCE + 1)
    for seed in range(12):
        ids = toys.tokens(1, 1, walk.vocab, 100 + seed)
        walk.pair.model(ids, cache=walk.caches[0])
        mx.eval(walk.pair.plain(ids, cache=walk.caches[1]))
    walk.step()
    walk.same_caches()


def test_two_sequences_take_turns() -> None:
    pair = leasing(SHAPES[0])
    walks = Walk(pair), Walk(pair)
    for one in walks:
        one.step(6)
    for _ in range(PATIENCE + 12):
        for one in walks:
            one.step()
    assert all(one.leased for one in walks)
    for one in walks:
        one.same_caches()


def test_caches_in_another_order_are_no_lease() -> None:
    walk = Walk(leasing(SHAPES[0]))
    walk.step(6)
    walk.decode(PATIENCE + 1)
    caches = walk.caches[0]
    assert lease_of(list(caches)) is not None
    assert lease_of(caches[::-1]) is None
    assert lease_of(caches[:-1]) is None


@pytest.mark.usefixtures("exact_memory")
def test_dropped_caches_are_freed() -> None:
    pair = leasing(SHAPES[0])

    def run() -> None:
        walk = Walk(pair)
        walk.step(200)
        walk.decode(PATIENCE + 3)
        assert walk.leased

    run()
    gc.disable()
    try:
        before = mx.get_active_memory()
        for _ in range(3):
            run()
        assert mx.get_active_memory() <= before
    finally:
        gc.enable()


def test_a_prefilled_cache_given_away_before(walk: Walk) -> None:
    """mlx-lm's ring hands its own arrays to attention; what reads them late must find them as they were."""
    ids = toys.tokens(1, 12, walk.vocab, 1)
    late = walk.pair.model(ids, cache=walk.caches[0]), walk.pair.plain(ids, cache=walk.caches[1])
    walk.decode(PATIENCE + 12)
    assert walk.leased
    assert_same(*late, "logits of the prompt, evaluated last")


def test_the_check_at_load(walk: Walk) -> None:
    model = walk.pair.model
    bound = model._bound
    route = bound.routes[0]
    make_caches = partial(caches_for, bound.files[0].CACHES)
    assert in_place_refused(bound.weights, route, make_caches, walk.vocab) == ""
    if several_kv_heads(walk):
        assert in_place_refused(bound.weights, route, make_caches, walk.vocab, by_token=True) == ""
    broken = dict(vars(route.in_place.moving))
    name = next(name for name in broken if name.endswith("_qkv"))
    broken[name] = lambda slot, *inputs, call=broken[name]: call(slot, inputs[0] + 1, *inputs[1:])
    wrong = route._replace(in_place=InPlace(*[SimpleNamespace(**broken)] * 2))
    assert "differ from those of forward" in in_place_refused(bound.weights, wrong, make_caches, walk.vocab)


def test_layers_that_are_not_exact_when_compiled(walk: Walk) -> None:
    model = walk.pair.model
    bound = model._bound
    bound.in_place_checked, bound.compiled_reason = frozenset(), ""
    right = bound.routes[0].in_place.moving
    wrong = SimpleNamespace(
        **vars(right) | {"sliding_layer": lambda function, w, s, h, *rest: function(w, s, -h, *rest)}
    )
    route = bound._checked_in_place(bound.files[0], bound.routes[0]._replace(in_place=InPlace(right, wrong)))
    assert (route.in_place, bound.in_place_reason) == (InPlace(right, right), "")
    assert bound.compiled_reason.startswith(WRONG.format(1))


@pytest.mark.parametrize("shape", ["e4b"])
def test_rings_by_token_that_are_not_exact_when_compiled(shape: str) -> None:
    """They alone are built one by one, by the next binding too."""
    bound = leasing(shape).model._bound
    bound.in_place_checked, bound.compiled_reason = frozenset(), ""
    right = bound.routes[0].in_place
    layer = SimpleNamespace(
        **vars(right.by_token.moving) | {"sliding_layer": lambda function, w, s, h, *rest: function(w, s, -h, *rest)}
    )
    compiled = bound.routes[0]._replace(in_place=right._replace(by_token=InPlace(right.by_token.moving, layer)))
    for _ in range(2):
        route = bound._checked_in_place(bound.files[0], compiled)
        assert (bound.compiled_reason, bound.by_token_reason) == ("", "")
        assert route.in_place.by_token == right.by_token
    assert bound.pass_on().by_token_uncompiled


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", SHAPES)
def test_anything_in_any_order(shape: str, seed: int) -> None:
    """Random calls to both sides, with caches kept aside, changed and taken up again. In all their layers."""
    rng = np.random.default_rng(seed)
    walk = Walk(leasing(shape, shapes=toys.SHAPES))
    walk.step(int(rng.integers(1, 20)) if seed < 8 else 8)
    kept: list[Any] = []
    leases = 0
    for _ in range(14):
        act = rng.choice(["decode", "decode", "block", "trim", "keep", "swap", "read", "monolith", "lose", "single"])
        if act == "decode":
            walk.decode(PATIENCE + int(rng.integers(0, 14)))
            leases += walk.leased
        elif act == "single":
            walk.decode(int(rng.integers(1, PATIENCE)))
        elif act == "block":
            walk.step(int(rng.integers(2, 12)))
        elif act == "trim":
            count = int(rng.integers(1, 5))
            trims = [trim_prompt_cache(caches, count) for caches in walk.caches]
            assert trims[0] == trims[1]
        elif act == "keep":
            kept.append(tuple(copy.deepcopy(caches) for caches in walk.caches))
        elif act == "swap" and kept:
            now = walk.caches
            walk.caches = kept.pop(int(rng.integers(len(kept))))
            kept.append(now)
        elif act == "read":
            one = int(rng.integers(len(walk.caches[0])))
            assert_same(walk.caches[0][one].keys, walk.caches[1][one].keys, "keys")
        elif act == "monolith":
            ids = toys.tokens(1, int(rng.integers(1, 4)), walk.vocab, walk.calls)
            ours = walk.pair.model.monolith(ids, cache=walk.caches[0])
            assert_same(ours, walk.pair.plain(ids, cache=walk.caches[1]), "logits of the monolith")
        elif act == "lose":  # a token whose logits nobody evaluates
            ids = toys.tokens(1, 1, walk.vocab, 1000 + walk.calls)
            walk.pair.model(ids, cache=walk.caches[0])
            mx.eval(walk.pair.plain(ids, cache=walk.caches[1]))
    assert leases
    walk.decode(3)
    walk.same_caches()
    for walk.caches in kept:
        walk.decode(PATIENCE + 3)
        walk.same_caches()


@pytest.mark.parametrize("kernels", [None, True])
def test_on_metal_nothing_is_in_place(kernels: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """And no kernel is made for it that was not asked for."""
    made: list[str] = []
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path))
    monkeypatch.setattr(sys.modules[forget.__module__], "detect", lambda: Backend("metal", "a Mac"))
    monkeypatch.setattr(Backend, "make", lambda self, program: made.append(program.function))
    forget()
    file = gemma4_e4b
    sites = sites_of(file)
    found, reason, _ = in_place_sites(sites, SimpleNamespace(), mx.bfloat16, kernels)
    forget()
    assert found is None and reason
    assert made == [] if kernels is None else set(made) <= {"qkv_rope"}


def test_threads_with_a_lease_each() -> None:
    """B73, in place: sequences in threads of their own, over one model."""
    pair = leasing("e4b")
    walks = [Walk(pair) for _ in range(3)]
    expected = [
        [pair.plain(ids, cache=walk.caches[1]) for ids in prompt_and_steps(seed)] for seed, walk in enumerate(walks)
    ]
    mx.eval(expected)

    def run(seed: int) -> list[mx.array]:
        caches = walks[seed].caches[0]
        logits = []
        for ids in prompt_and_steps(seed):
            logits.append(pair.model(ids, cache=caches))
            mx.eval(logits[-1])
        assert lease_of(caches) is not None
        return logits

    with ThreadPoolExecutor(3) as pool:
        for found, wanted in zip(pool.map(run, range(3)), expected, strict=True):
            for index, pair_of_logits in enumerate(zip(found, wanted, strict=True)):
                assert_same(*pair_of_logits, f"logits of call {index}")


def prompt_and_steps(seed: int) -> list[mx.array]:
    return [toys.tokens(1, length, seed=50 * seed + call) for call, length in enumerate((9, *(1,) * 20))]


@pytest.mark.usefixtures("exact_memory")
def test_eight_hundred_steps_of_a_lease() -> None:
    """B72, in place: flat but for what the caches with full attention grow by."""
    walk = Walk(leasing("e4b"))
    walk.step(9)
    walk.decode(PATIENCE)
    model, caches = walk.pair.model, walk.caches[0]
    lease = lease_of(caches)
    assert lease is not None
    seen = []
    for step in range(800):
        mx.eval(model(toys.tokens(1, 1, walk.vocab, step), cache=caches))
        if step % 80 == 79:
            held = sum(slot.keys.nbytes + slot.values.nbytes for slot in lease.slots)
            seen.append(settled() - held)
    assert lease_of(caches) is lease
    assert max(seen[1:]) - min(seen[1:]) <= 4096, seen


def test_a_lease_keeps_no_weights_alive() -> None:
    """Once a model is bound anew, the last binding's are gone, whatever caches are still under its lease."""
    walk = Walk(leasing("e4b"))
    walk.step(9)
    walk.decode(PATIENCE + 3)
    assert walk.leased
    model = walk.pair.model
    route = model._bound.routes[0]
    old = [weakref.ref(one) for one in (model._bound, route.in_place.moving.sliding_qkv)]
    del route
    model.layers[0].layer_scalar = mx.array([0.5])
    model(toys.tokens(1, 2), cache=model.make_cache())
    gc.collect()
    assert [one() for one in old] == [None, None]
    assert walk.leased
