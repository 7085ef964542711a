"""The `load` that mlx-lm's generator and server look up, replaced by one that specializes. Nothing else is patched."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ...codegen.config import FLAT, NESTED, read_file, read_json
from ...codegen.errors import SpecError, show
from ...codegen.kv import read_kv_config
from ..dispatch import Dispatch
from ..errors import StraightlineError
from .ahead import expect_kv_bits, stated

# Tokens that caches of speculation take back beyond a rejected draft: those that mlx-lm's loop leaves at its end.
BEYOND = 2


@dataclass(frozen=True)
class Wishes:
    """What the command line says that concerns us. draft: speculation, so that caches have to roll back."""

    kv_config: str | None
    kernels: bool | None
    tier: str
    draft: str | None
    draft_tokens: int
    kv_bits: int | None
    kv_group_size: int


def split(arguments: list[str], prog: str, shown: Sequence[argparse.ArgumentParser] = ()) -> tuple[Wishes, list[str]]:
    """Our own flags taken out of the arguments; mlx-lm's read, and left in.

    shown: parsers of flags that one command has beside these, for `--help`; it has taken them out already.
    """
    own = argparse.ArgumentParser(
        prog=prog,
        parents=shown,
        add_help=False,
        allow_abbrev=False,
        usage=argparse.SUPPRESS,
        description="straightline's own; after them those of mlx-lm",
    )
    own.add_argument(
        "--kv-config", metavar="FILE", help="how K/V are stored; auto: the checkpoint's own, if it has one"
    )
    own.add_argument(
        "--kernels",
        action=argparse.BooleanOptionalAction,
        help="fused kernels, each where a check says that it is exact (default: on CUDA)",
    )
    own.add_argument(
        "--tier",
        choices=("exact", "fast"),
        default="exact",
        help="fast: attention that is closer, but not mlx-lm's bits",
    )
    if not {"-h", "--help"}.isdisjoint(arguments):
        print(own.format_help())  # mlx-lm's program prints its own and ends
    peek = argparse.ArgumentParser(prog=prog, add_help=False)
    peek.add_argument("--draft-model")
    peek.add_argument("--num-draft-tokens", type=int, default=3)
    peek.add_argument("--kv-bits", type=int)
    peek.add_argument("--kv-group-size", type=int, default=64)
    peek.add_argument("--prefill-step-size", type=int, default=1)
    mine, rest = own.parse_known_args(arguments)
    theirs, _ = peek.parse_known_args(rest)
    if theirs.prefill_step_size < 1:  # mlx-lm would go round in a circle
        raise StraightlineError(f"--prefill-step-size is {theirs.prefill_step_size}; expected a whole number from 1")
    if theirs.num_draft_tokens < 0:
        raise StraightlineError(f"--num-draft-tokens is {theirs.num_draft_tokens}; expected a whole number from 0")
    wishes = Wishes(
        kv_config=mine.kv_config,
        kernels=mine.kernels,
        tier=mine.tier,
        draft=theirs.draft_model,
        draft_tokens=theirs.num_draft_tokens,
        kv_bits=theirs.kv_bits,
        kv_group_size=theirs.kv_group_size,
    )
    return wishes, rest


@dataclass
class Loader:
    """Called as mlx-lm's `load`. A model that is not Gemma 4 (a draft model, say) loads as usual.

    draft: the draft model of the models that are loaded next; mlx-lm loads the target before it.
    """

    plain: Callable[..., Any]
    wishes: Wishes
    draft: str | None
    served: list[tuple[str, Dispatch]] = field(default_factory=list)

    def __call__(self, path_or_hf_repo: str, *arguments: Any, **named: Any) -> Any:
        from ..kv import DEPTH
        from ..loading import find_folder, load
        from ..model import text_model

        folder = find_folder(path_or_hf_repo, named.get("revision"))
        kind = _model_type(folder)
        if kind not in NESTED + FLAT:
            loaded = self.plain(path_or_hf_repo, *arguments, **named)
            about = f"model_type is {show(kind)}, not Gemma 4; mlx-lm's own code runs it"
            print(f"straightline: {path_or_hf_repo}: {about}", file=sys.stderr)
            return loaded
        is_draft = path_or_hf_repo == self.draft and not named  # mlx-lm names arguments for the target only
        if not is_draft:
            self._expect_wishes(folder)
        kv_config = None if is_draft else _read(self.wishes)
        kernels, tier = self.wishes.kernels, self.wishes.tier
        loaded = load(path_or_hf_repo, *arguments, **named, kernels=kernels, tier=tier, kv_config=kv_config)
        model = loaded[0]
        if self.draft is not None:
            from ...codegen.config import read_arguments

            # mlx-lm's rings cannot take tokens back once they are full, and it would not say so.
            spec = model._storage[0] if model._storage else read_arguments(text_model(model).args)
            model.store_kv(spec, max(DEPTH, self.wishes.draft_tokens + BEYOND))
        self.served.append((path_or_hf_repo, model.dispatch))
        return loaded

    def expect(self, model: str, adapter_path: str | None) -> None:
        """Fails with what a call for a target would fail with, as far as one can tell without evaluating a weight."""
        from mlx_lm.utils import load_model

        from ..loading import expect_loadable, find_folder

        folder = find_folder(model)
        if _model_type(folder) not in NESTED + FLAT:
            load_model(folder, lazy=True)
            return
        self._expect_wishes(folder)
        expect_loadable(folder, adapter_path, _read(self.wishes))

    def _expect_wishes(self, folder: Path) -> None:
        """What mlx-lm looks at only once the target is loaded: the draft model, and bits of K/V."""
        from ..kv.chosen import check_kv_bits
        from ..loading import expect_loadable, find_folder

        bits, group_size, kv_config = self.wishes.kv_bits, self.wishes.kv_group_size, self.wishes.kv_config
        spec = stated(folder)
        if bits is not None:
            check_kv_bits(bits, group_size)
            if spec is not None:
                expect_kv_bits(spec, bits, group_size, "--kv-bits")
        if kv_config not in (None, "auto") and spec is not None:
            read_kv_config(_read(self.wishes), spec, Path(str(kv_config)).name)
        if self.draft is not None:
            draft = find_folder(self.draft)
            if _model_type(draft) in NESTED + FLAT:
                expect_loadable(draft)

    def report(self) -> list[str]:
        """Which path served the calls of each model, and why."""
        return [line for name, dispatch in self.served for line in _report(name, dispatch)]


def rolls_back(model: Any) -> bool:
    """Whether the caches of a model take tokens back, as a Loader has it for speculation."""
    storage = getattr(model, "_storage", None)
    return storage is not None and storage[1] > 0


def _model_type(folder: Path) -> Any:
    try:
        return read_file(folder / "config.json").get("model_type")
    except SpecError as error:
        raise StraightlineError(str(error)) from None


def _read(wishes: Wishes) -> Any:
    """A parsed kv_config.json, "auto" or None, as `load` takes it."""
    if wishes.kv_config in (None, "auto"):
        return wishes.kv_config
    try:
        return read_json(Path(str(wishes.kv_config)), "a kv_config.json")
    except SpecError as error:
        raise StraightlineError(str(error)) from None


def _report(name: str, dispatch: Dispatch) -> Iterator[str]:
    counts = dispatch.counts
    file = (dispatch.file or "no file").rpartition(".")[2]
    yield f"straightline: {name}: {counts['generated']} calls generated ({file}), {counts['monolith']} by mlx-lm's code"
    for site, (runs, why) in dispatch.tier_sites.items():
        yield f"straightline:   tier fast: {site}: {runs}: {why}"
    for reason, count in dispatch.reasons.items():
        yield f"straightline:   {count} by mlx-lm's code: {reason}"


@contextmanager
def replaced(program: Any, ours: dict[str, Any]) -> Iterator[None]:
    """A module in which some names are ours; as before at the end."""
    before = {name: getattr(program, name) for name in ours}
    try:
        vars(program).update(ours)
        yield
    finally:
        vars(program).update(before)


@contextmanager
def specialized(module: str, wishes: Wishes, arguments: list[str]) -> Iterator[Any]:
    """mlx-lm's module with its `load` replaced and the arguments in place; both as before at the end."""
    program: Any = import_module(module)
    loader = Loader(program.load, wishes, wishes.draft)
    before = sys.argv
    program.load = loader
    sys.argv = [f"straightline {module.rpartition('.')[2].replace('server', 'serve')}", *arguments]
    try:
        yield program
    except ValueError as error:  # how mlx-lm refuses what it is given
        raise StraightlineError(f"{module}: {error}") from error
    finally:
        program.load = loader.plain
        sys.argv = before
        for line in loader.report():
            print(line, file=sys.stderr)
