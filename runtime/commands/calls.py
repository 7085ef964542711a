"""What each kind of call would run, asked of the guards that the runtime itself asks. Loads MLX, but no weights."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...codegen.kv import uniform_kv_config
from ...codegen.spec import Spec
from .files import GeneratedFile
from .subject import published_kv_config, stored_as

NO_IDS = "input_embeddings are given, file expects token ids"
NO_INPUTS = "per_layer_inputs are given, file computes its own"
TRAINING = "the model is in training mode; call model.eval() for the generated path"


@dataclass(frozen=True)
class Call:
    """path: "generated" (by which file) or "monolith" (for which reason)."""

    what: str
    path: str
    file: str
    reason: str


def calls(spec: Spec, kv_config: list[dict[str, int]] | None, files: tuple[GeneratedFile, ...]) -> list[Call]:
    """One for each way in which models are called. No file: every call goes to the monolith."""
    if not files:
        reason = f"no generated file has the fingerprint {spec.architecture}"
        return [Call("every call", "monolith", "", reason)]
    from ..caches import CacheGuard
    from ..drift import changed_upstream
    from ..registry import load_generated

    if changed_upstream():
        return [Call("every call", "monolith", "", changed_upstream())]
    guards = [(one.name, CacheGuard(load_generated(one.path).CACHES)) for one in files]
    found = [_asked(what, caches, guards) for what, caches in _caches(spec.with_kv(()), kv_config)]
    return [
        *found,
        Call("input_embeddings (images)", "monolith", "", NO_IDS),
        Call("per_layer_inputs", "monolith", "", NO_INPUTS),
        Call("training (gradients)", "monolith", "", TRAINING),
    ]


def _caches(spec: Spec, kv_config: list[dict[str, int]] | None) -> Iterator[tuple[str, Any]]:
    from ..kv.make import caches_of
    from ..kv.rollback import DEPTH

    plain = caches_of(spec)
    yield "no cache (scoring)", None
    yield "plain caches (generate, serve)", plain
    yield "batch caches (batch_generate, serve)", _batch(plain)
    name = "its kv_config.json"
    if kv_config is None:
        found = published_kv_config(spec)
        name, kv_config = found if found else ("all 4 bits", uniform_kv_config(spec, 4, _group(spec)))
    stored = stored_as(spec, kv_config)
    if stored.kv:
        yield f"quantized caches ({name})", caches_of(stored)
        yield f"batch of those ({name})", _batch(caches_of(stored))
    yield "mlx-lm's --kv-bits 8", caches_of(stored_as(spec, uniform_kv_config(spec, 8, _group(spec))))
    yield "rollback caches (speculation)", caches_of(spec, DEPTH)
    if stored.kv:
        yield f"rollback caches, quantized ({name})", caches_of(stored, DEPTH)


def _group(spec: Spec) -> int:
    """mlx-lm's own 64 where it divides every head."""
    return 64 if all(layer.head_dim % 64 == 0 for layer in spec.layers) else 32


def _batch(caches: list[Any]) -> list[Any]:
    return [type(one).merge([one, copy.copy(one)]) for one in caches]


def _asked(what: str, caches: Any, guards: list[tuple[str, Any]]) -> Call:
    from ..kv.device import packing

    reasons = []
    for name, guard in guards:
        reason = guard.refuse(caches)
        if not reason:
            return Call(what, "generated", name, "")
        reasons.append(reason)
    quantized = isinstance(caches, list) and any(packing(one)[0] for one in caches)
    return Call(what, "monolith", "", reasons[-1 if quantized else 0])
