"""Hidden states in bulk: the residual stream at chosen layers for every token of every prompt, into safetensors shards.

Can be killed at any moment and started again: complete shards are kept, and the bytes come out the same.
"""

import argparse
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import StraightlineError
from .ahead import expect_prompts, expect_taps, stated
from .hold import held
from .identity import weights_digest
from .progress import progress
from .prompts import digest, read_prompts, require_prompts
from .shards import FORMAT, Layout, Shard, ShardFile, plan
from .show import indices
from .subject import name_of
from .tap_index import TapIndex, read_index

HELP = "hidden states of many prompts into safetensors shards: training data for a drafter"
MOST_MB = 1_000_000
# What an index says that its rows were made of, in this order.
SETTINGS = (
    "model",
    "fingerprint",
    "weights",
    "layers",
    "dtype",
    "hidden_size",
    "prompts_digest",
    "batch",
    "chunk",
    "shard_mb",
)
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder or a hub id")
    parser.add_argument("--layers", type=indices, required=True, metavar="5,17,48", help="tap indices, -1 to n")
    parser.add_argument("--prompt-file", type=Path, required=True, metavar="F", help=".txt (one a line) or .jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="F.safetensors", help="its shards and index")
    parser.add_argument("--batch", type=int, default=1, help="prompts at once (default: 1, equal to HiddenTap's rows)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens a forward (default: %(default)s)")
    parser.add_argument("--shard-mb", type=float, default=512, help="size of a shard (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="say at the end what was written, for a program")


def run(options: argparse.Namespace) -> int:
    if options.batch < 1 or options.chunk < 1 or not 0 < options.shard_mb <= MOST_MB:
        options.usage_error(f"--batch and --chunk must be 1 or more, --shard-mb above 0 and at most {MOST_MB}")
    if options.out.suffix != ".safetensors":
        options.usage_error("--out must end in .safetensors")
    with held(options.out, "taps"):
        _run(options)
    return 0


def _run(options: argparse.Namespace) -> None:
    from ..loading import find_folder, load
    from ..model import text_model

    require_prompts(options.prompt_file)
    folder = find_folder(options.checkpoint)
    known = {
        "model": name_of(options.checkpoint, folder),
        "weights": weights_digest(folder),
        "layers": list(options.layers),
        "batch": options.batch,
        "chunk": options.chunk,
        "shard_mb": options.shard_mb,
    }
    read_index(options.out, known)
    spec = stated(folder)
    if spec is not None:
        expect_taps(spec, options.layers)
        expect_prompts(options.prompt_file, spec)
    model, tokenizer = load(folder)
    prompts = read_prompts(options.prompt_file, tokenizer.encode, text_model(model).args.vocab_size)
    layout = _layout(model, options.layers)
    found = known | {
        "fingerprint": _fingerprint(model),
        "dtype": layout.dtype,
        "hidden_size": layout.width,
        "prompts_digest": digest(prompts),
    }
    settings = {key: found[key] for key in SETTINGS}
    lengths = [len(tokens) for tokens in prompts]
    shards = plan(options.out, lengths, layout.row_bytes, int(options.shard_mb * 1e6))
    index = TapIndex(options.out, settings, shards)
    index.write()
    kept = sum(shard.rows for shard in shards if shard.name in index.done)
    with progress(sum(lengths), "token", quiet=options.json, initial=kept) as bar:
        for shard in shards:
            if shard.name not in index.done:
                _write_shard(model, shard, prompts, layout, settings, options, bar)
                index.add(shard)
    _say(options, index, kept)


def _fingerprint(model: Any) -> str:
    from ...codegen.config import read_arguments
    from ..model import text_model

    return read_arguments(text_model(model).args).fingerprint


def _layout(model: Any, layers: tuple[int, ...]) -> Layout:
    """Shape and dtype of a row, from a forward that is built and never evaluated. Refuses unknown layers."""
    import mlx.core as mx

    from ..arrays import dtype_name
    from ..taps import HiddenTap

    tap = HiddenTap(layers)
    model(mx.zeros((1, 1), mx.int32), tap=tap)
    row = tap.captured[layers[0]]
    dtype = dtype_name(row.dtype)
    if dtype not in DTYPES:
        raise StraightlineError(f"the model's hidden states are {dtype}; expected one of {', '.join(DTYPES)}")
    return Layout(layers, row.shape[-1], DTYPES[dtype], row.dtype.size)


def _write_shard(
    model: Any,
    shard: Shard,
    prompts: list["array[int]"],
    layout: Layout,
    settings: dict[str, Any],
    options: argparse.Namespace,
    bar: Any,
) -> None:
    mine = prompts[shard.first : shard.first + len(shard.lengths)]
    metadata = {"format": FORMAT, "first_prompt": str(shard.first)}
    metadata |= {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    file = ShardFile(options.out.parent, shard, layout, metadata)
    file.write_tokens(mine)
    row = 0
    for start in range(0, len(mine), options.batch):
        batch = mine[start : start + options.batch]
        row_of = [row + sum(map(len, batch[:number])) for number in range(len(batch))]
        for at, number, count, captured in forwards(model, batch, layout.layers, options.chunk):
            for layer, rows in captured.items():
                file.write_rows(layer, row_of[number] + at, rows)
            bar.update(count)
        row += sum(map(len, batch))
    file.finish()


def forwards(
    model: Any, batch: list["array[int]"], layers: tuple[int, ...], chunk: int
) -> Iterator[tuple[int, int, int, dict[int, bytes]]]:
    """Position, prompt, count and rows of each piece. Shorter prompts are padded behind, where nothing looks back."""
    import mlx.core as mx

    from ..arrays import raw_bytes
    from ..taps import HiddenTap

    caches = model.make_cache()
    longest = max(map(len, batch))
    tap = HiddenTap(layers)
    for at in range(0, longest, chunk):
        width = min(chunk, longest - at)
        ids = [[*tokens[at : at + width], *[0] * (width - len(tokens[at : at + width]))] for tokens in batch]
        model(mx.array(ids), cache=caches, tap=tap)
        # The logits are never asked for, so the head is never computed.
        mx.eval(tap.captured, [one.state for one in caches])
        for number, tokens in enumerate(batch):
            count = min(width, len(tokens) - at)
            if count > 0:
                yield at, number, count, {layer: raw_bytes(tap.captured[layer][number, :count]) for layer in layers}
    mx.clear_cache()


def _say(options: argparse.Namespace, index: TapIndex, kept: int) -> None:
    rows = sum(shard.rows for shard in index.shards)
    if options.json:
        files = [str(options.out.parent / shard.name) for shard in index.shards]
        print(json.dumps({"index": str(index.path), "shards": files, "rows": rows, "rows_kept": kept}))
        return
    prompts = sum(len(shard.lengths) for shard in index.shards)
    count = len(index.shards)
    resumed = f", {kept} of them kept from before" if kept else ""
    print(f"{index.path}: {rows} rows of {prompts} prompts in {count} shard{'s' if count > 1 else ''}{resumed}")
