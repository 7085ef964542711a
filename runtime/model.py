"""A specialized model: an mlx-lm Gemma 4 model that runs its generated file, and itself for whatever is left."""

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4, gemma4_text

from ..codegen.spec import Spec
from . import pace
from .blocks import MOST
from .bound import Bound, Options
from .dispatch import REASONS, Dispatch
from .errors import StraightlineError
from .in_place import lease_of
from .kv import quantizable
from .kv.batch_of_one import due, sequence_of
from .kv.borrowed import give_all_back
from .kv.layouts import refuse_mixed
from .kv.make import caches_of
from .kv.ours import make_ours
from .kv.sharing import with_stand_ins
from .monolith import call_text_model
from .registry import load_generated
from .taps import HiddenTap, Tap, TapRecorder, no_tap
from .tier import check_tier
from .watch import Watched, plain_class


class Specialized(Watched):
    """What `specialize` adds to mlx-lm's model class. Weights, adapters, `save` and `eval` see an ordinary model."""

    dispatch: Dispatch
    _bound: Bound | None
    _options: Options
    _tap: HiddenTap | None
    _storage: tuple[Spec, int] | None
    _lock: Lock

    def __call__(
        self,
        inputs: mx.array | None = None,
        cache: list[Any] | None = None,
        input_embeddings: mx.array | None = None,
        per_layer_inputs: mx.array | None = None,
        tap: HiddenTap | None = None,
        **unknown: Any,
    ) -> mx.array:
        """Token ids [B, L] to logits [B, L, vocab], as mlx-lm's model; `tap` keeps hidden states on either path."""
        if tap is None:
            tap = self._tap
        elif not isinstance(tap, HiddenTap):
            raise StraightlineError(f"tap is a {type(tap).__name__}; expected a HiddenTap or None")
        bound = self._bound
        if bound is None or bound.stale():
            bound = None  # let go of, as in _bind
            bound = self._bind()
        reason = bound.refuse(inputs, input_embeddings, per_layer_inputs, unknown)
        route, lease, single, block, given = None, None, False, None, cache
        if not reason:
            assert inputs is not None
            # An edited stream has another input norm than the one that `decode` has worked out by then.
            unedited = tap is None or not tap.edits
            single = unedited and inputs.size == 1
            sequence = sequence_of(cache)
            if sequence is not None:
                if single and not bound.batch_reason:
                    cache = sequence
                else:
                    give_all_back(cache)
            lease = lease_of(cache)
            route = None if lease is None else bound.owner(lease)
            if route is None:
                lease = None
                route, reason = bound.route(cache)
        if route is None:
            self.dispatch.monolith(reason)
            return self.monolith(
                inputs,
                given,
                input_embeddings=input_embeddings,
                per_layer_inputs=per_layer_inputs,
                tap=tap,
                **unknown,
            )
        assert inputs is not None
        step = None if tap is None else tap.begin(bound.sentinel, inputs.shape[1])
        hook = no_tap if step is None else step.hook(inputs.shape[1])
        decode = route.decode if single else None
        if lease is not None and decode is None:
            give_all_back(cache)
        if unedited and not single and inputs.size <= MOST and cache is not None:
            block = bound.block(route, cast(tuple[int, int], inputs.shape), cache)
            self.dispatch.block_reason = bound.block_reason
        if block is not None:
            assert route.decode is not None and cache is not None
            logits = route.decode(bound.of_blocks[inputs.shape[1] > 1], block, inputs, cache, hook)
        elif cache is None:
            logits = route.forward(bound.weights, inputs, route.guard.none, hook)
        elif decode is None or (lease is None and not route.guard.maskless(cache)):
            if cache is not given:  # A token was interrupted, so these are at several positions.
                assert given is not None
                give_all_back(given)
                cache = given
            if pace.long(inputs.size):
                hook = pace.paced(hook, len(route.guard.expected))
            logits = route.forward(bound.weights, inputs, cache, hook)
            if decode is not None and due(cache):
                bound.as_sequence(route, cache)
        elif lease is not None:
            assert route.in_place is not None
            slots, calls = lease.begin(route.in_place)
            logits = decode(bound.weights.single, calls, inputs, slots, hook)
            lease.end(logits)
        else:
            logits = decode(bound.weights.single, route.sites, inputs, cache, hook)
            bound.lease(route, cache)
        if step is not None:
            step.end()
        self.dispatch.generated()
        return logits

    def monolith(
        self,
        inputs: mx.array | None = None,
        cache: list[Any] | None = None,
        tap: HiddenTap | None = None,
        **kwargs: Any,
    ) -> mx.array:
        """The same weights through mlx-lm's own code, tapped the same way."""
        text = text_model(self)
        give_all_back(cache)
        make_ours(cache)
        refuse_mixed(cache)
        cache = with_stand_ins(cache, text["model"].previous_kvs)
        if tap is None:
            logits: mx.array = plain_model_class(self).__call__(self, inputs, cache=cache, **kwargs)
            return logits
        embeddings = kwargs.get("input_embeddings")
        tokens = inputs if embeddings is None else embeddings
        assert tokens is not None
        step = tap.begin(len(text["model"]["layers"]), tokens.shape[1])
        logits = call_text_model(text, inputs, step, cache=cache, **kwargs)
        step.end()
        return logits

    def make_cache(self) -> list[Any]:
        """What `store_kv` chose; else mlx-lm's caches, with rings that `mlx_lm.generate --kv-bits` can quantize."""
        if self._storage is not None:
            return caches_of(*self._storage)
        return quantizable(plain_model_class(self).make_cache(self))

    def store_kv(self, spec: Spec, depth: int = 0) -> None:
        """From now on `make_cache` gives caches that store K/V as `spec.kv` says. depth: 0 is no rollback."""
        object.__setattr__(self, "_storage", (spec, depth))

    @contextmanager
    def tapped(
        self, layers: Iterable[int], position: int | None = None, edit: Tap | None = None
    ) -> Iterator[TapRecorder]:
        """Tap every forward inside the context, whoever calls it (`mlx_lm.stream_generate`, say).

        with model.tapped([5, 17, 48]) as taps: ...; then `taps.steps` and `taps.rows(17)`. Arguments as HiddenTap's.
        Raises StraightlineError if the model is tapped already.
        """
        if self._tap is not None:
            raise StraightlineError("tapped: the model is tapped already; expected one context at a time")
        recorder = TapRecorder(layers, position, edit)
        object.__setattr__(self, "_tap", recorder)
        try:
            yield recorder
        finally:
            object.__setattr__(self, "_tap", None)

    def _bind(self) -> Bound:
        """One thread binds; those that come meanwhile find what it has bound."""
        text = text_model(self)
        with self._lock:
            bound = self._bound
            if bound is not None and bound.still_holds(text):
                return bound
            earlier = None if bound is None else bound.pass_on()
            # Let go of first: it may hold joined weights that are about to be joined anew.
            bound = None
            object.__setattr__(self, "_bound", None)
            bound = Bound(text, self._options, earlier)
            self.dispatch.file = bound.files[0].__name__ if bound.routes else None
            self.dispatch.reason = bound.reason
            for name in REASONS:
                setattr(self.dispatch, name, getattr(bound, name))
            self.dispatch.tier, self.dispatch.tier_sites = self._options.tier, bound.tier_sites
            object.__setattr__(self, "_bound", bound)
            return bound

    def __copy__(self) -> Any:
        """A shallow copy shares every module, and binds by itself."""
        return _specialized(self, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy binds its own arrays; sharing this one's callables would leave it with ours."""
        plain = plain_model_class(self)
        twin = plain.__new__(plain)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy({k: v for k, v in vars(self).items() if k not in _OWN}, memo))
        entries: Any = self
        dict.update(twin, {key: copy.deepcopy(value, memo) for key, value in entries.items()})
        memo[id(self)] = specialized = _specialized(twin, self._options)
        object.__setattr__(specialized, "_storage", self._storage)
        return specialized

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle holds the weights and how they were specialized, a file of the user's by its path.

        What comes out of it binds anew, at its first call.
        """
        _, (kind,), state, *rest = super().__reduce_ex__(protocol)
        path = getattr(self._options.module, "__file__", None)
        how = (kind, path, replace(self._options, module=None), self._storage)
        return (_unpickled, how, {key: value for key, value in state.items() if key not in _OWN}, *rest)


def _unpickled(kind: type[Specialized], path: str | None, options: Options, storage: tuple[Spec, int] | None) -> Any:
    """Without its weights yet. Raises StraightlineError if the file at `path` is gone."""
    options = replace(options, module=None if path is None else load_generated(path))
    return _with_own(kind.__new__(kind), options, storage)


_OWN = ("dispatch", "_bound", "_options", "_tap", "_storage", "_lock")


class SpecializedModel(Specialized, gemma4.Model):  # type: ignore[misc]
    """gemma4.Model (and gemma4_unified): the text model lies in `language_model`."""


class SpecializedTextModel(Specialized, gemma4_text.Model):  # type: ignore[misc]
    """gemma4_text.Model: the text model itself."""


CLASSES: dict[type, type[Specialized]] = {gemma4.Model: SpecializedModel, gemma4_text.Model: SpecializedTextModel}


def plain_model_class(model: Specialized) -> Any:
    return next(plain for plain, specialized in CLASSES.items() if type(model) is specialized)


def text_model(model: Any) -> nn.Module:
    """The gemma4_text.Model in a model of either class."""
    text: nn.Module = model.get("language_model", model)
    return text


def specialize(
    model: Any,
    module: ModuleType | None = None,
    *,
    strict: bool = False,
    generate: bool = False,
    kernels: bool | None = None,
    tier: str = "exact",
) -> Any:
    """The model with its forward replaced by the generated file of its architecture. Shares every array.

    model: a loaded mlx-lm Gemma 4 model, outer or text. It stays as it is, and both see adapters put into its layers.
        Adapters, new weights and replaced modules are noticed; an array that is edited in place (`weight[0] = 1`)
        must be assigned to its module to be.
    module: the generated module to use, from `load_generated`; by default the packaged one with the same fingerprint
        (for a model that is specialized already, the one that it uses).
    strict: raise StraightlineError where the monolith would serve, here and at every call.
    generate: if no file fits, render one into the user's cache folder (needs the `codegen` extra); it is found there
        again next time, with or without this flag. Warns where that cannot be done, and mlx-lm's code serves.
    kernels: let decoding use fused kernels of straightline's own, each where a self-check on this device says that it
        is exact. None: on CUDA, where they are compiled once for all processes; elsewhere True asks for them.
    tier: "exact", mlx-lm's bits; or "fast", which is not: the attention of single tokens by a kernel of straightline's
        own, where a self-check on this device says that it is closer to the true result than MLX's operations.
        `model.dispatch.tier_sites` says where it runs, and why not. Where it does not, the exact form does.

    Without a file that fits, every call goes to the monolith; `model.dispatch.reason` says why.
    Raises StraightlineError if the model is not an mlx-lm Gemma 4 model, or there is no such tier.
    """
    if module is not None and not (isinstance(module, ModuleType) and hasattr(module, "ARCHITECTURE")):
        raise StraightlineError(f"module is {module!r}; expected one of load_generated(path)")
    if isinstance(model, Specialized) and module is None:
        module = model._options.module
    check_tier(tier)
    specialized = _specialized(model, Options(module, strict, generate, kernels, tier))
    bound = specialized._bind()
    if strict and bound.reason:
        raise StraightlineError(f"strict: {bound.reason}")
    if generate and bound.reason:
        warnings.warn(f"straightline: mlx-lm's own code serves this model: {bound.reason}", stacklevel=2)
    return specialized


def _specialized(model: Any, options: Options) -> Any:
    """Not bound yet; the first call binds."""
    plain: Any = plain_model_class(model) if isinstance(model, Specialized) else plain_class(model)
    if plain not in CLASSES:
        raise StraightlineError(
            f"model is {plain.__module__}.{plain.__name__}; expected mlx_lm.models.gemma4.Model or gemma4_text.Model"
        )
    specialized: Any = CLASSES[plain].__new__(CLASSES[plain])
    specialized.__dict__.update({key: value for key, value in vars(model).items() if key not in _OWN})
    dict.update(specialized, model)
    return _with_own(specialized, options, model._storage if isinstance(model, Specialized) else None)


def _with_own(specialized: Any, options: Options, storage: tuple[Spec, int] | None) -> Any:
    own = (Dispatch(options.strict), None, options, None, storage, Lock())
    for name, value in zip(_OWN, own, strict=True):
        object.__setattr__(specialized, name, value)
    return specialized
