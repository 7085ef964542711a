"""Bound: the generated files of one architecture with one model's weights; or the reason why there are none."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from ..codegen.config import read_arguments
from ..codegen.errors import SpecError
from ..codegen.spec import Spec
from .caches import CacheGuard
from .decode_check import decode_refused, on_gpu
from .errors import StraightlineError
from .evaluation import evaluate
from .facts import check_facts
from .kernels import Site, resolve_all
from .kv.device import packing
from .registry import find_generated
from .user_files import find_user_file, make_user_file
from .watch import changes, watch
from .weights import bind, floating


@dataclass(frozen=True)
class Options:
    """What `specialize` was asked for."""

    module: ModuleType | None
    strict: bool
    generate: bool
    kernels: bool | None


class Route(NamedTuple):
    """One generated file: whom it takes (`guard`), what runs for any width and, if it can, for one token; its sites."""

    guard: CacheGuard
    forward: Callable[..., mx.array]
    decode: Callable[..., mx.array] | None
    sites: SimpleNamespace


class Earlier(NamedTuple):
    """What one binding passes on to the next: its files, and whether `decode` was found exact with them."""

    files: tuple[ModuleType, ...]
    decode_checked: bool


class Bound:
    """The state of a specialized model as of `version` changes of its modules. `reason` is empty if it can serve."""

    def __init__(self, text: nn.Module, options: Options, earlier: Earlier | None = None) -> None:
        """earlier: what served until the modules changed. decode_reason: why `decode` serves no token, or "".

        kernels_reason: why it does without kernels of straightline's own that are exact by themselves, or "".
        """
        file = options.module
        found, self.decode_checked = earlier or Earlier((), False)
        watch(text)
        evaluate_hidden_arrays(text)
        self.version = changes()
        self.marked = text["model"]["layers"][0]
        self.mark = mark(self.marked)
        self.args = text.args
        self.top_k = text.args.top_k_experts
        self.files = (file,) if file else found
        self.routes: tuple[Route, ...] = ()
        self.reason = ""
        self.decode_reason = ""
        self.kernels_reason = ""
        try:
            if text.training:
                raise StraightlineError("the model is in training mode; call model.eval() for the generated path")
            spec = read_arguments(text.args)
            if file is not None or not found or spec.architecture != found[0].ARCHITECTURE:
                self.files = choose_files(spec, file, options.generate)
            # One architecture, one set of slots: the files differ in how they treat caches only.
            self.weights = bind(self.files[0], text)
            check_facts(text, spec)
            self.sentinel: int = self.files[0].SENTINEL
            self.routes = tuple(self._route(text, file, options.kernels) for file in self.files)
            self.decode_reason = self._check_decode(text, spec.vocab_size)
            if self.decode_reason and options.kernels is not False:
                # Each kernel is exact by itself; should they not be together, decode without them.
                together = self.decode_reason
                self.routes = tuple(self._route(text, file, False) for file in self.files)
                self.decode_reason = self._check_decode(text, spec.vocab_size)
                self.kernels_reason = "" if self.decode_reason else together
            if self.decode_reason:
                self.routes = tuple(route._replace(decode=None) for route in self.routes)
        except (SpecError, StraightlineError) as error:
            self.reason = str(error)

    def _route(self, text: nn.Module, file: ModuleType, kernels: bool | None) -> Route:
        sites = {name.lower(): site for name, site in vars(file).items() if isinstance(site, Site)}
        calls = resolve_all(sites.values(), stream_dtype(text), kernels=kernels)
        return Route(
            CacheGuard(file.CACHES),
            file.forward,
            file.decode,
            SimpleNamespace(**dict(zip(sites, calls, strict=True))),
        )

    def _check_decode(self, text: nn.Module, vocabulary: int) -> str:
        if not self.weights.one_token:
            return "projections that are joined have weights of several dtypes"
        if self.decode_checked or not on_gpu():
            return ""
        plain = next((route for route in self.routes if not route.guard.quantized), None)
        if plain is None or plain.decode is None:
            return "a file with quantized caches alone cannot be checked at load"
        reason = decode_refused(self.weights, plain.forward, plain.decode, plain.sites, _caches_of(text), vocabulary)
        self.decode_checked = not reason
        return reason

    def stale(self) -> bool:
        """Whether a module has changed since. mx.compile swaps all arrays or none behind their backs.

        Of the arguments, which nothing watches, mlx-lm's forward reads the number of experts only.
        """
        return self.version != changes() or mark(self.marked) is not self.mark or self.args.top_k_experts != self.top_k

    def refuse(self, inputs: object, embeddings: object, per_layer_inputs: object, unknown: Any) -> str:
        """Why no generated file takes this call, whatever its caches; empty if one may."""
        if self.reason:
            return self.reason
        if embeddings is not None:
            return "input_embeddings are given, file expects token ids"
        if per_layer_inputs is not None:
            return "per_layer_inputs are given, file computes its own"
        if unknown:
            return f"{min(unknown)} is given, file does not know it"
        if type(inputs) is not mx.array or inputs.ndim != 2 or not inputs.size:
            shape = f"of shape {list(inputs.shape)}" if isinstance(inputs, mx.array) else type(inputs).__name__
            return f"inputs are {shape}, file expects token ids [B, L]"
        return ""

    def route(self, cache: Any) -> tuple[Route | None, str]:
        """The first file that takes these caches, or the reason of the one that comes closest."""
        reasons = []
        for route in self.routes:
            reason = route.guard.refuse(cache)
            if not reason:
                return route, ""
            reasons.append(reason)
        quantized = isinstance(cache, list) and any(packing(one)[0] for one in cache)
        return None, reasons[-1 if quantized else 0]


def _caches_of(text: nn.Module) -> Callable[[], list[Any]]:
    """mlx-lm's own, whatever the model was loaded to store K/V as."""
    return lambda: list(gemma4_text.Model.make_cache(text))


def mark(layer: Any) -> Any:
    """One array of a decoder layer; the object itself if it is none."""
    return layer.get("layer_scalar") if isinstance(layer, dict) else layer


def choose_files(spec: Spec, file: ModuleType | None, generate: bool) -> tuple[ModuleType, ...]:
    """The modules of this architecture: `file` if it is, else those found or made. Raises StraightlineError."""
    if file is not None:
        if spec.architecture != file.ARCHITECTURE:
            raise StraightlineError(
                f"the file is made for the fingerprint {file.ARCHITECTURE}, but the model has {spec.architecture}"
            )
        return (file,)
    found = find_generated(spec.architecture)
    if found:
        return found
    kept = find_user_file(spec, generate)
    if kept is None and generate:
        kept = make_user_file(spec)
    if kept is None:
        raise StraightlineError(
            f"no generated file has the fingerprint {spec.architecture}; make one with specialize(model, generate=True)"
        )
    return (kept,)


def stream_dtype(text: nn.Module) -> mx.Dtype:
    """The one dtype of all floating parameters; float32 if they mix, which no kernel is made for."""
    dtypes = floating(text)
    return dtypes.pop() if len(dtypes) == 1 else mx.float32


def evaluate_hidden_arrays(root: nn.Module) -> None:
    """Evaluates arrays under underscore names (RoPE's `_freqs`), which `mx.eval(model.parameters())` passes over.

    Left lazy, they belong to the loading thread's stream, and the first forward in another thread fails.
    """
    evaluate([value for module in root.modules() for key, value in module.items() if key.startswith("_")])
