"""B10, B12: every number folded into a generated file, bit by bit against the one that mlx-lm computes."""

import ast
import importlib
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import FLOAT32, Case, Recorded, Trio, assert_same, file_of, same_bits, source_of
from mlx_lm.models import gemma4_text
from mlx_lm.models.rope_utils import initialize_rope

import straightline.generated
from straightline.codegen.config import read_config
from straightline.codegen.target import SPECS, read_target


def floats_of(source: str) -> list[float]:
    """Every float literal of a source, sorted."""
    constants = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return sorted({value for value in constants if type(value) is float})


@pytest.mark.parametrize("hidden", [64, 96, 130, 1536, 2560, 2816, 3840, 5376])
def test_scalars(hidden: int) -> None:
    """The floats of the text are exactly those that an mlx-lm model of this width holds: sqrt(hidden), 2**-0.5, ..."""
    config = toys.config(
        **toys.SHARING | {"hidden_size_per_layer_input": 24},
        hidden_size=hidden,
        final_logit_softcapping=31.7,
        rms_norm_eps=1.3e-6,
    )
    inner = gemma4_text.Gemma4TextModel(gemma4_text.ModelArgs.from_dict(config))
    expected = {
        inner.embed_scale,
        inner.embed_tokens_per_layer_scale,
        inner.per_layer_input_scale,
        inner.per_layer_projection_scale,
        inner.layers[0].self_attn.scale,
        inner.layers[0].input_layernorm.eps,
        31.7,
        10000.0,  # theta of sliding layers
        1e6,  # theta of full layers, in FULL_FREQS
        1.0,  # factor of FULL_FREQS
    }
    assert floats_of(source_of(config)) == sorted(expected)
    assert inner.embed_scale == math.sqrt(hidden)


@pytest.mark.parametrize("name", ["gemma4-e2b", "gemma4-e4b", "gemma4-12b", "gemma4-26b", "gemma4-31b"])
def test_committed_files(name: str) -> None:
    """The same for the five committed files, and their frequencies: theta 1e6, head_dim 512, factor 0.25."""
    target = read_target(name)
    module = importlib.import_module(f"straightline.generated.{target.module}")
    config = json.loads((SPECS / f"{target.module}.config.json").read_text())
    text = config.get("text_config", config)
    assert read_config(config) == target.spec
    full = text["rope_parameters"][toys.FULL]
    rope = initialize_rope(
        dims=text["global_head_dim"], base=full["rope_theta"], traditional=False, scaling_config=full
    )
    assert_same(module.FULL_FREQS, rope._freqs, "FULL_FREQS")
    assert module.FULL_FREQS.dtype == FLOAT32
    assert module.FULL_FREQS.shape == (256,)
    assert mx.isinf(module.FULL_FREQS[64:]).all().item()
    expected = {text["hidden_size"] ** 0.5, text["rms_norm_eps"], text["final_logit_softcapping"], 1e4, 1e6, 1.0}
    if width := text["hidden_size_per_layer_input"]:
        expected |= {width**0.5, 2.0**-0.5, text["hidden_size"] ** -0.5}
    folder = Path(straightline.generated.__path__[0])
    assert floats_of((folder / f"{target.module}.py").read_text()) == sorted(expected)


@pytest.mark.parametrize(
    ("head_dim", "share", "theta", "factor"),
    [(64, 0.25, 1e6, 1.0), (64, 0.6, 12345.678, 1.0), (128, 0.25, 1e6, 8.0), (6, 0.5, 1e4, 0.3), (128, 1.0, 1e6, 1.0)],
)
def test_frequencies(head_dim: int, share: float, theta: float, factor: float) -> None:
    full = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": theta, "factor": factor}
    parameters = toys.BASE["rope_parameters"] | {toys.FULL: full}
    config = toys.config(global_head_dim=head_dim, rope_parameters=parameters)
    attention = gemma4_text.Attention(gemma4_text.ModelArgs.from_dict(config), 2)
    assert_same(file_of(config).FULL_FREQS, attention.rope._freqs, "FULL_FREQS")
    assert mx.isfinite(attention.rope._freqs).sum().item() == -(-int(head_dim * share) // 2)


def test_router_norm() -> None:
    """hidden**-0.5 is folded into the router's scale at load: the monolith's own product, in every dtype."""
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        case = Case(toys.M6, dtype=dtype)
        for index, layer in enumerate(case.model.model.layers):
            assert layer.router._root_size == 64**-0.5
            folded = case.model._bound.weights.layers[index].router_norm
            assert_same(folded, layer.router.scale * layer.router._root_size, f"router_norm {index}")
            assert not same_bits(folded, layer.router.scale)


def test_pairing(monkeypatch: pytest.MonkeyPatch) -> None:
    """B10: the generated file's own RoPE calls, on one-hot vectors: lanes 0-7 pair with 32-39, and no other turns."""
    case = Case(toys.D6)
    recorded = Recorded(mx.fast.rope)
    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "rope", recorded)
        case.model(case.tokens(1, 4))
    calls = recorded.take()
    assert len(calls) == 2 * case.layers
    hot = mx.eye(64).reshape(64, 1, 1, 64)
    for index, layer in enumerate(case.model.model.layers):
        keywords = [{**call[1], "offset": 5} for call in calls[2 * index : 2 * index + 2]]
        dims = [call[0][1] for call in calls[2 * index : 2 * index + 2]]
        turned = [mx.fast.rope(hot, dim, **keyword) for dim, keyword in zip(dims, keywords, strict=True)]
        for one in turned:
            assert_same(one, layer.self_attn.rope(hot, offset=5), f"layer {index}")
        moved = (turned[0].reshape(64, 64) != mx.eye(64)).tolist()
        for lane in range(64):
            turns = layer.layer_type == toys.SLIDING or lane % 32 < 8
            touched = {other for other in range(64) if moved[lane][other]}
            assert touched == ({lane, (lane + 32) % 64} if turns else set())


@pytest.mark.parametrize("config", [toys.D6, toys.E6], ids=["D6", "E6"])
def test_same_rotations_as_the_monolith(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call by call: the same vectors, sizes, base, frequencies, offset and result, before and after the wrap."""
    case = Case(config)
    trio = Trio(case)
    recorded = Recorded(mx.fast.rope)
    monkeypatch.setattr(mx.fast, "rope", recorded)
    for length in (5, 1, 7, 1):
        ids = case.tokens(2, length)
        case.model(ids, cache=trio.generated)
        found = recorded.take()
        case.plain(ids, cache=trio.plain)
        expected = recorded.take()
        assert len(found) == len(expected) > case.layers
        for (args, keywords, result), (others, other, expect) in zip(found, expected, strict=True):
            assert_same(args[0], others[0], "rotated")
            assert args[1:] == others[1:]
            assert [keywords[key] for key in ("traditional", "base", "scale")] == [
                other[key] for key in ("traditional", "base", "scale")
            ]
            assert_same(keywords.get("freqs"), other.get("freqs"), "freqs")
            assert_same(mx.array(keywords["offset"]), mx.array(other["offset"]), "offset")
            assert_same(result, expect, "result")
