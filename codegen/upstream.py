"""Drift of mlx-lm under the code that templates/ and runtime/ transcribe. Reads upstream.lock and mlx-lm's sources.

The lock names each function, the digest of its source and the file of ours to review when that changes. mlx-lm is
found but never imported, and a file that is the same as a whole is not parsed.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from .errors import SpecError, listing, show

LOCK = Path(__file__).parent / "upstream.lock"
ACCEPT = "./regen.sh --accept-upstream"
HEADER = """\
# The mlx-lm code that templates/ and runtime/ transcribe or count on: each name, the digest of its source, and the file
# to review when that changes. Then ./regen.sh --accept-upstream writes the new digests. To watch one more name, add its
# line by hand with the digest -.
"""
GONE = "gone"  # in the place of a digest: what was locked is no longer there


@dataclass(frozen=True)
class Definition:
    """A function or class of mlx-lm by its qualified name."""

    name: str
    digest: str
    review: str


@dataclass(frozen=True)
class Source:
    """One file of mlx-lm, by its path inside the package."""

    path: str
    digest: str
    definitions: tuple[Definition, ...]


@dataclass(frozen=True)
class Upstream:
    """mlx-lm as locked, or as installed: only what the lock names."""

    version: str
    sources: tuple[Source, ...]


def drift() -> tuple[str, ...]:
    """One sentence for each locked definition that the installed mlx-lm has changed or lost."""
    locked = read_lock(LOCK)
    return differences(locked, installed(locked))


def accepted() -> str:
    """The text of upstream.lock for the installed mlx-lm."""
    now = installed(read_lock(LOCK))
    gone = [one.name for source in now.sources for one in source.definitions if one.digest == GONE]
    if gone:
        verb, noun = ("is", "its line") if len(gone) == 1 else ("are", "their lines")
        raise SpecError(
            f"upstream.lock: {listing(gone)} {verb} gone from mlx-lm {now.version}; "
            f"expected {noun} removed by hand, after a review"
        )
    return lock_text(now)


def differences(locked: Upstream, now: Upstream) -> tuple[str, ...]:
    return tuple(
        f"mlx_lm/{before.path}: {new.name} {f'is {GONE} from' if new.digest == GONE else 'changed in'} "
        f"mlx-lm {now.version}; review {old.review}, then {ACCEPT}"
        for before, after in zip(locked.sources, now.sources, strict=True)
        for old, new in zip(before.definitions, after.definitions, strict=True)
        if old.digest != new.digest
    )


def installed(locked: Upstream) -> Upstream:
    """What the lock names, as it is in the installed mlx-lm."""
    try:
        package = find_spec("mlx_lm")
        if package is None or not package.submodule_search_locations:
            raise PackageNotFoundError
        folder, number = Path(package.submodule_search_locations[0]), version("mlx-lm")
    except (PackageNotFoundError, ValueError):
        raise SpecError("upstream: mlx-lm is not installed; expected it beside straightline, to compare with") from None
    return Upstream(number, tuple(_installed(source, folder) for source in locked.sources))


def _installed(locked: Source, folder: Path) -> Source:
    try:
        text = (folder / locked.path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return Source(locked.path, GONE, tuple(replace(one, digest=GONE) for one in locked.definitions))
    except (OSError, ValueError) as error:
        raise SpecError(f"upstream: mlx_lm/{locked.path} cannot be read ({error}); expected Python source") from None
    whole = digest(text)
    if whole == locked.digest:
        return locked
    found = definitions(text, {one.name for one in locked.definitions}, f"mlx_lm/{locked.path}")
    return Source(
        locked.path,
        whole,
        tuple(
            replace(one, digest=digest(found[one.name]) if one.name in found else GONE) for one in locked.definitions
        ),
    )


def definitions(source: str, names: Iterable[str], where: str) -> dict[str, str]:
    """The source text of each function, method or class in `names`, with its decorators; twice defined, both texts."""
    import libcst

    try:
        module = libcst.parse_module(source)
    except libcst.ParserSyntaxError:
        raise SpecError(f"upstream: {where} cannot be parsed by libcst; expected Python source") from None

    def walk(body: Iterable[libcst.CSTNode], prefix: str) -> Iterator[tuple[str, libcst.FunctionDef | libcst.ClassDef]]:
        for node in body:
            if isinstance(node, (libcst.FunctionDef, libcst.ClassDef)):
                name = f"{prefix}{node.name.value}"
                yield name, node
                if isinstance(node, libcst.ClassDef):
                    yield from walk(node.body.body, f"{name}.")

    wanted = frozenset(names)
    found: dict[str, str] = {}
    for name, node in walk(module.body, ""):
        if name in wanted:
            found[name] = found.get(name, "") + module.code_for_node(node.with_changes(leading_lines=()))
    return found


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lock_text(upstream: Upstream) -> str:
    blocks = [f"{HEADER}mlx-lm {upstream.version}\n"]
    for source in upstream.sources:
        width = max(len(one.name) for one in source.definitions)
        lines = [f"    {one.name:{width}}  {one.digest}  {one.review}\n" for one in source.definitions]
        blocks.append(f"{source.path} {source.digest}\n{''.join(lines)}")
    return "\n".join(blocks)


def read_lock(path: Path) -> Upstream:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError(f"{path.name}: cannot be read ({error}); expected the committed lock file") from None
    number = ""
    sources: list[Source] = []
    for count, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        words = line.split()
        if not number and len(words) == 2 and words[0] == "mlx-lm":
            number = words[1]
        elif number and re.fullmatch(r"\S+\.py ([0-9a-f]{16}|-)", line):
            sources.append(Source(words[0], words[1], ()))
        elif sources and re.fullmatch(r"    \S+ +([0-9a-f]{16}|-) +\S+", line):
            last = sources[-1]
            sources[-1] = replace(last, definitions=(*last.definitions, Definition(*words)))
        else:
            raise SpecError(
                f"{path.name}: line {count} is {show(line)}; expected mlx-lm and its version, a file and its digest, "
                "or a name, its digest and the file to review"
            )
    if not sources or not all(source.definitions for source in sources):
        raise SpecError(f"{path.name}: names no definition of mlx-lm, or a file without one; expected those to watch")
    return Upstream(number, tuple(_unknown(source) for source in sources))


def _unknown(source: Source) -> Source:
    """A file with a line added by hand (digest -) has to be parsed, whatever its own digest."""
    return replace(source, digest="-") if any(one.digest == "-" for one in source.definitions) else source
