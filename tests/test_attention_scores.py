"""The scores of attention in one launch, without a GPU: the call, its text, and where it is used in place.

The kernel itself is checked on a GPU by tests/gpu/kernels.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from oracle import oracle

from straightline.generated import gemma4_12b
from straightline.runtime.in_place import in_place_sites
from straightline.runtime.in_place import sites as over_slots
from straightline.runtime.kernels import Attention, AttentionScores, mlx_source, report, resolve, sites_of
from straightline.runtime.kernels.backends import Backend
from straightline.runtime.kernels.program import Program, Unsupported
from straightline.runtime.kernels.resolve import Resolved, forget
from straightline.runtime.kernels.scores import LENGTHS, MOST_ROWS
from straightline.runtime.kernels.selfcheck import different

resolving = sys.modules[resolve.__module__]
SITE = AttentionScores(4, 2, 128)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path / "cache"))
    forget()
    yield
    forget()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Of a device whose kernel is the plain form."""
    seen: list[dict[str, Any]] = []

    def make(self: Backend, program: Program) -> Any:
        def kernel(*, inputs: tuple[mx.array, ...], **launch: Any) -> list[mx.array]:
            seen.append(launch)
            scores = SITE.plain(*inputs)
            assert isinstance(scores, mx.array)
            return [scores]

        return kernel

    monkeypatch.setattr(Backend, "make", make)
    monkeypatch.setattr(resolving, "detect", lambda: Backend("cuda", "Fake 9000"))
    return seen


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("site", [SITE, AttentionScores(3, 3, 64), AttentionScores(4, 1, 64)], ids=repr)
def test_plain_is_the_first_half_of_attention(site: AttentionScores, dtype: mx.Dtype) -> None:
    for seed in range(6):
        inputs = site.inputs(seed, dtype=dtype)
        found, (expected,) = site.plain(*inputs), oracle(site, inputs)
        assert isinstance(found, mx.array)
        assert found.shape == (1, site.kv_heads, site.repeats, 1, LENGTHS[seed])
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert different(found, expected).item() == 0


def test_one_launch_a_call_of_the_shape_of_its_rows(launches: list[dict[str, Any]]) -> None:
    call = resolve(SITE)
    assert report()[SITE][0] == "kernel"
    for length in (1, 513, MOST_ROWS):
        launches.clear()
        q, k = mx.ones((1, 2, 2, 1, 128), mx.bfloat16), mx.ones((1, 2, 1, 128, length), mx.bfloat16)
        assert call(q, k).shape == (1, 2, 2, 1, length)
        (launch,) = launches
        assert launch["output_shapes"] == ((1, 2, 2, 1, length),)
        assert (launch["grid"], launch["threadgroup"]) == ((512 * 8 * 4, 1, 1), (512, 1, 1))
    launches.clear()
    assert call(q, mx.ones((1, 2, 1, 128, MOST_ROWS + 1), mx.bfloat16)).shape == (1, 2, 2, 1, MOST_ROWS + 1)
    assert not launches


def test_every_length_is_checked(launches: list[dict[str, Any]]) -> None:
    resolve(SITE)
    assert {launch["output_shapes"][0][-1] for launch in launches} == set(LENGTHS)
    assert max(LENGTHS) == MOST_ROWS


def test_sizes_without_a_kernel_are_plain_with_a_reason(launches: list[dict[str, Any]]) -> None:
    reasons = {
        AttentionScores(4, 2, 64): "heads of 64; the kernel of attention's scores is for 128, 256 and 512",
        AttentionScores(16, 1, 512): "one KV head: MLX takes the product of all query heads at once",
    }
    for site, reason in reasons.items():
        assert resolve(site) == site.plain
        assert report()[site] == ("plain", reason)
    with pytest.raises(Unsupported, match=r"^the kernel of attention's scores is written for CUDA$"):
        SITE.program("metal")


def test_the_text() -> None:
    for site in (SITE, AttentionScores(8, 2, 512)):
        program = site.program("cuda")
        assert program.digest == site.program("cuda").digest
        assert program.text.count("{") == program.text.count("}")
        assert f"DEVICE void {program.function}(" in program.text
        whole = mlx_source.text(program, "name", "", site.inputs(0), (mx.bfloat16,))
        assert "const __grid_constant__ Shape k_shape" in whole and "const __grid_constant__ Strides k_strides" in whole
    assert program.source == (
        "SHARED(straightline::T, scores, 2048) SHARED(float, ends, 32) "
        "straightline::attention_scores(q, k, k_shape, k_strides, out, scores, ends, HERE);"
    )


def test_used_in_place_where_it_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attention over slots calls what its scores were resolved to, then multiplies with the values."""
    asked: list[Any] = []

    def of_scores(sites: tuple[AttentionScores], *rest: Any, **how: Any) -> tuple[Any, ...]:
        asked.extend(sites)
        return tuple(lambda q, k, site=site: site.plain(q, k) * 2 for site in sites)

    kernel = Resolved(lambda *inputs: inputs, "kernel", "exact")
    monkeypatch.setattr(over_slots, "resolved", lambda sites, *rest, **how: (kernel,) * len(tuple(sites)))
    monkeypatch.setattr(over_slots, "resolve_all", of_scores)
    sites = sites_of(gemma4_12b)
    found, *_ = in_place_sites(sites, SimpleNamespace(), mx.bfloat16, None)
    assert found is not None
    ours = {name: site for name, site in sites.items() if isinstance(site, Attention)}
    assert asked == [site.scores for site in ours.values()] and len(asked) == 2
    for name, site in ours.items():
        q, k = site.scores.inputs(3)
        v = mx.random.normal((1, site.kv_heads, 1, k.shape[-1], site.head_dim)).astype(mx.bfloat16)
        half = getattr(found.moving, name)(q, k, v / 2)
        assert different(half, site.over_views(site.scores.plain)(q, k, v)).item() == 0
