"""Bound: the generated files of one architecture with one model's weights; or the reason why there are none."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import mlx.core as mx
import mlx.nn as nn

from ..codegen.config import read_arguments
from ..codegen.errors import SpecError
from .decode_check import IN_A_TRACE, batch_of_one_refused, block_refused, decode_refused, in_place_refused, on_gpu
from .errors import StraightlineError
from .evaluation import evaluate, evaluate_hidden
from .facts import check_facts
from .form import form_of, stream_dtype
from .in_place import Lease, leasable, lying, mixed, put_off
from .kernels import Site, sites_of
from .kv.batch_of_one import as_sequence, stand_in
from .kv.borrowed import give_all_back
from .kv.device import packing
from .kv.make import caches_for
from .kv.ours import make_ours
from .routes import Route, for_one_token, make_route, without_decode
from .serving_files import choose_files
from .tier import States, fast_refused, fast_route
from .watch import changed_since, changes, watch
from .weights import bind, for_blocks, with_heads_apart

BlockShape = tuple[int, str, tuple[int, ...]]  # see `form_of`; the file; batch, length, whether in batch caches


@dataclass(frozen=True)
class Options:
    """What `specialize` was asked for."""

    module: ModuleType | None
    strict: bool
    generate: bool
    kernels: bool | None
    tier: str = "exact"


class Earlier(NamedTuple):
    """What one binding passes on to the next: its files, what was found exact with them, and what was not.

    Found exact with weights of a form, see `form_of`; for `decode`, by one of the files.
    """

    files: tuple[ModuleType, ...] = ()
    decode_checked: frozenset[tuple[int, str]] = frozenset()
    batch_checked: frozenset[int] = frozenset()
    in_place_checked: frozenset[int] = frozenset()
    by_token_reason: str = ""
    by_token_uncompiled: bool = False
    blocks_checked: frozenset[BlockShape] = frozenset()
    blocks_refused: Mapping[BlockShape, str] = MappingProxyType({})
    compiled_reason: str = ""
    kernels_reason: str = ""
    tier_checked: frozenset[tuple[int, str, bool]] = frozenset()


class Bound:
    """The state of a specialized model as of `version` changes of its modules. `reason` is empty if it can serve."""

    def __init__(self, text: nn.Module, options: Options, earlier: Earlier | None = None) -> None:
        """earlier: what served until the modules changed.

        decode_reason: why `decode` serves no token, or "". quantized_reason: why it serves none over quantized K/V, or
        "". batch_reason: why it serves no batch of one, or "". in_place_reason: why it never writes in place, or "".
        by_token_reason: why it does not over rings whose rows lie token by token, or "".
        by_token_uncompiled: whether it does without mx.compile over those, since only so it is exact.
        block_reason: why blocks of a few tokens take `forward`, or those of one shape do, or "".
        compiled_reason: why it builds its layers one by one there, without mx.compile, or "".
        kernels_reason: why it does without kernels of straightline's own that are exact by themselves, or "".
        """
        file = options.module
        earlier = earlier or Earlier()
        found = earlier.files
        self.decode_checked = earlier.decode_checked
        self.batch_checked = earlier.batch_checked
        self.in_place_checked = earlier.in_place_checked
        self.by_token_reason = earlier.by_token_reason
        self.by_token_uncompiled = earlier.by_token_uncompiled
        self.blocks_checked = earlier.blocks_checked
        self.blocks_refused = dict(earlier.blocks_refused)
        self.compiled_reason = earlier.compiled_reason
        self.kernels_reason = earlier.kernels_reason
        self.tier_checked = earlier.tier_checked
        kernels = False if self.kernels_reason else options.kernels
        watch(text)
        evaluate_hidden(text)
        self.version = changes()
        self.text = ref(text)  # which may hold this: a text model that is specialized itself
        self.form = form_of(text)
        self.marked = text["model"]["layers"][0]
        self.mark = mark(self.marked)
        self.args = text.args
        self.top_k = text.args.top_k_experts
        self.files = (file,) if file else found
        self.routes: tuple[Route, ...] = ()
        self.products: tuple[tuple[str, Site], ...] = ()  # as in OneToken, as are these
        self.readers: frozenset[str] = frozenset()
        self.reason = ""
        self.decode_reason = self.quantized_reason = self.batch_reason = self.in_place_reason = ""
        self.block_reason = ""
        self.tier_sites: States = {}
        try:
            if text.training:
                raise StraightlineError("the model is in training mode; call model.eval() for the generated path")
            spec = read_arguments(text.args)
            if file is not None or not found or spec.architecture != found[0].ARCHITECTURE:
                self.files = choose_files(spec, file, options.generate)
            # One architecture, one set of slots: the files differ in how they treat caches only.
            self.weights = bind(self.files[0], text)
            check_facts(text, spec)
            # Not the weights' own, since they may be these. By whether there are several tokens of a sequence.
            of_rows = for_blocks(self.weights)
            self.of_blocks = of_rows, with_heads_apart(of_rows)
            self.sentinel: int = self.files[0].SENTINEL
            self.vocabulary = spec.vocab_size
            self.decode_reason = self._make_routes(text, kernels)
            if self.decode_reason and kernels is not False:
                # Each kernel is exact by itself; should they not be together, decode without them.
                together = self.decode_reason
                self.decode_reason = self._make_routes(text, False)
                self.kernels_reason = "" if self.decode_reason else together
            if self.decode_reason:
                self.routes = tuple(map(without_decode, self.routes))
                self.block_reason = self.decode_reason
            self.routes = tuple(map(self._checked_quantized, self.files, self.routes))
            self.batch_reason = self._check_batch()
            self.routes = tuple(map(self._checked_in_place, self.files, self.routes))
            if options.tier == "fast":
                self.routes = tuple(map(partial(self._fast_route, text), self.files, self.routes))
        except (SpecError, StraightlineError) as error:
            self.reason = str(error)

    def pass_on(self) -> Earlier:
        """For the binding that takes this one's place."""
        return Earlier(
            self.files,
            self.decode_checked,
            self.batch_checked,
            self.in_place_checked,
            self.by_token_reason,
            self.by_token_uncompiled,
            self.blocks_checked,
            self.blocks_refused,
            self.compiled_reason,
            self.kernels_reason,
            self.tier_checked,
        )

    def _make_routes(self, text: nn.Module, kernels: bool | None) -> str:
        """Also for single tokens; the result says why `decode` serves none, or ""."""
        self.weights.single, self.products, self.readers = for_one_token(text, self.weights, self.files, kernels)
        made = [make_route(file, stream_dtype(text), kernels, self.readers) for file in self.files]
        self.routes = tuple(route for route, _ in made)
        for file, (_, refused) in zip(self.files, made, strict=True):
            self.in_place_reason = refused.in_place or self.in_place_reason
            self.by_token_reason = self.by_token_reason or refused.by_token
            self.block_reason = refused.blocks or self._refused_before(file) or self.block_reason
        return self._check_decode()

    def _refused_before(self, file: ModuleType) -> str:
        """Why blocks of the last shape that was refused are; or ""."""
        about = self.form, file.FINGERPRINT
        return next((why for (*what, _), why in reversed(self.blocks_refused.items()) if tuple(what) == about), "")

    def _check_decode(self) -> str:
        """Of the file for plain K/V, if there is one: what the others share with it is all but their caches."""
        if not self.weights.one_token:
            return "projections that are joined have weights of several dtypes"
        pairs = list(zip(self.files, self.routes, strict=True))
        return self._decode_refused(*next((pair for pair in pairs if not pair[1].guard.quantized), pairs[0]))

    def _decode_refused(self, file: ModuleType, route: Route) -> str:
        what = self.form, file.FINGERPRINT
        if route.decode is None or what in self.decode_checked or not on_gpu():
            return ""
        reason = decode_refused(self.weights, route, partial(caches_for, file.CACHES), self.vocabulary)
        self.decode_checked |= frozenset(() if reason else (what,))
        return reason

    def _checked_quantized(self, file: ModuleType, route: Route) -> Route:
        """The route without `decode` where that is exact for plain K/V only."""
        refused = self._decode_refused(file, route)
        self.quantized_reason = self.quantized_reason or refused
        return without_decode(route) if refused else route

    def _check_batch(self) -> str:
        """A lone request in batch caches has plain K/V."""
        if self.form in self.batch_checked or not on_gpu():
            return self.decode_reason
        for file, route in zip(self.files, self.routes, strict=True):
            if not route.guard.quantized and route.decode is not None:
                caches = partial(caches_for, file.CACHES)
                reason = batch_of_one_refused(self.weights, route, caches, self.vocabulary)
                self.batch_checked |= frozenset(() if reason else (self.form,))
                return reason
        return self.decode_reason

    def _fast_route(self, text: nn.Module, file: ModuleType, route: Route) -> Route:
        """The route with the fast tier's attention, once it has kept its bound on this model's own tokens."""
        sites = sites_of(file)
        fast, states = fast_route(route, sites, file.CACHES, stream_dtype(text))
        refused, checked = self.decode_reason, (self.form, file.FINGERPRINT, fast.whole)
        if fast is not route and not refused and checked not in self.tier_checked:
            refused = fast_refused(self.weights, fast, sites, partial(caches_for, file.CACHES), self.vocabulary)
            self.tier_checked |= frozenset(() if refused else (checked,))
        self.tier_sites |= {name: ("exact", refused) for name in states} if refused else states
        return route if refused else fast

    def _checked_in_place(self, file: ModuleType, route: Route) -> Route:
        """The route as it is exact: with compiled layers, without them, or not in place at all."""
        in_place = route.in_place
        if in_place is None:
            return route
        if self.compiled_reason:
            in_place = in_place.uncompiled()
        by_token = in_place.by_token
        if self.by_token_uncompiled and by_token is not None:
            by_token = by_token.uncompiled()
        route = route._replace(in_place=in_place._replace(by_token=by_token))
        if self.form not in self.in_place_checked:
            refused = self._in_place_refused(file, route)
            if refused and not self.compiled_reason:
                self.compiled_reason = refused
                return self._checked_in_place(file, route)
            self.in_place_reason = refused
            if refused:
                return route._replace(in_place=None)
            self.in_place_checked |= frozenset((self.form,))
            if by_token is not None and not self.by_token_reason:
                refused = self._in_place_refused(file, route, by_token=True)
                if refused and by_token.settled is not by_token.moving:
                    self.by_token_uncompiled = True
                    route = route._replace(in_place=in_place._replace(by_token=by_token.uncompiled()))
                    refused = self._in_place_refused(file, route, by_token=True)
                self.by_token_reason = refused
        return route._replace(in_place=in_place._replace(by_token=None)) if self.by_token_reason else route

    def _in_place_refused(self, file: ModuleType, route: Route, by_token: bool = False) -> str:
        return in_place_refused(self.weights, route, partial(caches_for, file.CACHES), self.vocabulary, by_token)

    def block(self, route: Route, shape: tuple[int, int], caches: list[Any]) -> SimpleNamespace | None:
        """What `decode` calls for ids of this shape, [B, L], over these caches; None if `forward` takes them.

        Of each shape the first goes through `forward`. The second time it is asked for, both are compared.
        """
        blocks = route.blocks
        if blocks is None:
            return None
        padded = type(caches[0].offset) is not int
        whole = (*shape, padded)
        checked = self.form, blocks.file.FINGERPRINT, whole
        # Chunks of a prompt in batch caches may move rows of their own accord.
        if (padded and shape[1] > 1) or checked in self.blocks_refused or not blocks.due(whole, caches):
            return None
        if checked not in self.blocks_checked:
            caches_of_file = partial(caches_for, blocks.file.CACHES)
            weights = self.of_blocks[shape[1] > 1]
            refused = block_refused(self.weights, weights, route, shape, padded, caches_of_file, self.vocabulary)
            if refused:
                if refused != IN_A_TRACE:
                    self.block_reason = f"{shape[0]} by {shape[1]} tokens: {refused}"
                    self.blocks_refused[checked] = self.block_reason
                return None
            self.blocks_checked |= {checked}
        return blocks.begin(shape, caches)

    def lease(self, route: Route, caches: list[Any]) -> None:
        """After a token of `decode`: whether the next ones may go where they stay."""
        if route.in_place is None or not leasable(caches):
            return
        if not evaluate([(cache.keys, cache.values) for cache in caches]):
            return
        found = lying(caches)
        if found is None or mixed(caches, found) or (route.in_place.by_token is None and any(map(any, found))):
            put_off(caches)
        else:
            Lease(caches, route.guard, route.whole, found)

    def as_sequence(self, route: Route, caches: list[Any]) -> None:
        """After a token of `forward` over batch caches: whether `decode` takes the next ones, as of one sequence."""
        if self.batch_reason:
            return
        sequence = as_sequence(caches)
        if sequence and not route.guard.refuse(sequence) and route.guard.maskless(sequence):
            stand_in(caches, sequence)

    def stale(self) -> bool:
        """Whether a module has changed since. mx.compile swaps all arrays or none behind their backs.

        Of the arguments, which nothing watches, mlx-lm's forward reads the number of experts only.
        """
        return self.version != changes() or mark(self.marked) is not self.mark or self.args.top_k_experts != self.top_k

    def still_holds(self, text: nn.Module) -> bool:
        """Whether all that has changed since is of other models. Then it is stale no longer."""
        now = changes()
        if text.args is not self.args or self.text() is not text:
            return False
        if mark(self.marked) is not self.mark or self.args.top_k_experts != self.top_k:
            return False
        if changed_since(text, self.version):
            return False
        self.version = now
        return True

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

    def owner(self, lease: Lease) -> Route | None:
        """The route whose lease it is; None, too, for a lease of another model or of what this one was bound to."""
        return next((route for route in self.routes if route.guard is lease.owner), None)

    def route(self, cache: Any) -> tuple[Route | None, str]:
        """The first file that takes these caches, or the reason of the one that comes closest.

        Caches whose rows are elsewhere fit none, until they have them back, nor do mlx-lm's own, until they are ours:
        both here, so that a list is looked through once.
        """
        reasons = []
        for route in self.routes:
            reason = route.guard.refuse(cache)
            if not reason:
                return route, ""
            reasons.append(reason)
        if give_all_back(cache) or make_ours(cache):
            return self.route(cache)
        quantized = isinstance(cache, list) and any(packing(one)[0] for one in cache)
        return None, reasons[-1 if quantized else 0]


def mark(layer: Any) -> Any:
    """One array of a decoder layer; the object itself if it is none."""
    return layer.get("layer_scalar") if isinstance(layer, dict) else layer
