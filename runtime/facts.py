"""Architecture facts of a loaded model's modules against its Spec: what mlx-lm's forward reads from attributes.

A generated file holds these as literals. They differ once a layer is replaced by another kind, RoPE is swapped, or an
attribute is set; the fingerprint, which comes from the model's arguments, does not say so.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text
from mlx_lm.models.rope_utils import ProportionalRoPE

from ..codegen.spec import Attention, Layer, Rope, RopeKind, Spec
from .drift import changed_upstream
from .errors import StraightlineError
from .evaluation import evaluate
from .ops import proportional_freqs
from .watch import plain_class

Facts = Iterator[tuple[Any, str, Any]]

ATTENTIONS = {Attention.SLIDING: "sliding_attention", Attention.FULL: "full_attention"}
NORMS = (nn.RMSNorm, gemma4_text.RMSNormNoScale)


def check_facts(text: nn.Module, spec: Spec) -> None:
    """Raises StraightlineError naming the first attribute, or change of mlx-lm, that the file was not made for."""
    changed = changed_upstream()
    if changed:
        raise StraightlineError(changed)
    inner = text["model"]
    _check("", _model_facts(text, spec))
    _check("model.", _inner_facts(inner, spec))
    _check_norms("model.", inner, spec, ("norm", "per_layer_projection_norm"))
    for index, (layer, expected) in enumerate(zip(inner["layers"], spec.layers, strict=True)):
        where = f"layers.{index}."
        _check(where, _layer_facts(layer, spec, expected))
        _check(f"{where}router.", _router_facts(layer.get("router"), spec))
        _check(f"{where}self_attn.", _attention_facts(layer["self_attn"], expected, expected.kv_source == index))
        _check_norms(where, layer, spec, tuple(layer))
        _check_norms(f"{where}self_attn.", layer["self_attn"], spec, tuple(layer["self_attn"]))
        _check_rope(f"{where}self_attn.rope", layer["self_attn"]["rope"], expected.rope, expected.head_dim)


def _model_facts(text: Any, spec: Spec) -> Facts:
    yield text, "final_logit_softcapping", spec.final_logit_softcapping
    yield text, "tie_word_embeddings", spec.tie_word_embeddings


def _inner_facts(inner: Any, spec: Spec) -> Facts:
    yield inner, "embed_scale", spec.hidden_size**0.5
    yield inner, "previous_kvs", [layer.kv_source for layer in spec.layers]
    if spec.sliding_window:
        yield inner, "window_size", spec.sliding_window
    yield inner, "hidden_size_per_layer_input", spec.per_layer_input_size
    if spec.per_layer_input_size:
        yield inner, "embed_tokens_per_layer_scale", spec.per_layer_input_size**0.5
        yield inner, "per_layer_input_scale", 2.0**-0.5
        yield inner, "per_layer_projection_scale", spec.hidden_size**-0.5


def _layer_facts(layer: Any, spec: Spec, expected: Layer) -> Facts:
    yield layer, "layer_type", ATTENTIONS[expected.attention]
    yield layer, "enable_moe", spec.experts is not None


def _router_facts(router: Any, spec: Spec) -> Facts:
    if spec.experts is not None:
        yield router, "eps", spec.rms_norm_eps
        yield router.config, "top_k_experts", spec.experts.top_k


def _attention_facts(attention: Any, expected: Layer, owns_kv: bool) -> Facts:
    yield attention, "scale", 1.0
    yield attention, "n_heads", expected.query_heads
    yield attention, "head_dim", expected.head_dim
    yield attention, "has_kv", owns_kv
    if owns_kv:
        yield attention, "n_kv_heads", expected.kv_heads
        yield attention, "use_k_eq_v", expected.k_eq_v


def _check_norms(where: str, module: Any, spec: Spec, names: tuple[str, ...]) -> None:
    norms = ((name, module.get(name)) for name in names)
    for name, norm in norms:
        if plain_class(norm) in NORMS:
            _check(f"{where}{name}.", iter([(norm, "eps", spec.rms_norm_eps)]))


def _check_rope(where: str, rope: Any, expected: Rope, head_dim: int) -> None:
    proportional = expected.kind is RopeKind.PROPORTIONAL
    wanted: Any = ProportionalRoPE if proportional else nn.RoPE
    if plain_class(rope) is not wanted:
        raise StraightlineError(f"{where} is {type(rope).__name__}; the file expects {wanted.__name__}")
    facts: list[tuple[Any, str, Any]] = [(rope, "dims", head_dim), (rope, "traditional", False)]
    if not proportional:
        facts += [(rope, "base", expected.theta), (rope, "scale", 1.0)]
    _check(f"{where}.", iter(facts))
    if proportional:
        freqs = proportional_freqs(dims=head_dim, rotated=expected.rotated, base=expected.theta, factor=expected.factor)
        if not _same(rope["_freqs"], freqs):
            raise StraightlineError(f"{where}._freqs are not those of the model's arguments, which the file expects")


def _same(found: mx.array, expected: mx.array) -> bool:
    """Inside a trace of mx.compile nothing can be compared; there the benefit of the doubt."""
    equal = mx.array_equal(found, expected)
    return not evaluate(equal) or bool(equal.item())


def _check(where: str, facts: Facts) -> None:
    for owner, name, expected in facts:
        found = getattr(owner, name, None)
        if found != expected:
            raise StraightlineError(f"{where}{name} is {found!r}; the file expects {expected!r}")
