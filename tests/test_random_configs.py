"""Randomly drawn valid configs, weights, schedules and taps: generated file, monolith, plain mlx-lm agree bit by bit.

Must show "Bit-equality"; B79: sizes here are odd on purpose, those of the main suite are multiples of 64.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import toys
from comparing import BFLOAT16, FLOAT16, FLOAT32, FOUR_BIT, MXFP4, Case, Trio, mixed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

QUANTIZE = {"plain": None, "4-bit": FOUR_BIT, "8-bit": {"group_size": 32, "bits": 8}, "mixed": mixed, "mxfp4": MXFP4}
DTYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}
HEAD_DIMS = st.sampled_from([2, 4, 6, 10, 16, 24, 32, 64, 80])


@dataclass(frozen=True)
class Run:
    """How one drawn config is run."""

    dtype: str
    quantize: str
    outer: bool
    lengths: tuple[int, ...]
    batch: int
    padding: tuple[int, ...] | None
    cached: bool
    taps: tuple[int, ...]
    at_end: bool
    seed: int


@st.composite
def ropes(draw: st.DrawFn, head_dim: int) -> dict[str, Any]:
    theta = draw(st.sampled_from([10000.0, 1e6, 37.5, 123456.789, 500000]))
    if draw(st.booleans()):
        return {"rope_type": "default", "rope_theta": theta}
    share = draw(st.sampled_from([0.25, 0.5, 1.0, 0.7]))
    share = share if int(head_dim * share) else 1.0
    rope = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}
    return rope | draw(st.sampled_from([{}, {"factor": 8.0}, {"factor": 0.3}]))


@st.composite
def layer_types(draw: st.DrawFn) -> tuple[list[str], int]:
    """Any order of kinds, and a number of sharing layers whose every kind has a source below."""
    types = draw(st.lists(st.sampled_from([toys.SLIDING, toys.FULL]), min_size=1, max_size=6))
    possible = [n for n in range(len(types)) if set(types[len(types) - n :]) <= set(types[: len(types) - n])]
    return types, draw(st.sampled_from(possible))


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    types, shared = draw(layer_types())
    sliding_heads, full_heads = draw(st.integers(1, 3)), draw(st.sampled_from([None, 1, 2, 3]))
    heads = sliding_heads * (full_heads or 1) * draw(st.integers(1, 2))
    head_dim, full_dim = draw(HEAD_DIMS), draw(st.none() | HEAD_DIMS)
    experts = draw(st.integers(1, 6)) if draw(st.integers(0, 3)) == 0 else 0
    return toys.config(
        layer_types=types,
        num_hidden_layers=len(types),
        num_kv_shared_layers=shared,
        hidden_size=draw(st.sampled_from([64, 64, 96, 50])),
        intermediate_size=draw(st.sampled_from([64, 96, 30])),
        num_attention_heads=heads,
        num_key_value_heads=sliding_heads,
        num_global_key_value_heads=full_heads,
        head_dim=head_dim,
        global_head_dim=full_dim,
        attention_k_eq_v=draw(st.booleans()),
        hidden_size_per_layer_input=draw(st.sampled_from([0, 0, 6, 32])),
        use_double_wide_mlp=draw(st.booleans()),
        sliding_window=draw(st.integers(1, 12)),
        final_logit_softcapping=draw(st.sampled_from([None, 30.0, 30, 4.7])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 0.02])),
        tie_word_embeddings=draw(st.booleans()),
        rope_parameters={toys.SLIDING: draw(ropes(head_dim)), toys.FULL: draw(ropes(full_dim or head_dim))},
        enable_moe_block=bool(experts),
        num_experts=experts or None,
        top_k_experts=draw(st.integers(1, experts)) if experts else None,
        moe_intermediate_size=64 if experts else None,
        vocab_size=97,
        vocab_size_per_layer_input=draw(st.sampled_from([97, 111])),
    )


@st.composite
def runs(draw: st.DrawFn, config: dict[str, Any]) -> Run:
    dtype, quantize = draw(st.sampled_from(list(DTYPES))), draw(st.sampled_from(list(QUANTIZE)))
    if config["enable_moe_block"] and (quantize == "plain" or config["hidden_size"] % 32):
        dtype = "float32"  # MLX has no CPU kernel for unquantized experts in another dtype
    layers = config["num_hidden_layers"]
    lengths = draw(st.lists(st.sampled_from([1, 1, 2, 3, 5, 9, 14]), min_size=1, max_size=5))
    batch = draw(st.integers(1, 3))
    cached = draw(st.integers(0, 5)) > 0
    padding = draw(st.none() | st.lists(st.integers(0, lengths[0] - 1), min_size=batch, max_size=batch))
    return Run(
        dtype=dtype,
        quantize=quantize,
        outer=draw(st.booleans()),
        lengths=tuple(lengths),
        batch=batch,
        padding=tuple(padding) if padding and cached else None,
        cached=cached,
        taps=tuple(draw(st.lists(st.integers(-1, layers), unique=True))),
        at_end=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_random_configs(data: st.DataObject) -> None:
    config = data.draw(configs(), "config")
    run = data.draw(runs(config), "run")
    case = Case(config, dtype=DTYPES[run.dtype], quantize=QUANTIZE[run.quantize], seed=run.seed, outer=run.outer)
    make = None if run.padding is None else lambda: case.batch_caches(list(run.padding or ()))
    trio = Trio(case, make if run.cached else lambda: None)
    position = -1 if run.at_end else None
    for index, length in enumerate(run.lengths):
        logits = trio(case.tokens(run.batch, length, seed=run.seed + index), run.taps, position)
        assert logits.shape == (run.batch, length, 97)
        if run.padding is None:
            assert mx.isfinite(logits).all().item()
    assert case.model.dispatch.counts == {"generated": len(run.lengths), "monolith": 0}
