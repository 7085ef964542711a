"""B67, B69, B70: dtypes of the stream, the caches and the logits; compiled operations at shapes they did not see."""

from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import DTYPES, FLOAT32, FOUR_BIT, Case, Trio, assert_same
from mlx.utils import tree_flatten

from straightline.runtime import HiddenTap, ops

SHAPED = pytest.mark.parametrize("config", [toys.D6, toys.M6, toys.E6], ids=["D6", "M6", "E6"])


@SHAPED
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_promoted(config: dict[str, Any], dtype: str) -> None:
    """B67: every tap, every cache array and the logits have the dtype of the weights."""
    expected = DTYPES[dtype]
    quantize = FOUR_BIT if config is toys.M6 and expected != FLOAT32 else None
    case = Case(config, dtype=expected, quantize=quantize)
    trio = Trio(case)
    for length in (9, 1):
        tap = HiddenTap(case.everything)
        logits = trio(case.tokens(1, length))
        case.model(case.tokens(1, length), tap=tap)
        assert logits.dtype == expected
        assert {row.dtype for row in tap.captured.values()} == {expected}
        assert {array.dtype for cache in trio.generated for array in (cache.keys, cache.values)} == {expected}


def float32_scalars(model: Any) -> None:
    for layer in model.model.layers:
        layer.layer_scalar = layer.layer_scalar.astype(mx.float32)


def float32_norms(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("norm") and "weight" in module:
            module.weight = module.weight.astype(mx.float32)


def float32_router(model: Any) -> None:
    for layer in model.model.layers:
        layer.router.scale = layer.router.scale.astype(mx.float32)
        layer.router.per_expert_scale = layer.router.per_expert_scale.astype(mx.float32)


def float16_attention(model: Any) -> None:
    for layer in model.model.layers[::2]:
        layer.self_attn.q_proj.weight = layer.self_attn.q_proj.weight.astype(mx.float16)


@pytest.mark.parametrize(
    ("config", "quantize", "change", "promoted"),
    [
        (toys.D6, None, float32_scalars, True),
        (toys.E6, None, float32_scalars, True),
        (toys.E6, FOUR_BIT, float32_norms, None),
        (toys.M6, FOUR_BIT, float32_router, None),
        (toys.D6, None, float16_attention, None),
    ],
    ids=["scalars D6", "scalars E6", "norms E6", "router M6", "float16 q_proj D6"],
)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_mixed_dtypes(
    config: dict[str, Any], quantize: Any, change: Any, promoted: bool | None, dtype: mx.Dtype
) -> None:
    """B67: where a float32 tensor promotes the monolith's stream, it promotes ours, at the same place."""
    case = Case(config, dtype=dtype, quantize=quantize, change=change)
    assert len({value.dtype for _, value in tree_flatten(case.model.parameters())} - {mx.uint32}) == 2 or (
        change is float16_attention and dtype == mx.float16
    )
    trio = Trio(case)
    for length in (9, 1, 3):
        trio(case.tokens(1, length))
    if promoted:
        assert case.plain.rows[-1].dtype == dtype
        assert case.plain.rows[0].dtype == FLOAT32


def eager_scaled_add(x: mx.array, y: mx.array, scale: mx.array) -> mx.array:
    return (x + y) * scale


def draw(*shape: int, dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)
def test_scaled_add_compiled_and_eager(dtype: str, scale_dtype: str) -> None:
    """B69, B70: traced once, called at other lengths and batches, contiguous or not: the eager bits."""
    for batch, length in ((1, 16), (1, 1), (1, 7), (1, 20), (3, 1), (3, 7), (3, 20), (1, 17), (2, 32), (2, 33)):
        x, y = (draw(batch, length, 64, dtype=DTYPES[dtype], seed=seed) for seed in (1, 2))
        scale = draw(1, dtype=DTYPES[scale_dtype], seed=3)
        assert_same(ops.scaled_add(x, y, scale), eager_scaled_add(x, y, scale), f"{batch} {length}")
        x, y = (one.swapaxes(0, 1)[:, ::-1] for one in (x, y))
        assert_same(ops.scaled_add(x, y, scale), eager_scaled_add(x, y, scale), f"{batch} {length}, not contiguous")


@SHAPED
def test_compiled_operations_in_a_growing_run(config: dict[str, Any]) -> None:
    """B69, B70: traced at 16 keys, run at 17, 32, 33 and in other batches; and the same with compilation off."""
    case = Case(config)
    for batch in (1, 3):
        calls = []
        for compiled in (True, False):
            (mx.enable_compile if compiled else mx.disable_compile)()
            try:
                trio = Trio(case)
                calls.append([trio(case.tokens(batch, length)) for length in (16, 1, 7, 1, 7, 1)])
            finally:
                mx.enable_compile()
        assert_same(calls[0], calls[1], "logits with compilation and without")
