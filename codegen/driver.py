"""What ./regen.sh does: targets -> wanted bytes -> compared with generated/ -> reported, or written.

Everything is rendered before anything is written, so an error leaves generated/ as it was.
"""

import shlex
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from . import upstream
from .check import compare, orphans, report
from .checkpoint import CONFIG, read_tensors
from .config import read_file, read_json
from .errors import SpecError
from .target import Target, checkpoint_target, read_target, target_names
from .tensors import check_tensors, quantization_modes
from .write import write_files

GENERATED = Path(__file__).parent.parent / "generated"
FEW = 2  # targets that are rendered before a pool of processes has started


def chosen(names: Iterable[str]) -> tuple[Target, ...]:
    """The committed targets of these names, each once; all of them if none is named."""
    return tuple(read_target(name) for name in dict.fromkeys(names) or target_names())


def rendered(targets: Iterable[Target]) -> dict[str, bytes]:
    """File name to bytes. The tools that render are loaded here, not by `./regen.sh --help`."""
    from .pipeline import source_of

    wanted = tuple(targets)
    if len(wanted) <= FEW:
        sources = [source_of(target) for target in wanted]
    else:
        with ProcessPoolExecutor() as pool:
            sources = list(pool.map(source_of, wanted))
    return {f"{target.module}.py": source.encode() for target, source in zip(wanted, sources, strict=True)}


def check(targets: tuple[Target, ...]) -> tuple[str, ...]:
    """What is wrong in generated/ and upstream, line by line; nothing if all is well. Writes nothing."""
    files = compare(GENERATED, rendered(targets))
    stale = [target.name for target, file in zip(targets, files, strict=True) if not file.fresh]
    cure = " ".join(["./regen.sh", *(stale if len(stale) < len(target_names()) else [])])
    return tuple(report(GENERATED.name, files, _orphans(), upstream.drift(), cure))


def regenerate(targets: tuple[Target, ...], accept_upstream: bool) -> tuple[str, ...]:
    """Write generated/ (and upstream.lock), and say for each file whether it changed."""
    lock = {upstream.LOCK.name: upstream.accepted().encode()} if accept_upstream else {}
    if not accept_upstream:
        refuse_drift()
    strays = _orphans()
    lines = written(GENERATED, GENERATED.name, rendered(targets))
    # The lock last: killed in between, the review is still asked for.
    lines += written(upstream.LOCK.parent, upstream.LOCK.parent.name, lock)
    return lines + tuple(f"{GENERATED.name}/{name}: orphan, made by no spec; remove it" for name in strays)


def from_checkpoint(folder: Path, name: str, kv_config: Path | None = None) -> tuple[Target, tuple[str, ...]]:
    """The target for a checkpoint's folder, checked against its tensors, and what the user should know of them."""
    if not folder.is_dir():
        raise SpecError(f"{folder}: is not a folder; expected one with a {CONFIG} and safetensors files")
    config = read_file(folder / CONFIG)
    target = checkpoint_target(config, name, read_json(kv_config, "a kv_config.json") if kv_config else None)
    notes = check_tensors(target.spec, read_tensors(folder), quantization_modes(config))
    beside = folder / "kv_config.json"
    if kv_config is None and beside.is_file():
        notes += (
            f"{beside} is not used; to bake its quantized K/V caches, add --kv-config {shlex.quote(str(beside))}",
        )
    return target, notes


def written(folder: Path, shown: str, files: dict[str, bytes]) -> tuple[str, ...]:
    if not files:
        return ()
    try:
        changed = write_files(folder, files)
    except OSError as error:
        raise SpecError(f"{shown}: cannot be written ({error.strerror}); expected a folder that can") from None
    return tuple(f"{shown}/{name}: {'written' if name in changed else 'unchanged'}" for name in files)


def refuse_drift() -> None:
    """A file rendered over a changed mlx-lm may not equal it, so nothing is rendered before a review."""
    sentences = upstream.drift()
    if sentences:
        more = f" ({len(sentences) - 1} more: ./regen.sh --check)" if len(sentences) > 1 else ""
        raise SpecError(f"{sentences[0]}{more}")


def _orphans() -> tuple[str, ...]:
    return orphans(GENERATED, [f"{name.replace('-', '_')}.py" for name in target_names()])
