"""tier="fast" without a GPU: what runs and why, the bound and its check, the texts of the kernels, and the plumbing.

The kernels themselves are measured on a GPU by tests/gpu/fast_attention.py.
"""

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import mlx.core as mx
import numpy as np
import pytest
import toys
from comparing import assert_same, file_of
from test_in_place import in_place_calls, write_heads, writes_nothing

from straightline.codegen import generate
from straightline.runtime import StraightlineError, load, specialize
from straightline.runtime.cli import main
from straightline.runtime.in_place import InPlace, lease_of
from straightline.runtime.in_place.sites import _into
from straightline.runtime.kernels import (
    Attention,
    FastAttention,
    QKVRope,
    QKVRopeInto,
    fast_resolve,
    judge,
    memory,
    sites_of,
)
from straightline.runtime.kernels.backends import Backend
from straightline.runtime.kernels.fast import CLUSTER, MERGED, Cut
from straightline.runtime.kernels.fast_check import BOUND, Errors, distance, errors, reference
from straightline.runtime.kernels.fast_launch import by_length, parts_for
from straightline.runtime.kernels.fast_resolve import resolve_fast
from straightline.runtime.kernels.memory import Finding
from straightline.runtime.kernels.program import Program, Unsupported
from straightline.runtime.kv.make import caches_for
from straightline.runtime.packed import PackedRows
from straightline.runtime.tier import fast_refused, fast_route
from straightline.runtime.toy import VOCABULARY
from straightline.runtime.verification.tiers import in_float32

LENGTHS = (1, 2, 17, 63)
SMALL = FastAttention(4, 2, 64)
BIG = FastAttention(4, 2, 256)
WIDE = toys.config(head_dim=256, global_head_dim=512)
SITES = ("sliding_attention", "full_attention")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STRAIGHTLINE_KERNELS", raising=False)
    fast_resolve.forget()
    yield
    fast_resolve.forget()


# A device whose kernels are what they should be: the true result, rounded once.


