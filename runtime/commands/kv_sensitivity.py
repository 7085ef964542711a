"""Which layers need how many KV bits: measured on your text, then spent where they save most.

For each layer that owns K/V and each candidate, the KL divergence of the output from that with plain K/V, everything
else plain; then a greedy knapsack down to the target. Can be killed and started again.
"""

import argparse
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...codegen.kv import BITS, GROUP_SIZES
from ...codegen.spec import Attention, Spec
from ..atomic import write_text
from ..errors import StraightlineError
from .ahead import expect_kv_bits, expect_place, expect_prompts, stated
from .calibration import sequences
from .heatmap import heatmap
from .hold import held
from .identity import weights_digest
from .knapsack import Item, choose, mean_bits
from .measurements import Measurements, measurements_path, read_measurements
from .progress import progress
from .prompts import require_prompts
from .show import indices
from .subject import name_of
from .words import size, table

HELP = "which layers need how many KV bits: measured, then written as kv_config.json"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="a folder or a hub id")
    parser.add_argument("--random", metavar="NAME", help="random weights of a published architecture, to try it")
    parser.add_argument("--data", type=Path, required=True, metavar="F", help="calibration text: .txt or .jsonl")
    parser.add_argument(
        "--target-bits",
        type=float,
        required=True,
        help="mean over all stored numbers, such as 4.5, their scales not counted",
    )
    parser.add_argument("--candidates", type=indices, default=BITS, help="bits to try (default: 2,3,4,6,8)")
    parser.add_argument("--group-size", type=int, default=64, choices=GROUP_SIZES, help="(default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=8, help="at most so many (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of each at most (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens a forward (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("kv_config.json"), help="(default: %(default)s)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a picture of what was measured and chosen")
    parser.add_argument("--json", action="store_true", help="the result for a program")


def run(options: argparse.Namespace) -> int:
    _check(options)
    with held(options.out, "kv-sensitivity"):
        _run(options)
    return 0


def _run(options: argparse.Namespace) -> None:
    about = _load(options)
    spec, model = about.spec, about.model
    key = {"fingerprint": spec.architecture, **_settings(options, about.weights)}
    measured = Measurements(measurements_path(options.out), key)
    wishes = [(layer, bits) for layer in spec.owners for bits in options.candidates]
    total = len(about.sequences) * (len(wishes) + 1)
    with progress(total, "measurement", quiet=options.json) as bar:
        _measure(
            model, about.sequences, {_what([one], options.group_size): [one] for one in wishes}, measured, bar, options
        )
        items = _items(about, options, measured)
        chosen = choose(items, options.target_bits)
        mix = [(layer, bits) for layer, bits in chosen.items()]
        _measure(model, about.sequences, {_what(mix, options.group_size): mix}, measured, bar, options)
    together = measured.mean(about.sequences, _what(mix, options.group_size))
    write_text(options.out, _kv_config_text(mix, options.group_size))
    _report(options, about, items, chosen, together)


@dataclass(frozen=True)
class About:
    name: str
    model: Any
    spec: Spec
    weights: str
    sequences: list[list[int]]


def _check(options: argparse.Namespace) -> None:
    if (options.checkpoint is None) == (options.random is None):
        options.usage_error("name one CHECKPOINT, or --random NAME")
    wrong = [bits for bits in options.candidates if bits not in BITS]
    if wrong:
        options.usage_error(f"--candidates has {wrong[0]}; expected some of {','.join(map(str, BITS))}")
    low, high = min(options.candidates), max(options.candidates)
    if not low <= options.target_bits <= high:
        options.usage_error(f"--target-bits is {options.target_bits:g}; expected {low} to {high}, as the candidates")
    if min(options.sequences, options.length, options.chunk) < 1:
        options.usage_error("--sequences, --length and --chunk must be 1 or more")
    files = [path.resolve() for path in (options.data, options.out, options.svg) if path is not None]
    if len(set(files)) < len(files):
        options.usage_error("--data, --out and --svg must be different files")
    for path in files[1:]:
        expect_place(path)


def _load(options: argparse.Namespace) -> About:
    from ...codegen.config import read_arguments
    from ..model import text_model

    require_prompts(options.data)
    if options.random:
        name, weights = options.random, "random"
        model, encode = _random(options.random)
    else:
        from ..loading import find_folder, load

        folder = find_folder(options.checkpoint)
        name, weights = name_of(options.checkpoint, folder), weights_digest(folder)
        if measurements_path(options.out).exists():
            read_measurements(measurements_path(options.out), _settings(options, weights))
        spec = stated(folder)
        if spec is not None:
            _expect_groups(spec, options)
            expect_prompts(options.data, spec, options.sequences)
        model, tokenizer = load(folder)
        encode = tokenizer.encode
    spec = read_arguments(text_model(model).args)
    _expect_groups(spec, options)
    found = sequences(options.data, encode, spec.vocab_size, options.length, options.sequences)
    return About(name, model, spec, weights, found)


def _settings(options: argparse.Namespace, weights: str) -> dict[str, Any]:
    """What measurements are of, but for the architecture."""
    return {"weights": weights, "chunk": options.chunk, "group_size": options.group_size}


def _expect_groups(spec: Spec, options: argparse.Namespace) -> None:
    for bits in options.candidates:
        expect_kv_bits(spec, bits, options.group_size, "--group-size")


def _random(name: str) -> tuple[Any, Any]:
    """Reduced where there is no GPU. Its tokens are the bytes of the text."""
    import mlx.core as mx

    from ..model import specialize
    from ..verification.random_model import build
    from ..verification.smaller import reduced
    from .subject import published

    config = published(name).config
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    model, _ = build(config if on_gpu else reduced(config), mx.bfloat16 if on_gpu else mx.float32)
    return specialize(model), lambda text: [byte % 128 for byte in text.encode()]


def _measure(
    model: Any,
    texts: list[list[int]],
    wishes: dict[str, list[tuple[int, int]]],
    measured: Measurements,
    bar: Any,
    options: argparse.Namespace,
) -> None:
    """Every wish on every sequence, but for those that are there. Plain logits are held for one sequence at a time."""
    from .divergence import Reference

    for tokens in texts:
        left = {what: mix for what, mix in wishes.items() if not measured.has(tokens, what)}
        bar.update(len(wishes) - len(left))
        reference = Reference(model, tokens, options.chunk) if left else None
        for what, mix in left.items():
            assert reference is not None
            kl = reference.divergence(_kv_config(mix, options.group_size))
            if not math.isfinite(kl):
                raise StraightlineError(f"{what}: the divergence is {kl}; expected a model whose logits are finite")
            measured.add(tokens, what, kl)
            bar.update()


def _kv_config(mix: list[tuple[int, int]], group_size: int) -> list[dict[str, int]]:
    return [{"layer_idx": layer, "bits": bits, "group_size": group_size} for layer, bits in mix]


def _kv_config_text(mix: list[tuple[int, int]], group_size: int) -> str:
    return "[\n" + ",\n".join(f" {json.dumps(entry)}" for entry in _kv_config(mix, group_size)) + "\n]\n"


def _what(mix: list[tuple[int, int]], group_size: int) -> str:
    """The name of a measurement: layer and bits, or a digest of many."""
    if len(mix) == 1:
        return f"layer {mix[0][0]}, {mix[0][1]} bits"
    return f"mix {hashlib.sha256(json.dumps(_kv_config(mix, group_size)).encode()).hexdigest()[:16]}"


def _items(about: About, options: argparse.Namespace, measured: Measurements) -> tuple[Item, ...]:
    layers = about.spec.layers
    return tuple(
        Item(
            layer,
            2 * layers[layer].kv_heads * layers[layer].head_dim,
            {
                bits: measured.mean(about.sequences, _what([(layer, bits)], options.group_size))
                for bits in options.candidates
            },
        )
        for layer in about.spec.owners
    )


def _report(
    options: argparse.Namespace, about: About, items: tuple[Item, ...], chosen: dict[int, int], together: float
) -> None:
    spec = about.spec
    mean = mean_bits(items, chosen)
    tokens = sum(map(len, about.sequences))
    sliding = frozenset(layer for layer in spec.owners if spec.layers[layer].attention is Attention.SLIDING)
    alone = sum(item.loss[chosen[item.layer]] for item in items)
    bytes_of = {item.layer: item.numbers * (chosen[item.layer] / 8 + 4 / options.group_size) for item in items}
    numbers, stored = sum(item.numbers for item in items), sum(bytes_of.values())
    line = (
        f"{tokens} tokens, {mean:.2f} bits on average, {8 * stored / numbers:.2f} with scales, "
        f"KL {together:.2e} nats a token"
    )
    if options.svg:
        write_text(options.svg, heatmap(f"{about.name}: KV sensitivity", line, items, sliding, chosen))
    if options.json:
        layers = [
            {
                "layer": item.layer,
                "kl": {str(bits): loss for bits, loss in item.loss.items()},
                "bits": chosen[item.layer],
            }
            for item in items
        ]
        found = {
            "kv_config": str(options.out),
            "mean_bits": mean,
            "bytes_a_token": stored,
            "kl": together,
            "tokens": tokens,
            "layers": layers,
        }
        print(json.dumps(found, indent=1))
        return
    head = ["layer", "kind", *(f"{bits} bits" for bits in sorted(options.candidates)), "chosen", "a token"]
    rows = [head]
    for item in items:
        kind = "sliding" if item.layer in sliding else "full"
        losses = [f"{item.loss[bits]:.2e}" for bits in sorted(options.candidates)]
        rows.append([f"{item.layer:>5}", kind, *losses, str(chosen[item.layer]), size(bytes_of[item.layer])])
    print("\n".join([f"{about.name}: KL from plain K/V in nats a token, one layer quantized at a time", *table(rows)]))
    print(
        f"\n{line} together ({alone:.2e} as the sum of the layers alone)\n"
        f"where plain is 16 bits, a token takes {size(stored)} in place of {size(2 * numbers)}\n"
        f"{options.out}: written"
    )
