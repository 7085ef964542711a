"""The two models of a benchmark over the same arrays: mlx-lm's own, and the specialized one."""

import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from ...codegen.config import read_arguments, read_json
from ...codegen.kv import read_kv_config, uniform_kv_config
from ...codegen.spec import Spec
from ..commands.ahead import expect_file, expect_taps
from ..commands.subject import Subject, name_of, published, published_kv_config, read_folder
from ..decode_check import on_gpu
from ..errors import StraightlineError
from ..kernels.states import SiteState, running
from ..loading import find_folder, load_model
from ..model import specialize, text_model
from ..verification.proof import decoding, render_reduced, sizes
from ..verification.random_model import build
from ..verification.smaller import reduced
from .measures import alive

AUTO = "auto"


@dataclass(frozen=True)
class Wish:
    """What the models are to be. kv_config: a file, "auto" or None; tier: as `specialize` takes it.

    taps: what hidden states will be asked for.
    """

    kv_config: str | None
    kv_bits: int | None
    kernels: bool | None
    tier: str
    taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pair:
    """oracle: mlx-lm's. model: specialized. own_bytes: what specializing holds beside the weights that both share.

    sites: how each fused site of the model runs here.
    """

    oracle: Any
    model: Any
    spec: Spec
    kv_config: list[dict[str, int]] | None
    own_bytes: int
    sites: tuple[SiteState, ...]
    facts: dict[str, str]


def from_checkpoint(where: str, wish: Wish) -> Pair:
    """Its own weights, held once."""
    folder = find_folder(where)
    subject = read_folder(folder, name_of(where, folder))
    expect_file(subject, "time")
    expect_taps(subject.spec, wish.taps)
    kv_config = _kv_config(subject, wish)
    model, _ = load_model(folder)
    oracle, _ = load_model(folder, lazy=True)
    return pair_of(model, oracle, None, kv_config, wish, {"model": f"the checkpoint {subject.name}"})


def from_random(name: str, reduce: bool | None, bits: str, wish: Wish) -> Pair:
    """reduce: to toy widths; None for on a CPU only. bits: "4", "8" or "mixed".

    Raises StraightlineError if a file has to be rendered and cannot be.
    """
    subject = published(name)
    reduce = not on_gpu() if reduce is None else reduce
    dtype = mx.float32 if reduce and not on_gpu() else mx.bfloat16  # bfloat16 takes 4 times as long there
    config = reduced(subject.config) if reduce else subject.config
    expect_taps(subject.spec, wish.taps)
    kv_config = _kv_config(subject, wish)
    file = render_reduced(config, kv_config) if reduce else None
    model, oracle = build(config, dtype, bits=bits)
    widths = ", reduced to toy widths" if reduce else ""
    facts = {"model": f"{name}{widths}, random weights of {bits} bits"}
    return pair_of(model, oracle, file, kv_config, wish, facts)


def pair_of(
    model: Any,
    oracle: Any,
    file: ModuleType | None,
    kv_config: list[dict[str, int]] | None,
    wish: Wish,
    facts: dict[str, str],
) -> Pair:
    oracle.update(model.parameters())
    before = alive()
    started = time.perf_counter()
    specialized = specialize(model, file, strict=True, kernels=wish.kernels, tier=wish.tier)
    seconds = time.perf_counter() - started
    # Joined projections are views of new arrays: without this, the oracle alone would keep the old ones alive.
    oracle.update(specialized.parameters())
    spec = read_arguments(text_model(oracle).args)
    facts |= sizes(oracle, spec) | {"specialize": f"{seconds:.1f} s"} | decoding(specialized)
    facts |= {"tier": _tier(wish.tier, specialized.dispatch.tier_sites)}
    if kv_config is not None:
        facts["K/V"] = _words(kv_config)
        spec = spec.with_kv(read_kv_config(kv_config, spec))
    return Pair(oracle, specialized, spec, kv_config, max(0, alive() - before), running(specialized), facts)


def _tier(tier: str, sites: dict[str, tuple[str, str]]) -> str:
    """With where it runs, and what was measured there or why it does not."""
    return "; ".join([tier, *(f"{name} {state}: {reason}" for name, (state, reason) in sites.items())])


def _kv_config(subject: Subject, wish: Wish) -> list[dict[str, int]] | None:
    """Refused here, before weights are built, if it does not fit the model."""
    spec = subject.spec.with_kv(())
    where = "kv_config.json"
    if wish.kv_bits is not None:
        found: Any = uniform_kv_config(spec, wish.kv_bits)
        where = "--kv-bits"
    elif wish.kv_config is None:
        return None
    elif wish.kv_config == AUTO:
        found = subject.kv_config or (published_kv_config(spec) or ("", None))[1]
        if found is None:
            raise StraightlineError(f"{subject.name}: has no kv_config.json of its own; name a file in place of auto")
    else:
        found = read_json(Path(wish.kv_config))
        where = Path(wish.kv_config).name
    read_kv_config(found, spec, where)
    return list(found)


def _words(kv_config: list[dict[str, int]]) -> str:
    bits = [entry["bits"] for entry in kv_config if entry["bits"]]
    counts = ", ".join(f"{bits.count(one)} of {one} bits" for one in sorted(set(bits)))
    return f"{counts}, the other layers plain" if counts else "plain"