@dataclass(frozen=True)
class Fake(Backend):
    name: str = "cuda"
    device: str = "Fake 9000"
    spoil: Callable[[mx.array], mx.array] = lambda result: result
    clusters: bool = True
    made: list[str] = field(default_factory=list, hash=False, compare=False)

    def make(self, program: Program) -> Callable[..., list[mx.array]]:
        self.made.append(program.function)
        constants = dict(program.constants)

        def kernel(inputs: tuple[mx.array, ...], output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            if "CLUSTER" in constants and not self.clusters:
                raise RuntimeError("Failed to compile kernel: a.h(7): error: no clusters on this device")
            if program.function == "fast_merge":
                return [inputs[0].reshape(-1)[: output_shapes[0][2]].astype(mx.bfloat16).reshape(output_shapes[0])]
            heads, size = program.lines * int(constants["GROUP"]), int(constants["HEAD_DIM"])
            bits, group_size = int(constants.get("BITS", 0)), int(constants.get("GROUP_SIZE", 0))
            site = FastAttention(heads, heads // int(constants["REPEATS"]), size, bits, group_size)
            if bits:
                inputs = (inputs[0], inputs[1:4], inputs[4:7], *inputs[7:])
            result = self.spoil(reference(site, *inputs))
            if program.outputs == ("out",):
                assert output_dtypes == (mx.bfloat16,)
                return [result.astype(mx.bfloat16).reshape(output_shapes[0])]
            return [mx.pad(result, (0, np.prod(output_shapes[0]).item() - result.size)), mx.zeros(output_shapes[1])]

        return kernel


def use(monkeypatch: pytest.MonkeyPatch, **what: Any) -> Fake:
    fake = Fake(**what)
    monkeypatch.setattr(fast_resolve, "detect", lambda: fake)
    monkeypatch.setattr(fast_resolve, "errors", lambda site, call, lengths=LENGTHS: errors(site, call, lengths[:4]))
    return fake


def noisy(result: mx.array) -> mx.array:
    return result * (1 + 2 * BOUND)


# The site


@pytest.mark.parametrize("bits", [0, 2, 4, 8])
@pytest.mark.parametrize("whole", [False, True])
def test_the_reference_is_that_of_float64(bits: int, whole: bool) -> None:
    site = FastAttention(4, 2, 64, bits, 32 if bits else 0, whole)
    for seed, length in enumerate(LENGTHS):
        inputs = site.inputs_of(length, seed)
        expected = in_float64(site, inputs, length)
        assert distance(reference(site, *inputs), expected).item() < 1e-6
        # Each of the MLX operations rounds, quantized ones in what they unpack.
        assert distance(site.plain(*inputs), expected).item() < (0.2 if bits else 0.03)


def in_float64(site: FastAttention, inputs: tuple[Any, ...], length: int) -> mx.array:
    def wide(one: mx.array) -> Any:
        return np.array(one.astype(mx.float32)).astype(np.float64)

    def stored(one: Any) -> Any:
        if not site.bits:
            return wide(one)[0, :, :length]
        packed, scales, biases = one
        ones, zeros = mx.ones(scales.shape), mx.zeros(scales.shape)
        codes = wide(mx.dequantize(packed, ones, zeros, group_size=site.group_size, bits=site.bits))
        spread = [np.repeat(wide(one), site.group_size, -1) for one in (scales, biases)]
        return (codes * spread[0] + spread[1])[0, :, :length]

    q, keys, values = wide(inputs[0])[0, :, 0], stored(inputs[1]), stored(inputs[2])
    results = []
    for head in range(site.heads):
        weights = np.exp(keys[head // site.repeats] @ q[head])
        results.append(weights @ values[head // site.repeats] / weights.sum())
    return mx.array(np.concatenate(results).astype(np.float32))


def test_plain_is_that_of_the_exact_site() -> None:
    exact = Attention(4, 2, 64)
    for seed in range(4):
        inputs = SMALL.inputs_of(17, seed)
        assert_same(SMALL.plain(*inputs), exact.plain(*inputs), "plain")


def test_whole_buffers_give_what_their_first_rows_give() -> None:
    for bits in (0, 4):
        site = FastAttention(4, 2, 64, bits, 32 if bits else 0, whole=True)
        slices = FastAttention(4, 2, 64, bits, 32 if bits else 0)
        q, k, v, rows = site.inputs_of(17, 1)
        first = [tuple(one[..., :17, :] for one in (each if bits else (each,))) for each in (k, v)]
        cut = slices.plain(q, *(first if bits else (one[0] for one in first)))
        assert distance(site.plain(q, k, v, rows), cut.astype(mx.float32)).item() < 0.01
        assert (
            distance(
                reference(site, q, k, v, rows), reference(slices, q, *(first if bits else [one[0] for one in first]))
            ).item()
            == 0
        )


def test_an_error_is_refused_above_the_bound_and_above_mlx() -> None:
    assert Errors(17, 0.001, 0.002).refused == ""
    assert Errors(1, 0.0, 0.0).refused == ""
    assert Errors(17, 0.004, 0.02).refused == "its error over 17 rows is 4.0e-03, above the bound 3.9e-03"
    assert Errors(17, 0.002, 0.001).refused == "its error over 17 rows is 2.0e-03, above that of MLX's 1.0e-03"
    assert Errors(17, float("nan"), 0.001).refused.startswith("its error over 17 rows is nan")


# Which form is used


def test_on_a_cpu_the_exact_forms_run_and_it_says_why() -> None:
    config = toys.D6
    model = specialize(toys.build(config), file_of(config), tier="fast", strict=True)
    exact = specialize(toys.build(config), file_of(config), strict=True)
    assert (model.dispatch.tier, exact.dispatch.tier) == ("fast", "exact")
    assert model.dispatch.tier_sites == dict.fromkeys(SITES, ("exact", "the default device is the CPU"))
    assert exact.dispatch.tier_sites == {}
    caches, others = model.make_cache(), exact.make_cache()
    for length in (6, 1, 1, 1):
        ids = toys.tokens(1, length)
        assert_same(model(ids, cache=caches), exact(ids, cache=others), "logits")
    assert model.dispatch.counts == {"generated": 4, "monolith": 0}


@pytest.mark.parametrize("where", ["specialize", "load", "generate", "verify"])
def test_other_tiers_are_refused(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = 'tier is \'quick\'; expected "exact" (mlx-lm\'s bits) or "fast"'
    if where == "specialize":
        with pytest.raises(StraightlineError) as refused:
            specialize(toys.build(toys.D6), tier="quick")
    elif where == "load":
        with pytest.raises(StraightlineError) as refused:
            load(tmp_path / "nothing", tier="quick")
    else:
        with pytest.raises(SystemExit) as stopped:
            main([where, *(["--random", "gemma4-e4b"] if where == "verify" else []), "--tier", "quick"])
        assert stopped.value.code == 2
        assert "'quick' (choose from" in capsys.readouterr().err
        return
    assert str(refused.value) == message


def test_within_the_bound_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch)
    found = resolve_fast(BIG)
    assert found.call is not None
    assert found.reason.startswith("error at most ") and "(bound 3.9e-03), MLX's own up to " in found.reason
    assert fake.made == ["fast_attention", "fast_attention", "fast_merge"]
    q, k, v = BIG.inputs_of(40, 3)
    result = found.call(q, k, v)
    assert (result.shape, result.dtype) == ((1, 1, 4 * 256), mx.bfloat16)
    # Rows of a batch go through MLX's operations, whatever the kernels are for.
    rows = mx.concatenate([q, q], axis=1)
    assert rows.size != BIG.unit
    assert len(findings()) == 2 and {one["state"] for one in findings().values()} == {"kernel"}


def findings() -> dict[str, Any]:
    held: dict[str, Any] = json.loads((Path(os.environ["STRAIGHTLINE_CACHE"]) / "kernels.json").read_text())
    found: dict[str, Any] = held["findings"]
    return found


def test_outside_the_bound_the_exact_form_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, spoil=noisy)
    found = resolve_fast(BIG)
    assert found.call is None
    assert found.reason.startswith("its error over 1 rows is ") and found.reason.endswith(", above the bound 3.9e-03")
    fast_resolve.forget()
    again = use(monkeypatch)  # another process: what was found is remembered
    assert resolve_fast(BIG) == fast_resolve.Fast(None, f"{found.reason} (found earlier)") and again.made == []


def test_without_clusters_two_launches_serve_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, clusters=False)
    found = resolve_fast(BIG)
    assert found.call is not None
    assert "; in two launches always: " in found.reason and "no clusters on this device" in found.reason
    assert found.call(*BIG.inputs_of(5, 1)).shape == (1, 1, 1024)


def test_no_memory_says_nothing_about_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(result: mx.array) -> mx.array:
        raise RuntimeError("[malloc] out of memory")

    use(monkeypatch, spoil=full)
    assert resolve_fast(BIG) == fast_resolve.Fast(None, "the device had no memory left to check it")
    assert findings() == {}


def test_a_kernel_that_kills_two_processes_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = Finding("checking", deaths=1, process=gone.pid, host=memory.checking().host)
    monkeypatch.setattr(judge, "recall", lambda name: dead)
    use(monkeypatch)
    assert resolve_fast(BIG) == fast_resolve.Fast(None, "two processes died while they checked it (found earlier)")


def test_other_sizes_dtypes_and_devices_are_exact_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    assert resolve_fast(SMALL).reason == "heads of 64; the fast attention is for 256 and 512"
    assert resolve_fast(BIG, mx.float16).reason == "float16: the fast attention is for bfloat16"
    assert resolve_fast(FastAttention(5, 2, 256)).reason == "5 query heads over 2 KV heads; expected a multiple"
    use(monkeypatch, name="metal")
    assert resolve_fast(BIG).reason == "the fast attention is written for CUDA"


# In a model


def wide_model(monkeypatch: pytest.MonkeyPatch, **what: Any) -> Any:
    use(monkeypatch, **what)
    return specialize(toys.build(WIDE, dtype=mx.bfloat16), file_of(WIDE), tier="fast", strict=True)


def test_decode_runs_it_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model(monkeypatch)
    states = model.dispatch.tier_sites
    assert list(states) == list(SITES) and {state for state, _ in states.values()} == {"fast"}
    exact = specialize(toys.build(WIDE, dtype=mx.bfloat16), file_of(WIDE), strict=True)
    caches, others = model.make_cache(), exact.make_cache()
    prompt = toys.tokens(1, 6)
    assert_same(model(prompt, cache=caches), exact(prompt, cache=others), "several tokens are exact in any tier")
    token = toys.tokens(1, 1)
    fast, slow = model(token, cache=caches), exact(token, cache=others)
    assert not mx.array_equal(fast, slow).item()
    assert distance(fast, slow.astype(mx.float32)).item() < 0.1
    assert model.dispatch.counts == {"generated": 2, "monolith": 0}


def writes_in_place(site: QKVRopeInto) -> Any:
    """As the kernel, in bfloat16: q is a result, k and v go to memory behind MLX's back."""

    def call(*inputs: mx.array) -> mx.array:
        *own, keys, values, ring, after = inputs
        q, k, v = site.rope.plain(*own)
        views = [one.view(mx.uint16) for one in (keys, values, k, v)]
        mx.eval(q, after, views)
        write_heads(own[3], ring, [(np.array(views[one], copy=False), views[one + 2]) for one in range(2)])
        grouped: mx.array = q.reshape(site.shapes(1)[0])
        return grouped

    return call


@pytest.fixture
def in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_in_place.writes_in_place", writes_in_place)


@pytest.mark.usefixtures("in_bfloat16")
def test_in_place_it_reads_whole_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as over slices, before and after rings wrap; caches are mlx-lm's again for whoever asks."""
    exact = specialize(toys.build(WIDE, dtype=mx.bfloat16), file_of(WIDE), strict=True)
    other, model = wide_model(monkeypatch), wide_model(monkeypatch)
    bound = model._bound
    file, (route,) = bound.files[0], bound.routes
    plain = exact._bound.routes[0]._replace(in_place=in_place_calls(exact._bound.routes[0], file))
    fast, states = fast_route(plain, sites_of(file), file.CACHES, mx.bfloat16)
    assert fast.whole and {state for state, _ in states.values()} == {"fast"}
    # The stand-ins for kernels evaluate, which nothing can in a trace.
    fast = fast._replace(in_place=InPlace(fast.in_place.moving, fast.in_place.moving))
    caches = lambda: list(exact.make_cache())  # noqa: E731
    assert fast_refused(bound.weights, fast, sites_of(file), caches, 97) == ""
    bound.routes = (route._replace(in_place=fast.in_place, whole=True),)
    ours, theirs = model.make_cache(), other.make_cache()
    for step, length in enumerate((5, *(1,) * 14)):
        ids = toys.tokens(1, length, 97, step)
        assert_same(model(ids, cache=ours), other(ids, cache=theirs), f"logits of step {step}")
    assert lease_of(ours) is not None
    for mine, their in zip(ours, theirs, strict=True):
        assert_same(mine.state[:2], their.state[:2], "cache")
    assert lease_of(ours) is None


@pytest.mark.usefixtures("in_bfloat16")
def test_in_place_it_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wide_model(monkeypatch)
    exact = specialize(toys.build(WIDE, dtype=mx.bfloat16), file_of(WIDE), strict=True)
    bound = exact._bound
    sites = sites_of(bound.files[0])
    plain = bound.routes[0]._replace(in_place=in_place_calls(bound.routes[0], bound.files[0]))
    fast, _ = fast_route(plain, sites, bound.files[0].CACHES, mx.bfloat16)
    right = vars(fast.in_place.moving)
    wrong = {name: lambda *inputs, name=name: noisy(right[name](*inputs)) for name in SITES}
    calls = SimpleNamespace(**right | wrong)
    fast = fast._replace(in_place=InPlace(calls, calls))
    refused = fast_refused(bound.weights, fast, sites, lambda: list(exact.make_cache()), 97)
    assert refused.startswith("its error on this model's own tokens is ")
    fast = fast._replace(in_place=InPlace(SimpleNamespace(**right), calls))
    refused = fast_refused(bound.weights, fast, sites, lambda: list(exact.make_cache()), 97)
    assert refused == "compiled layers give other logits at step 0"


def quantized_file() -> types.ModuleType:
    """Sliding layers of 4 and 8 bits, the first full one plain."""
    stored = [{"layer_idx": layer, "bits": 8 if layer == 1 else 4, "group_size": 64} for layer in (0, 1, 3, 4, 5)]
    module = types.ModuleType("toy_kv")
    exec(compile(generate(WIDE, "toy-kv", kv_config=stored), "toy_kv.py", "exec"), module.__dict__)
    return module


def test_quantized_rows_are_read_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    file = quantized_file()
    model = specialize(toys.build(WIDE, dtype=mx.bfloat16), file, tier="fast", strict=True)
    assert {name: state for name, (state, _) in model.dispatch.tier_sites.items()} == {
        "full_attention": "fast",
        "sliding_attention, 4 bits in groups of 64": "fast",
        "sliding_attention, 8 bits in groups of 64": "fast",
        "full_attention, 4 bits in groups of 64": "fast",
    }
    exact = specialize(toys.build(WIDE, dtype=mx.bfloat16), file, strict=True)
    caches, others = caches_for(file.CACHES), caches_for(file.CACHES)
    assert_same(model(toys.tokens(1, 6), cache=caches), exact(toys.tokens(1, 6), cache=others), "a prompt")
    for step in range(4):
        token = toys.tokens(1, 1, 97, step)
        fast, slow = model(token, cache=caches), exact(token, cache=others)
        assert not mx.array_equal(fast, slow).item()
    assert model.dispatch.counts == {"generated": 5, "monolith": 0}
    assert [cache.offset for cache in caches] == [cache.offset for cache in others]


def test_quantized_rows_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    file = quantized_file()
    model = specialize(toys.build(WIDE, dtype=mx.bfloat16), file, tier="fast", strict=True)
    (route,), sites = model._bound.routes, sites_of(file)
    assert fast_refused(model._bound.weights, route, sites, lambda: caches_for(file.CACHES), 97) == ""
    right = route.sites.sliding_qkv

    def wrong(*inputs: Any) -> tuple[Any, ...]:
        q, k, v = right(*inputs)
        return q, PackedRows.of(k, lambda *rows: noisy(k.attention(*rows)), k.site), v

    route = route._replace(sites=SimpleNamespace(**vars(route.sites) | {"sliding_qkv": wrong}))
    refused = fast_refused(model._bound.weights, route, sites, lambda: caches_for(file.CACHES), 97)
    assert refused.startswith("its error on this model's own tokens is ")


def test_on_a_models_own_tokens_it_is_measured_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def late(result: mx.array) -> mx.array:
        asked.append(1)
        return noisy(result) if len(asked) > 16 else result  # after the self-checks of two sites in two forms

    model = wide_model(monkeypatch, spoil=late)
    for state, reason in model.dispatch.tier_sites.values():
        assert state == "exact"
        assert reason.startswith("its error on this model's own tokens is ") and "above the bound 3.9e-03" in reason
    exact = specialize(toys.build(WIDE, dtype=mx.bfloat16), file_of(WIDE), strict=True)
    caches, others = model.make_cache(), exact.make_cache()
    for length in (6, 1):
        ids = toys.tokens(1, length)
        assert_same(model(ids, cache=caches), exact(ids, cache=others), "logits")


def test_measured_again_only_where_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model(monkeypatch)
    assert model._bound.tier_checked == {(model._bound.form, model._bound.files[0].FINGERPRINT, False)}
    monkeypatch.setattr("straightline.runtime.bound.fast_refused", lambda *_: pytest.fail("asked again"))
    model.layers[0].layer_scalar = mx.array([0.5], dtype=mx.bfloat16)
    model(toys.tokens(1, 2))
    assert {state for state, _ in model.dispatch.tier_sites.values()} == {"fast"}


def test_a_copy_and_a_second_specialize_have_their_own_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model(monkeypatch)
    assert specialize(model).dispatch.tier == "exact"
    assert specialize(model, tier="fast").dispatch.tier == "fast"


# Commands


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tier")
    sizes = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
    checkpoints.publish(folder / "checkpoint", toys.E6 | sizes)
    yield str(folder / "checkpoint")


def test_generate_says_what_runs(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(checkpoint, generate=True)
    arguments = ["generate", "--model", checkpoint, "--prompt", "abc", "--max-tokens", "3", "--ignore-chat-template"]
    assert main(arguments) == 0
    plain = capsys.readouterr()
    assert main([*arguments, "--tier", "fast"]) == 0
    fast = capsys.readouterr()
    assert fast.out.splitlines()[:2] == plain.out.splitlines()[:2]
    assert "tier fast" not in plain.err
    for name in SITES:
        assert f"straightline:   tier fast: {name}: exact: the default device is the CPU" in fast.err.splitlines()


def test_verify_measures_both_tiers(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(checkpoint, generate=True)
    assert main(["verify", checkpoint, "--tier", "fast", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("4 texts, continued greedily, 2 steps each:") for line in lines)
    tiers = [line.split() for line in lines if line.startswith(("  exact ", "  fast "))]
    assert tiers[0][1:] == tiers[1][1:] and tiers[0][3:] == ["8", "of", "8"]
    assert sum("exact: the default device is the CPU" in line for line in lines) == 2
    assert lines[-1] == "within its bound, but nothing of the fast tier runs here: the exact forms do"
    assert main(["verify", checkpoint, "--tier", "fast", "--steps", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["tier"] for one in found["tiers"]] == ["exact", "fast"]
    assert [(one["site"], one["runs"]) for one in found["attention"]] == [(name, "exact") for name in SITES]
    assert found["refused"] == "" and found["steps"] == 4


def test_verify_has_exit_code_1_outside_the_bound(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(checkpoint, generate=True)
    monkeypatch.setattr("straightline.runtime.verification.tiers.KL_FACTOR", -1.0)
    monkeypatch.setattr("straightline.runtime.verification.tiers.KL_FLOOR", -1.0)
    assert main(["verify", checkpoint, "--tier", "fast", "--steps", "1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("OUTSIDE its bound: its mean KL is ")


def test_verify_has_no_bits_to_spoil(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["verify", "--random", "gemma4-e4b", "--tier", "fast", "--spoil"])
    assert stopped.value.code == 2
    assert "--spoil goes with the exact tier; the fast one has no bits to spoil" in capsys.readouterr().err


def test_a_float32_twin_leaves_the_model_alone() -> None:
    model = toys.build(toys.E6, dtype=mx.bfloat16, quantize={"group_size": 32, "bits": 4})
    twin = in_float32(model)
    ids = toys.tokens(1, 5)
    before = model(ids)
    assert (before.dtype, twin(ids).dtype) == (mx.bfloat16, mx.float32)
    assert twin.model.layers[0].mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.weight
    assert twin.model.layers[0].mlp.up_proj.scales.dtype == mx.float32
    assert_same(model(ids), before, "logits")
    assert distance(before, twin(ids).reshape(-1)).item() < 0.2


# The texts


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("shape", [(8, 1, 256), (8, 2, 512), (16, 1, 512), (16, 8, 256), (32, 4, 512), (6, 2, 256)])
def test_texts_are_whole(shape: tuple[int, int, int], bits: int, whole: bool) -> None:
    site = FastAttention(*shape, bits, 64 if bits else 0, whole)
    programs = (site.program("cuda"), *site.in_parts("cuda", site.long_cut))
    assert len({program.digest for program in programs}) == 3
    for program in programs:
        assert program.text.count("{") == program.text.count("}")
        assert f"DEVICE void {program.function}(" in program.text
        assert len(program.source) < 400  # hashed at every call
        assert program.threads % 32 == 0 and program.threads <= 512
        assert 4 * sum(count for _, _, count in program.shared) <= 48 * 1024
        for name in (*program.inputs, *program.outputs):
            assert name in program.source
    assert programs[0].lines * site.cut.heads == site.heads
    assert programs[1].lines * site.long_cut.heads == site.heads
    assert site.repeats % site.cut.heads == site.repeats % site.long_cut.heads == site.head_dim % MERGED == 0
    assert not any(program.contiguous for program in programs[:2])
    assert f"CLUSTER = {CLUSTER};" in programs[0].text and "__cluster_dims__" not in programs[1].text
    assert ("min(rows[0], " in programs[0].source) == whole


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("shape", [(8, 1, 512), (16, 1, 512), (16, 2, 512), (32, 4, 512)])
def test_products_of_matrices_serve_many_rows(shape: tuple[int, int, int], whole: bool) -> None:
    site = FastAttention(*shape, whole=whole)
    (reading, adding), (_, same) = site.for_many_rows("cuda")
    assert reading.function == "fast_tensor" and adding == same
    assert "DEVICE void fast_tensor(\n    const T* q, Rows keys" in reading.text and len(reading.source) < 400
    assert reading.text.count("{") == reading.text.count("}")
    assert (reading.lines, reading.threads, reading.outputs) == (site.kv_heads, 256, ("parts", "scores"))
    size = {"float": 4, "straightline::Four": 16}
    assert sum(size[kind] * count for kind, _, count in reading.shared) <= 48 * 1024


def test_where_there_are_no_products_of_matrices() -> None:
    for site in (FastAttention(8, 2, 512), FastAttention(16, 1, 256), FastAttention(16, 1, 512, 4, 64)):
        assert len(site.for_many_rows("cuda")) == 1
    for site in (FastAttention(16, 1, 256), FastAttention(32, 1, 512), FastAttention(16, 1, 512, 8, 64)):
        with pytest.raises(Unsupported, match="tensor products are for plain rows of 512 and up to 16 query heads"):
            site.in_tensors("cuda")


def test_a_form_that_fails_leaves_many_rows_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch)
    make = Fake.make

    def without(self: Fake, program: Program) -> Any:
        if program.function == "fast_tensor":
            raise RuntimeError("Failed to compile kernel: a.h(7): error: no such product")
        return make(self, program)

    monkeypatch.setattr(Fake, "make", without)
    site = FastAttention(8, 1, 512)
    assert resolve_fast(site).call is not None
    assert fake.made == ["fast_attention", "fast_attention", "fast_merge"]
    assert sorted(one["state"] for one in findings().values()) == ["kernel", "kernel", "plain"]


def test_a_cut_changes_the_text() -> None:
    assert BIG.in_cluster("cuda", Cut(1, 128, 8)).digest != BIG.program("cuda").digest


def test_metal_has_no_kernel() -> None:
    with pytest.raises(Unsupported, match="the fast attention is written for CUDA"):
        BIG.program("metal")


def test_parts_follow_the_rows() -> None:
    assert [parts_for(rows) for rows in (1, 2048, 4096, 8192, 32768, 131072)] == [16, 16, 32, 64, 128, 128]


def test_the_length_of_the_buffers_chooses() -> None:
    asked: list[str] = []
    one, two = (lambda *_, name=name: asked.append(name) for name in ("one", "two"))
    for bits in (0, 4):
        site = FastAttention(4, 2, 64, bits, 32 if bits else 0)
        call = by_length(site, one, two, 20)
        for length in (20, 21):
            call(*site.inputs_of(length, 0))
    assert asked == ["one", "two"] * 2


@pytest.mark.usefixtures("in_bfloat16")
def test_compiled_layers_that_write_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side of the check has to find the token's row as it has written it, not as the other has."""
    wide_model(monkeypatch)
    exact = specialize(toys.build(WIDE, dtype=mx.bfloat16), file_of(WIDE), strict=True)
    bound = exact._bound
    file, sites = bound.files[0], sites_of(bound.files[0])
    plain = bound.routes[0]._replace(in_place=in_place_calls(bound.routes[0], file))
    fast, _ = fast_route(plain, sites, file.CACHES, mx.bfloat16)
    right = fast.in_place.moving
    wrong = {
        name: _into(writes_nothing(QKVRopeInto(site)))
        for name, site in sites.items()
        if isinstance(site, QKVRope) and site.kv_heads
    }
    fast = fast._replace(in_place=InPlace(right, SimpleNamespace(**vars(right) | wrong)))
    refused = fast_refused(bound.weights, fast, sites, lambda: list(exact.make_cache()), 97)
    assert refused == "compiled layers give other logits at step 0"
