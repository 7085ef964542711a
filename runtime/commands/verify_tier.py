"""`straightline verify --tier fast`: not bits but distances, of both tiers from the same model in float32."""

import argparse
import json
import os
from typing import Any

from .progress import progress
from .words import table


def run(options: argparse.Namespace) -> int:
    """Exit code 1 if the fast tier is outside its bound."""
    # The reference is to be float32: MLX may else take matrix products of float32 for TF32. Read at the first product.
    os.environ["MLX_ENABLE_TF32"] = "0"
    from ..loading import find_folder
    from ..verification.machine import describe
    from ..verification.proof import from_checkpoint, from_random
    from ..verification.tiers import Measured

    folder = find_folder(options.checkpoint) if options.checkpoint else None
    if folder is not None:
        proof = from_checkpoint(options.checkpoint)
    else:
        proof = from_random(options.random, options.reduced, options.layers, options.dtype, options.seed)
    steps = options.steps or proof.steps
    measured = Measured(proof, steps, options.seed, options.kernels, folder)
    head = describe(None) | proof.facts | {"seed": str(options.seed)}
    if not options.json:
        print("\n".join(f"{key:<12} {value}" for key, value in head.items()) + "\n", flush=True)
    with progress(measured.count, "prompt", quiet=options.json) as bar:
        for _ in measured.run():
            bar.update()
    refused = measured.refused()
    if options.json:
        print(json.dumps({"machine": head} | as_json(measured, steps) | {"refused": refused}, indent=1))
    else:
        print("\n".join(lines(measured, steps, refused)))
    return 1 if refused else 0


def lines(measured: Any, steps: int, refused: str) -> list[str]:
    total = steps * measured.count
    tiers = [("tier", "KL mean", "KL most", "argmax agrees")]
    for tier in measured.tiers.values():
        tiers.append((tier.name, f"{tier.mean:.2e}", f"{tier.most:.2e}", f"{tier.agreed} of {total}"))
    sites = [("attention", "exact, mean", "most", "fast, mean", "most", "runs")]
    for site in measured.sites.values():
        runs, why = measured.states[site.name]
        errors = [f"{value:.1e}" for one in (site.exact, site.fast) for value in (sum(one) / len(one), max(one))]
        sites.append((site.name, *errors, f"{runs}: {why}"))
    return [
        f"Against mlx-lm's own code in float32, over the same packed weights; {measured.of}, {steps} steps each:",
        *table(tiers),
        "",
        "Error of each attention on the model's own q, k and v, relative to the result in float32:",
        *(table(sites) if len(sites) > 1 else [f"  none measured: {why}" for _, why in measured.states.values()]),
        "",
        verdict(measured, refused),
    ]


def verdict(measured: Any, refused: str) -> str:
    if refused:
        return f"OUTSIDE its bound: {refused}"
    running = [name for name, (runs, _) in measured.states.items() if runs == "fast"]
    if not running:
        return "within its bound, but nothing of the fast tier runs here: the exact forms do"
    return f"within its bound: {len(running)} of {len(measured.states)} attentions run fast; the bits are not mlx-lm's"


def as_json(measured: Any, steps: int) -> dict[str, Any]:
    return {
        "reference": "mlx-lm's own code in float32, over the same packed weights",
        "prompts": measured.of,
        "steps": steps * measured.count,
        "tiers": [
            {"tier": one.name, "kl_mean": one.mean, "kl_most": one.most, "argmax_agrees": one.agreed}
            for one in measured.tiers.values()
        ],
        "attention": [
            {
                "site": name,
                "runs": runs,
                "reason": why,
                "exact_most": max(measured.sites[name].exact) if name in measured.sites else None,
                "fast_most": max(measured.sites[name].fast) if name in measured.sites else None,
            }
            for name, (runs, why) in measured.states.items()
        ],
    }
