"""What is compared with what: a specialized model beside one of mlx-lm's over the same arrays."""

import importlib.util
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from ...codegen.config import read_arguments
from ...codegen.spec import Spec
from ..arrays import dtype_name
from ..commands.ahead import expect_file
from ..commands.subject import Subject, name_of, published, published_kv_config, read_folder
from ..errors import StraightlineError
from ..loading import find_folder, load_model
from ..model import specialize, text_model
from ..registry import load_generated
from .random_model import build, size_in_gb
from .smaller import cut, reduced

STEPS, FEW_STEPS = 32, 2
TOOLS = ("jinja2", "libcst", "black")


@dataclass(frozen=True)
class Proof:
    """oracle: mlx-lm's model, which straightline never touched. quantized: the model for calls with `kv_config`."""

    oracle: Any
    model: Any
    quantized: Any
    kv_config: list[dict[str, int]] | None
    window: int
    vocabulary: int
    steps: int
    facts: dict[str, str]


def from_checkpoint(where: str) -> Proof:
    """Its own weights, held once: the second model is built lazily, then given the arrays of the first."""
    folder = find_folder(where)
    subject = read_folder(folder, name_of(where, folder))
    expect_file(subject, "verify")
    model, _ = load_model(folder)
    oracle, _ = load_model(folder, lazy=True)
    oracle.update(model.parameters())
    _same_arrays(model, oracle)
    return _packaged(subject, model, oracle, STEPS if _on_gpu() else 4)


def from_random(name: str, reduce: bool | None, layers: int | None, dtype: str | None, seed: int) -> Proof:
    """reduce: None for on a CPU only. dtype: None for float32 where reduced on a CPU, else bfloat16.

    Raises StraightlineError if a file has to be rendered and cannot be.
    """
    subject = published(name)
    reduce = not _on_gpu() if reduce is None else reduce
    dtype = dtype or ("float32" if reduce and not _on_gpu() else "bfloat16")  # bfloat16 takes 4 times as long there
    if not reduce and layers is None:
        model, oracle = build(subject.config, getattr(mx, dtype), seed)
        return _packaged(subject, model, oracle, STEPS)
    config = cut(subject.config, layers, None, None)
    config = reduced(config) if reduce else config
    kv_config = None if layers else _kv_config(subject)
    file = render_reduced(config, None)
    quantized_file = render_reduced(config, kv_config) if kv_config else None
    model, oracle = build(config, getattr(mx, dtype), seed)
    facts = {"model": f"{name}, {_what_was_cut(reduce, layers)}, random weights"}
    # One bound model takes one rendered file; the second is over the same arrays.
    plain = specialize(model, file, strict=True)
    quantized = specialize(model, quantized_file, strict=True) if quantized_file else plain
    return _proof(oracle, plain, quantized, kv_config, FEW_STEPS if reduce else STEPS, facts)


def with_kernels(proof: Proof, kernels: bool) -> Proof:
    """The same, decoding with fused kernels where they are exact here, or without."""
    model = specialize(proof.model, strict=True, kernels=kernels)
    quantized = model if proof.quantized is proof.model else specialize(proof.quantized, strict=True, kernels=kernels)
    return replace(proof, model=model, quantized=quantized, facts=proof.facts | decoding(model))


def _packaged(subject: Subject, model: Any, oracle: Any, steps: int) -> Proof:
    specialized = specialize(model)
    if specialized.dispatch.reason:
        raise StraightlineError(
            f"{subject.name}: there is nothing to verify: {specialized.dispatch.reason}; "
            f"straightline explain says which facts differ"
        )
    what = f"the checkpoint {subject.name}" if subject.folder else f"{subject.name}, random weights"
    return _proof(oracle, specialized, specialized, _kv_config(subject), steps, {"model": what})


def _proof(
    oracle: Any, model: Any, quantized: Any, kv_config: list[dict[str, int]] | None, steps: int, facts: dict[str, str]
) -> Proof:
    spec = read_arguments(text_model(oracle).args)
    files = dict.fromkeys(file for one in (model, quantized) for file in one._bound.files)
    named = ", ".join(f"{file.__name__.rpartition('.')[2]} ({file.FINGERPRINT})" for file in files)
    facts = facts | {"fingerprint": spec.architecture, "files": named} | decoding(model) | sizes(oracle, spec)
    window = spec.sliding_window or 64
    return Proof(oracle, model, quantized, kv_config, window, spec.vocab_size, steps, facts)


def sizes(oracle: Any, spec: Spec) -> dict[str, str]:
    dtype = dtype_name(text_model(oracle)["model"]["norm"]["weight"].dtype)
    size = f"{len(spec.layers)} layers, window {spec.sliding_window}, {dtype}, {size_in_gb(oracle):.2f} GB"
    return {"sizes": size}


def decoding(model: Any) -> dict[str, str]:
    """How single tokens are served."""
    by_token = model.dispatch.by_token_reason
    rows = "K/V of single tokens" + (f", unless rows lie token by token: {by_token}" if by_token else "")
    return {
        "one token": model.dispatch.decode_reason or "by decode",
        "blocks": model.dispatch.block_reason or "by decode, from the second of a shape that is exact",
        "in place": model.dispatch.in_place_reason or rows,
    }


def _kv_config(subject: Subject) -> list[dict[str, int]] | None:
    """Its own, or that of the published target of the same architecture."""
    if subject.kv_config is not None:
        return subject.kv_config
    found = published_kv_config(subject.spec)
    return found[1] if found else None


def render_reduced(config: dict[str, Any], kv_config: list[dict[str, int]] | None) -> ModuleType:
    missing = [tool for tool in TOOLS if importlib.util.find_spec(tool) is None]
    if missing:
        raise StraightlineError(
            f"a smaller model needs a file of its own, and rendering one needs {missing[0]}; install it with "
            "pip install 'straightline[codegen]', or verify at full size with --no-reduced"
        )
    from ...codegen import generate

    name = "reduced-kv" if kv_config else "reduced"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name.replace('-', '_')}.py")
        path.write_text(generate(config, name, kv_config=kv_config), encoding="utf-8")
        return load_generated(path)


def _what_was_cut(reduce: bool, layers: int | None) -> str:
    widths = "reduced to toy widths" if reduce else "full width"
    return f"{widths}, {layers} layers" if layers else f"{widths}, layers as published"


def _on_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def _same_arrays(model: Any, oracle: Any) -> None:
    """`update` passes over what it does not know; nothing of the second model may be left of its own."""
    from mlx.utils import tree_flatten

    theirs = dict(tree_flatten(oracle.parameters()))
    for name, value in tree_flatten(model.parameters()):
        if theirs.get(name) is not value:
            raise AssertionError(f"{name} is not shared")
