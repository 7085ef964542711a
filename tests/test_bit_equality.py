"""Generated file, monolith and a plain mlx-lm model give the same bytes: logits, every cache, every tap.

Rows of CASES: B12, B16, B79; Must show "Bit-equality".
"""

from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import (
    DTYPES,
    FLOAT32,
    FOUR_BIT,
    QUANTIZATIONS,
    SCHEDULES,
    Case,
    Trio,
    pairs_of,
    pairwise,
    run,
)
from mlx.utils import tree_flatten, tree_unflatten

LEVELS: dict[str, Any] = {
    "shape": list(toys.SHAPES),
    "dtype": list(DTYPES),
    "quantization": list(QUANTIZATIONS),
    "schedule": [*SCHEDULES, "no cache"],
    "outer": [False, True],
}


def possible(row: dict[str, Any]) -> bool:
    """MLX has no CPU kernel for unquantized experts but in float32."""
    return row["shape"] != "26b" or row["quantization"] != "plain" or row["dtype"] == "float32"


ROWS = pairwise(LEVELS, possible)


def test_rows_cover_every_pair() -> None:
    covered = set().union(*(pairs_of(row) for row in ROWS))
    sizes = [len(levels) for levels in LEVELS.values()]
    pairs = sum(sizes[i] * sizes[j] for i in range(len(sizes)) for j in range(i))
    assert len(covered) == pairs
    assert all(map(possible, ROWS))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_shapes(row: dict[str, Any]) -> None:
    case = Case(
        toys.SHAPES[row["shape"]],
        dtype=DTYPES[row["dtype"]],
        quantize=QUANTIZATIONS[row["quantization"]],
        outer=row["outer"],
    )
    cached = row["schedule"] != "no cache"
    run(case, SCHEDULES[row["schedule"]] if cached else (12,), cached=cached)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("config", "dtype", "quantize"),
    [
        (toys.D6, mx.bfloat16, FOUR_BIT),
        (toys.M6, mx.float32, FOUR_BIT),
        (toys.E6, mx.bfloat16, None),
    ],
    ids=["D6", "M6", "E6"],
)
def test_batch_sizes(config: dict[str, Any], dtype: mx.Dtype, quantize: Any, batch: int) -> None:
    run(Case(config, dtype=dtype, quantize=quantize), (3, 7, 1, 1), batch=batch)


def rope(**changes: Any) -> dict[str, Any]:
    """rope_parameters with other thetas and factors: `full=...`, `sliding=...`."""
    return {
        toys.FULL: toys.BASE["rope_parameters"][toys.FULL] | changes.get("full", {}),
        toys.SLIDING: toys.BASE["rope_parameters"][toys.SLIDING] | changes.get("sliding", {}),
    }


