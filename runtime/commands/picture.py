"""The architecture as rows: what both pictures of `straightline show` draw, in a terminal and as SVG. Pure."""

from dataclasses import dataclass

from ...codegen.spec import Attention, Spec


@dataclass(frozen=True)
class LayerRow:
    """One layer. readers: the layers that read its K/V; source: the layer that it reads, itself if it owns them."""

    index: int
    sliding: bool
    heads: str
    mlp: int
    source: int
    readers: tuple[int, ...]
    k_eq_v: bool
    kv_bits: int
    experts: str
    per_layer_input: int
    tapped: bool

    @property
    def owns(self) -> bool:
        return self.source == self.index

    @property
    def kv(self) -> str:
        """What it does about keys and values, in words."""
        if not self.owns:
            return f"reads {self.source}"
        bits = f"{self.kv_bits}-bit" if self.kv_bits else "plain"
        shared = f", read by {len(self.readers)}" if self.readers else ""
        return f"{bits}{' K=V' if self.k_eq_v else ''}{shared}"


def rows(spec: Spec, tapped: frozenset[int] = frozenset()) -> tuple[LayerRow, ...]:
    return tuple(_row(spec, index, index in tapped) for index in range(len(spec.layers)))


def _row(spec: Spec, index: int, tapped: bool) -> LayerRow:
    layer, stored, experts = spec.layers[index], spec.kv_of(index), spec.experts
    return LayerRow(
        index=index,
        sliding=layer.attention is Attention.SLIDING,
        heads=f"{layer.query_heads}:{layer.kv_heads} x {layer.head_dim}",
        mlp=layer.intermediate_size,
        source=layer.kv_source,
        readers=tuple(at for at, one in enumerate(spec.layers) if one.kv_source == index and at != index),
        k_eq_v=layer.k_eq_v,
        kv_bits=stored.bits if stored else 0,
        experts=f"{experts.count} x {experts.intermediate_size}, top {experts.top_k}" if experts else "",
        per_layer_input=spec.per_layer_input_size,
        tapped=tapped,
    )


def headline(spec: Spec) -> str:
    """The model in one line."""
    sliding = sum(layer.attention is Attention.SLIDING for layer in spec.layers)
    count = len(spec.layers)
    facts = [f"{count} layers ({sliding} sliding with a window of {spec.sliding_window}, {count - sliding} full)"]
    if len(spec.owners) < count:
        facts.append(f"{count - len(spec.owners)} share K/V")
    facts.append(f"hidden {spec.hidden_size}")
    facts.append(f"vocabulary {spec.vocab_size}")
    if spec.experts:
        facts.append(f"{spec.experts.count} experts, {spec.experts.top_k} a token")
    if spec.per_layer_input_size:
        facts.append(f"per-layer inputs of {spec.per_layer_input_size}")
    return ", ".join(facts)
