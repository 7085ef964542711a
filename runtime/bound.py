"""Bound: one generated file with one model's weights, ready to be called; or the reason why there is none."""

from operator import is_
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..codegen.config import read_arguments
from ..codegen.errors import SpecError
from ..codegen.spec import Spec
from .caches import CacheGuard
from .errors import StraightlineError
from .evaluation import evaluate
from .facts import check_facts
from .registry import find_generated
from .taps import Tap
from .user_files import find_user_file, make_user_file
from .watch import changes, watch
from .weights import bind


class Bound:
    """The state of a specialized model as of `version` changes of its modules. `reason` is empty if it can serve."""

    def __init__(
        self, text: nn.Module, file: ModuleType | None, generate: bool = False, found: ModuleType | None = None
    ) -> None:
        """file: the only one to use, or None. found: the one that served last time, if any."""
        watch(text)
        evaluate_hidden_arrays(text)
        self.version = changes()
        self.marked = list(text["model"]["layers"])
        self.marks = [mark(module) for module in self.marked]
        self.file = file or found
        self.reason = ""
        try:
            if text.training:
                raise StraightlineError("the model is in training mode; call model.eval() for the generated path")
            spec = read_arguments(text.args)
            if file is None and found is not None and spec.fingerprint == found.FINGERPRINT:
                file = found
            self.file = file = choose_file(spec, file, generate)
            self.weights = bind(file, text)
            check_facts(text, spec)
            self.forward = file.forward
            self.sentinel: int = file.SENTINEL
            self.guard = CacheGuard(file.CACHES)
        except (SpecError, StraightlineError) as error:
            self.reason = str(error)

    def stale(self) -> bool:
        """Whether a module has changed since; also without a word, as mx.compile swaps the arrays of its inputs."""
        return self.version != changes() or not all(map(is_, map(mark, self.marked), self.marks))

    def refuse(self, inputs: object, cache: object, embeddings: object, per_layer_inputs: object, unknown: Any) -> str:
        """Why this call is not for the generated file; empty if it is."""
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
        return "" if cache is None else self.guard.refuse(cache)

    def __call__(self, inputs: mx.array, cache: Any, tap: Tap) -> mx.array:
        logits: mx.array = self.forward(self.weights, inputs, self.guard.none if cache is None else cache, tap)
        return logits


def mark(layer: Any) -> Any:
    """One array of a decoder layer; the object itself if it is none."""
    return layer.get("layer_scalar") if isinstance(layer, dict) else layer


def choose_file(spec: Spec, file: ModuleType | None, generate: bool) -> ModuleType:
    """The generated module for this architecture: `file` if it is, else one found or made. Raises StraightlineError."""
    if file is not None:
        if spec.fingerprint != file.FINGERPRINT:
            raise StraightlineError(
                f"the file is made for the fingerprint {file.FINGERPRINT}, but the model has {spec.fingerprint}"
            )
        return file
    found = find_generated(spec.fingerprint) or find_user_file(spec, generate)
    if found is None and generate:
        found = make_user_file(spec)
    if found is None:
        raise StraightlineError(
            f"no generated file has the fingerprint {spec.fingerprint}; make one with specialize(model, generate=True)"
        )
    return found


def evaluate_hidden_arrays(root: nn.Module) -> None:
    """Evaluates arrays under underscore names (RoPE's `_freqs`), which `mx.eval(model.parameters())` passes over.

    Left lazy, they belong to the loading thread's stream, and the first forward in another thread fails.
    """
    evaluate([value for module in root.modules() for key, value in module.items() if key.startswith("_")])
