"""A target as a table for people: one line a layer. Pure."""

from .plan import Step, make_plan
from .spec import Layer
from .target import Target

HEADINGS = ("tap", "kind", "mask", "window", "heads x KV x dim", "MLP", "K/V")


def layer_table(target: Target) -> str:
    spec = target.spec
    plan = make_plan(target)
    windows = {mask.name: mask.window for mask in plan.masks}
    rows = [
        HEADINGS,
        ("-1", "embedding", *("",) * 5),
        *(_row(step, spec.layers[step.index], windows[step.mask]) for step in plan.steps),
        (str(plan.sentinel), "final norm", *("",) * 5),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    return "\n".join([plan.title, _numbers(target), "", *lines]) + "\n"


def _numbers(target: Target) -> str:
    spec = target.spec
    facts = [
        f"hidden {spec.hidden_size}",
        f"vocabulary {spec.vocab_size}",
        f"eps {spec.rms_norm_eps!r}",
        f"softcap {spec.final_logit_softcapping!r}" if spec.final_logit_softcapping is not None else "no softcap",
        "tied head" if spec.tie_word_embeddings else "own head",
    ]
    if spec.per_layer_input_size:
        facts.append(f"per-layer inputs {spec.per_layer_input_size} wide")
    if spec.experts:
        facts.append(f"experts {spec.experts.intermediate_size} wide")
    return f"{', '.join(facts)}; fingerprint {spec.fingerprint}"


def _row(step: Step, layer: Layer, window: int | None) -> tuple[str, ...]:
    heads = f"{layer.query_heads} x {layer.kv_heads} x {layer.head_dim}"
    keys = f"of layer {step.source}" if step.cache is None else f"cache {step.cache}"
    if step.kind.kv_bits:
        keys += f", {step.kind.kv_bits} bits in groups of {step.kind.kv_group_size}"
    width = str(layer.intermediate_size)
    return str(step.index), step.kind.name, step.mask, "all" if window is None else str(window), heads, width, keys


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    tap, *rest = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
    return "  ".join([tap.strip().rjust(widths[0]), *rest]).rstrip()
