"""The command line of codegen, which ./regen.sh starts. Exit code 1: a failed check or a refused input; 2: usage."""

import argparse
import sys
from pathlib import Path

from .command import Parser, exit_code, print_anything
from .errors import SpecError
from .target import Target


def parser() -> Parser:
    command = Parser(
        prog="./regen.sh",
        description="Render straight-line Gemma 4 forwards: the committed ones, or one for your own checkpoint.",
        epilog="examples: ./regen.sh gemma4-12b | ./regen.sh --check | ./regen.sh --from ~/my-gemma --name my-gemma",
        allow_abbrev=False,
    )
    command.add_argument("targets", nargs="*", metavar="TARGET", help="such as gemma4-12b; none means all")
    what = command.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare with generated/ and with mlx-lm, and write nothing")
    what.add_argument("--print", action="store_true", help="the file to standard output, and write nothing")
    what.add_argument("--plan", action="store_true", help="the layers as a table, and write nothing")
    what.add_argument("--accept-upstream", action="store_true", help="after a review: lock mlx-lm as it is installed")
    own = command.add_argument_group("your own checkpoint")
    own.add_argument("--from", dest="folder", type=Path, metavar="DIR", help="its config.json and safetensors files")
    own.add_argument("--name", help="what to call it, such as my-gemma (written as my_gemma.py)")
    own.add_argument("--kv-config", type=Path, metavar="FILE", help="bake its quantized K/V caches into the file")
    own.add_argument("--out", type=Path, metavar="DIR", help="where to write it (default: the current folder)")
    return command


def usage_error(options: argparse.Namespace) -> str | None:
    own = options.folder is not None
    if own != (options.name is not None):
        return "--from DIR and --name NAME go together"
    if options.kv_config is not None and not own:
        return "--kv-config goes with --from; a committed target names its own in codegen/specs/"
    if options.out is not None and not own:
        return "--out goes with --from; the committed targets have their place in generated/"
    if own and options.targets:
        return "--from makes one file of its own; name no targets beside it"
    if own and (options.check or options.accept_upstream):
        return "--check and --accept-upstream are for the committed targets, not for --from"
    if options.print and not own and len(options.targets) != 1:
        return "--print shows one file; name one target"
    return None


def run(options: argparse.Namespace) -> int:
    # Not at the top: `--help` and a usage error should not wait for it.
    from . import driver

    if options.folder is not None:
        target, notes = driver.from_checkpoint(options.folder, options.name, options.kv_config)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        if options.print or options.plan:
            return show((target,), options)
        driver.refuse_drift()
        out = options.out or Path()
        return say(driver.written(out, str(out), driver.rendered([target])))
    targets = driver.chosen(options.targets)
    if options.print or options.plan:
        return show(targets, options)
    if options.check:
        faults = driver.check(targets)
        say(faults or (f"{driver.GENERATED.name}/ is fresh: {', '.join(target.name for target in targets)}",))
        return 1 if faults else 0
    return say(driver.regenerate(targets, options.accept_upstream))


def show(targets: tuple[Target, ...], options: argparse.Namespace) -> int:
    from .driver import rendered
    from .show import layer_table

    if options.plan:
        print("\n".join(layer_table(target) for target in targets), end="")
    else:
        print(*(source.decode() for source in rendered(targets).values()), sep="", end="")
    return 0


def say(lines: tuple[str, ...]) -> int:
    for line in lines:
        print(line)
    return 0


def main(arguments: list[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(arguments)
    fault = usage_error(options)
    if fault:
        command.error(fault)
    return exit_code(lambda: run(options), SpecError)


if __name__ == "__main__":
    print_anything()
    sys.exit(main())