VARIANTS: dict[str, tuple[dict[str, Any], Any]] = {
    "untied head": (toys.config(tie_word_embeddings=False), None),
    "untied head, sharing": (toys.config(**toys.SHARING, tie_word_embeddings=False), FOUR_BIT),
    "untied head, experts": (toys.config(**toys.EXPERTS, tie_word_embeddings=False), FOUR_BIT),
    "no softcap": (toys.config(final_logit_softcapping=None), None),
    "no softcap, untied head": (toys.config(final_logit_softcapping=None, tie_word_embeddings=False), FOUR_BIT),
    "other softcap": (toys.config(final_logit_softcapping=7.3), None),
    "whole numbers": (toys.config(final_logit_softcapping=30, rope_parameters=rope(full={"rope_theta": 10**6})), None),
    "eps 1e-5": (toys.config(rms_norm_eps=1e-5), None),
    "eps 0.37": (toys.config(**toys.EXPERTS, rms_norm_eps=0.37), FOUR_BIT),
    "eps, sharing": (toys.config(**toys.SHARING, rms_norm_eps=0.013), None),
    "rope thetas": (
        toys.config(rope_parameters=rope(full={"rope_theta": 12345.678}, sliding={"rope_theta": 77.7})),
        None,
    ),
    "rope factor": (toys.config(rope_parameters=rope(full={"factor": 8.0, "partial_rotary_factor": 0.6})), None),
    "rope default on full": (
        toys.config(rope_parameters=rope() | {toys.FULL: {"rope_type": "default", "rope_theta": 1e6}}),
        None,
    ),
    "per-layer inputs, no sharing": (toys.config(hidden_size_per_layer_input=32), FOUR_BIT),
    "sharing, no per-layer inputs": (toys.config(**toys.SHARING | {"hidden_size_per_layer_input": 0}), FOUR_BIT),
    "sharing and K = V": (toys.config(**toys.SHARING | {"attention_k_eq_v": True}), None),
    "sharing, experts and per-layer inputs": (toys.config(**toys.SHARING | toys.EXPERTS), FOUR_BIT),
    "one layer": (toys.config(layer_types=[toys.FULL], num_hidden_layers=1), None),
    "full layers only": (toys.config(layer_types=[toys.FULL] * 3, num_hidden_layers=3), None),
    "sliding layers only": (toys.config(layer_types=[toys.SLIDING] * 3, num_hidden_layers=3), None),
    "full first": (toys.config(layer_types=[toys.FULL, toys.SLIDING, toys.SLIDING], num_hidden_layers=3), None),
    "a second source": (
        toys.config(
            **toys.SHARING | {"num_kv_shared_layers": 2, "num_hidden_layers": 7},
            layer_types=[toys.SLIDING, toys.FULL, toys.FULL, toys.SLIDING, toys.FULL, toys.FULL, toys.SLIDING],
        ),
        None,
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str) -> None:
    config, quantize = VARIANTS[variant]
    run(Case(config, quantize=quantize, dtype=FLOAT32 if quantize is None else mx.bfloat16), (5, 6, 1))


NOT_FINITE: dict[str, Any] = {
    "inf in a norm": lambda model: put(model.model.layers[3].input_layernorm, "weight", 5, float("-inf")),
    "nan in the last norm": lambda model: put(model.model.norm, "weight", 7, float("nan")),
    "overflow in the stream": lambda model: put(model.model.layers[2], "layer_scalar", 0, 3e4, 3e38),
    "nan in one embedding": lambda model: put(model.model.embed_tokens, "weight", (11, 3), float("nan")),
}


def put(module: Any, name: str, index: Any, value: float, wide: float | None = None) -> None:
    """One entry of a parameter replaced; `wide` where the dtype has float32's range."""
    array = module[name]
    array[index] = value if wide is None or array.dtype == mx.float16 else wide
    module[name] = array


@pytest.mark.parametrize("change", NOT_FINITE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite(change: str, dtype: str) -> None:
    """NaN and inf come out in the same places, with the same bits, on both sides of the window."""
    shape = {"float32": toys.M6, "float16": toys.E6, "bfloat16": toys.D6}[dtype]
    case = Case(shape, dtype=DTYPES[dtype], change=NOT_FINITE[change])
    trio = Trio(case)
    ids = case.tokens(2, 13)
    ids[0, 2] = 11
    calls = [trio(ids[:, :7]), trio(ids[:, 7:12]), trio(ids[:, 12:])]
    assert mx.isnan(mx.concatenate(calls, axis=1)).any().item()


SHAPED = pytest.mark.parametrize("config", [toys.D6, toys.M6, toys.E6], ids=["D6", "M6", "E6"])


@SHAPED
def test_every_parameter_reaches_the_logits(config: dict[str, Any]) -> None:
    """B16: whichever tensor changes, the generated logits change, and as the monolith's do."""
    case = Case(config | {"tie_word_embeddings": False})
    model, ids = case.model, case.tokens(1, 5)
    first = model(ids)
    names = 0
    for name, value in tree_flatten(model.parameters()):
        noise = mx.random.normal(value.shape, key=mx.random.key(names)) * 0.5
        model.update(tree_unflatten([(name, value + noise)]))
        assert not mx.array_equal(model(ids), first).item(), f"{name} does not matter"
        assert mx.array_equal(model(ids), model.monolith(ids)).item(), name
        model.update(tree_unflatten([(name, value)]))
        names += 1
    assert names > 70
    assert mx.array_equal(model(ids), first).item()
    assert model.dispatch.counts["monolith"] == 0


@SHAPED
def test_layer_scalar_multiplies_the_whole_stream_once(config: dict[str, Any]) -> None:
    """B16: twice the scalar is exactly twice the row that leaves the layer, per-layer input and all."""
    case = Case(config)
    ids = case.tokens(2, 5)
    for index in range(case.layers):
        trio = Trio(case, lambda: None)
        trio(ids)
        before = case.plain.rows[index]
        layer = case.model.model.layers[index]
        layer.layer_scalar = layer.layer_scalar * 2
        plain = case.plain.model.model.layers[index].layer
        plain.layer_scalar = plain.layer_scalar * 2
        trio(ids)
        assert mx.array_equal(case.plain.rows[index], before * 2).item()


@pytest.mark.parametrize("config", [*toys.SHAPES.values(), toys.D6, toys.M6, toys.E6])
def test_no_parameter_at_its_initial_value(config: dict[str, Any]) -> None:
    """B16: a dropped scalar of 1.0 would be invisible. B79: sizes of the main suite are multiples of 64."""
    for name, value in tree_flatten(toys.build(config).parameters()):
        values = value.reshape(-1)
        assert not mx.array_equal(values, mx.full(values.shape, values[0])).item() or values.size == 1, name
        assert not ((values == 0) | (values == 1)).any().item(), name
        assert mx.isfinite(values).all().item(), name
    widths = ("hidden_size", "head_dim", "global_head_dim", "intermediate_size", "moe_intermediate_size")
    assert all(config.get(key, 64) % 64 == 0 for key in widths)
