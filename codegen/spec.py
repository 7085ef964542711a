"""Spec: a Gemma 4 text architecture in resolved numbers, and its fingerprint. Reads nothing, writes nothing.

The same Spec is reached from a published config.json and from the arguments of a loaded mlx-lm model.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from enum import Enum


class Attention(Enum):
    SLIDING = "sliding"
    FULL = "full"


class RopeKind(Enum):
    DEFAULT = "default"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer. `rotated`: how many of the head's lanes turn (all of them if default)."""

    kind: RopeKind
    theta: float
    rotated: int
    factor: float


@dataclass(frozen=True)
class Experts:
    count: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True)
class Quantized:
    """How a layer stores keys and values: `bits` a number, one scale and bias for each `group_size` numbers."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class Layer:
    """One decoder layer. `kv_source` is its own index, or that of the layer whose K/V it reads."""

    attention: Attention
    query_heads: int
    kv_heads: int
    head_dim: int
    k_eq_v: bool
    kv_source: int
    intermediate_size: int
    rope: Rope


@dataclass(frozen=True)
class Spec:
    """The text model. `sliding_window` is 0 without sliding layers, the per-layer sizes without that block.

    `kv` says how each owner of a cache stores K/V, in the order of `owners` (None: as they are); empty if all do.
    """

    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    final_logit_softcapping: float | None
    tie_word_embeddings: bool
    sliding_window: int
    per_layer_input_size: int
    per_layer_vocab_size: int
    experts: Experts | None
    layers: tuple[Layer, ...]
    kv: tuple[Quantized | None, ...] = ()

    @property
    def sentinel(self) -> int:
        """The tap index of the stream after the final norm."""
        return len(self.layers)

    @property
    def sources(self) -> tuple[int, ...]:
        """Layers whose K/V other layers read."""
        return tuple(sorted({layer.kv_source for index, layer in enumerate(self.layers) if layer.kv_source != index}))

    @property
    def owners(self) -> tuple[int, ...]:
        """Layers that own a cache, in order."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.kv_source == index)

    def kv_of(self, layer: int) -> Quantized | None:
        """How the K/V that this layer attends to are stored: its own, or its source's."""
        return self.kv[self.owners.index(self.layers[layer].kv_source)] if self.kv else None

    def with_kv(self, kv: tuple[Quantized | None, ...]) -> "Spec":
        """The same architecture with K/V stored so, given for each of `owners`."""
        return replace(self, kv=kv if any(kv) else ())

    @property
    def architecture(self) -> str:
        """The fingerprint of the same model with plain K/V: what a loaded model is known by."""
        return self.with_kv(()).fingerprint

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with any number of the architecture, or of how K/V are stored."""
        canonical = json.dumps(asdict(self), sort_keys=True, default=lambda value: value.value)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]
