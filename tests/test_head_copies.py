"""The copies of rows that lie token by token: what its check compares, and that it sees a copy made too early."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from test_in_place import writes_in_place

from straightline.generated import gemma4_12b, gemma4_e2b, gemma4_e4b
from straightline.runtime.in_place import copies_of, in_place_sites
from straightline.runtime.kernels import HeadCopies, QKVRope, QKVRopeInto, Site, sites_of
from straightline.runtime.kernels.program import Unsupported
from straightline.runtime.kernels.resolve import Resolved
from straightline.runtime.kernels.selfcheck import compare

SITE = HeadCopies(QKVRopeInto(QKVRope(4, 2, 64, 1e-6, 10000.0)))


def launched(inputs: Any, output_shapes: Any, output_dtypes: Any, **how: Any) -> Any:
    """In the place of the kernel."""
    found = SITE.plain(*inputs)
    assert tuple(one.shape for one in found) == output_shapes and len(output_dtypes) == 2
    rows = inputs[1].shape[4]
    assert how == {"grid": (32 * 8, (rows + 31) // 32, 1), "threadgroup": (32, 1, 1)}
    return list(found)


CALL = SITE.launched(SITE.program("cuda"), launched, mx.bfloat16)


def late(into: QKVRopeInto) -> Any:
    """Gives q, and writes nothing before it is read."""
    return lambda *inputs: into.plain(*inputs)[0]


def test_they_have_the_layout_of_products_with_a_transposed_copy() -> None:
    q, k, v, *_ = SITE.inputs(0)
    keys, values = SITE.plain(q, k, v)
    assert keys.shape == (1, 2, 2, 64, 512) and values.shape == (1, 2, 2, 512, 64)
    for head in range(4):
        assert mx.array_equal(keys[0, head // 2, head % 2], k[0, head // 2, 0])
        assert mx.array_equal(values[0, head // 2, head % 2], v[0, head // 2, 0])
    mx.eval(keys, values)
    assert memoryview(keys.view(mx.uint16)).c_contiguous and memoryview(values.view(mx.uint16)).c_contiguous


def test_the_check_compares_rows_that_are_there_and_rows_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("straightline.runtime.kernels.copies.resolve", lambda into, dtype: writes_in_place(into))
    monkeypatch.setattr("test_in_place.np.array", as_bits)
    found = compare(SITE, CALL, mx.bfloat16, 8)
    assert found.differs == "" and found.values > 0


def as_bits(array: mx.array, copy: bool = True) -> Any:
    """numpy knows no bfloat16."""
    import numpy

    return numpy.asarray(memoryview(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array))


def test_a_row_that_is_not_there_yet_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("straightline.runtime.kernels.copies.resolve", lambda into, dtype: late(into))
    assert compare(SITE, CALL, mx.bfloat16, 1).differs == ""
    assert "seed 1" in compare(SITE, CALL, mx.bfloat16, 2).differs


def test_which_sites_need_them() -> None:
    """With one KV head rows lie in one way only."""
    found = [copies_of(sites_of(file)) for file in (gemma4_12b, gemma4_e4b, gemma4_e2b)]
    assert [list(one) for one in found] == [["sliding_qkv_copies"]] * 2 + [[]]
    assert [one.repeats for names in found for one in names.values()] == [2, 4]


@pytest.mark.parametrize("state", ["plain", "kernel"])
def test_without_the_kernel_such_rings_are_not_leased(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(wanted: Iterable[Site], *rest: Any, **how: Any) -> tuple[Resolved, ...]:
        return tuple(Resolved(one.plain, state if isinstance(one, HeadCopies) else "kernel", "off") for one in wanted)

    monkeypatch.setattr("straightline.runtime.in_place.sites.resolved", resolved)
    found, reason, by_token = in_place_sites(sites_of(gemma4_12b), SimpleNamespace(), mx.bfloat16, True)
    assert found is not None and reason == ""
    assert by_token == ("sliding_qkv_copies: off" if state == "plain" else "")
    assert (found.by_token is None) == (state == "plain")


@pytest.mark.parametrize(("backend", "head_dim", "reason"), [("metal", 64, "on CUDA alone"), ("cuda", 32, "of 32")])
def test_where_there_is_no_kernel(backend: str, head_dim: int, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        HeadCopies(QKVRopeInto(QKVRope(4, 2, head_dim, 1e-6, None))).program(backend)
