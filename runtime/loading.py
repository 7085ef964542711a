"""`load`: a checkpoint as it is published, through mlx-lm's own loader, then specialized.

Three things that mlx-lm 0.32.2 cannot load are put right on the way in, in memory: config keys that it does not know
the newer layout of, names under another program's prefix, and an lm_head tensor beside a tied embedding.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils
from mlx_lm.models import gemma4, gemma4_text

from ..codegen.checkpoint import SHARDS, absent_shards, read_tensors, refuse_pointer, refuse_special
from ..codegen.config import FLAT, NESTED, read_config, read_file
from ..codegen.errors import SpecError, show
from ..codegen.spec import Attention, Spec
from ..codegen.target import target_names
from ..codegen.tensors import OTHER_TOWERS, canonical, check_tensors, quantization_modes
from .errors import StraightlineError
from .kv.chosen import check_choice, chosen_storage
from .model import specialize
from .tier import check_tier

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
ADAPTERS = ("adapter_config.json", "adapters.safetensors")


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    strict: bool = False,
    generate: bool = False,
    kernels: bool | None = None,
    tier: str = "exact",
    kv_config: Any = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    keep_last_full: bool = False,
) -> Any:
    """A specialized model and its tokenizer (and the config, with return_config), from a folder or a hub id.

    The arguments are those of `mlx_lm.load`, then those of `specialize`, then how `model.make_cache()`, and with it
    mlx_lm.generate and the server, store keys and values:
    kv_config: a parsed kv_config.json, or "auto" for the checkpoint's own if it has one.
    kv_bits, kv_group_size: the same for every layer; keep_last_full: but the last full-attention cache.

    Raises StraightlineError, in one sentence, for a checkpoint that is not Gemma 4 or cannot be loaded.
    """
    check_tier(tier)
    check_choice(kv_config, kv_bits, kv_group_size, keep_last_full)
    folder = find_folder(path_or_hf_repo, revision)
    storage = _before_weights(folder, adapter_path, kv_config, kv_bits, kv_group_size, keep_last_full)
    model, config = load_model(folder, lazy=lazy, model_config=model_config)
    if adapter_path is not None:
        load_adapters(model, adapter_path, lazy)
    specialized = specialize(model, strict=strict, generate=generate, kernels=kernels, tier=tier)
    if storage is not None:
        specialized.store_kv(storage)
    tokenizer_config = {"trust_remote_code": trust_remote_code} | (tokenizer_config or {})
    tokenizer = _load_tokenizer(folder, tokenizer_config, config.get("eos_token_id"))
    return (specialized, tokenizer, config) if return_config else (specialized, tokenizer)


def expect_loadable(folder: Path, adapter_path: str | None = None, kv_config: Any = None) -> None:
    """Raises StraightlineError for what `load` would refuse, as far as one can tell without evaluating a weight."""
    _before_weights(folder, adapter_path, kv_config, None, 64, False)
    load_model(folder, lazy=True)


def _before_weights(folder: Path, adapter_path: str | None, *kv: Any) -> Spec | None:
    """What is wrong beside the weights, which may take minutes to read; and how K/V are to be stored."""
    _expect_tokenizer(folder)
    for name in ADAPTERS if adapter_path is not None else ():
        if not (Path(str(adapter_path)) / name).is_file():
            raise StraightlineError(
                f"{adapter_path}: has no {name}; expected a folder of adapters as mlx_lm.lora saves them"
            )
    return chosen_storage(folder, *kv)


def find_folder(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint, from the hub if it is not here. Raises StraightlineError."""
    if str(path_or_hf_repo) in target_names() and not Path(path_or_hf_repo).exists():
        raise StraightlineError(
            f"{path_or_hf_repo}: is the name of an architecture, which has no weights; expected a folder or a hub id "
            f"(or `straightline verify --random {path_or_hf_repo}`)"
        )
    try:
        return Path(utils._download(str(path_or_hf_repo), revision=revision))
    except (OSError, ValueError) as error:
        raise StraightlineError(
            f"{path_or_hf_repo}: is no folder here and cannot be had from the hub: {_sentence(error)}"
        ) from error


def _expect_tokenizer(folder: Path) -> None:
    """Where the weights are absent, that is what will be said."""
    if any(folder.glob(SHARDS)) and not any((folder / name).exists() for name in TOKENIZERS):
        raise StraightlineError(f"{folder}: has no tokenizer; expected {TOKENIZERS[0]} beside config.json")
    try:
        for name in TOKENIZERS:
            refuse_pointer(folder / name)
    except SpecError as error:
        raise StraightlineError(_in(folder, error)) from None


def _load_tokenizer(folder: Path, tokenizer_config: dict[str, Any], eos_token_ids: Any) -> Any:
    from transformers import PretrainedConfig

    try:
        try:
            return utils.load_tokenizer(folder, tokenizer_config, eos_token_ids=eos_token_ids)
        except Exception:
            # transformers reads config.json for it, and its own Gemma 4 refuses some that mlx-lm and we understand.
            with_config = {"config": PretrainedConfig()} | tokenizer_config
            return utils.load_tokenizer(folder, with_config, eos_token_ids=eos_token_ids)
    except Exception as error:  # transformers has no type for it
        raise StraightlineError(f"{folder}: its tokenizer cannot be loaded: {_sentence(error)}") from error


def load_adapters(model: Any, adapter_path: str | Path, lazy: bool = False) -> None:
    """Adapters as `mlx_lm.lora` saves them, into the model: every tensor of the file, or StraightlineError."""
    try:
        utils.load_adapters(model, str(adapter_path))
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise StraightlineError(f"{adapter_path}: the adapter does not fit: {_sentence(error)}") from error
    model.eval()
    if not lazy:
        mx.eval(model.parameters())


def load_model(folder: Path, lazy: bool = False, model_config: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """The mlx-lm model (the monolith) of a checkpoint folder, and its config. Raises StraightlineError."""
    try:
        changes = model_config or {}
        config = read_file(folder / "config.json")
        # Others are mlx-lm's own, such as the quantize_activations of mlx_lm.generate.
        config |= {key: value for key, value in changes.items() if key in config}
        if config.get("model_type") not in NESTED + FLAT:
            raise StraightlineError(
                f"{folder}: model_type is {show(config.get('model_type'))}; expected a Gemma 4 checkpoint "
                f"({', '.join(NESTED + FLAT)})"
            )
        quantization_modes(config)
        for shard in folder.glob(SHARDS):
            refuse_special(shard)
        changes = changes | _as_mlx_lm_reads_it(config)
        model, loaded = utils.load_model(folder, lazy=lazy, model_config=changes, get_model_classes=_classes)
    except SpecError as error:
        raise StraightlineError(_in(folder, error)) from None
    except StraightlineError:
        raise
    except Exception as error:  # whatever a config or tensor that fits nothing sets off in mlx-lm
        raise StraightlineError(_why_not(folder, config, error)) from error
    model.__class__ = type(model).__bases__[0]
    return model, loaded


def _why_not(folder: Path, config: Mapping[str, Any], error: Exception) -> str:
    """What is wrong with the checkpoint, as far as its config and the names and shapes of its tensors tell."""
    try:
        spec = read_config(config)
        absent = absent_shards(folder)
        if absent:
            return f"{folder}: {absent}"
        tensors = read_tensors(folder)
        check_tensors(spec, tensors, quantization_modes(config))
    except SpecError as better:
        return _in(folder, better)
    packed = next((canonical(name) for name in tensors if name.endswith(".scales")), "")
    if packed and not config.get("quantization") and not config.get("quantization_config"):
        return f"{folder}: config.json has no quantization, but {packed} is there; expected its group_size and bits"
    return f"{folder}: mlx-lm cannot load it: {_sentence(error)}"


def _in(folder: Path, error: SpecError) -> str:
    return str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}"


def _sentence(error: Exception) -> str:
    """mlx-lm lists every wrong tensor on a line of its own; the first few say what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
    return " ".join(lines[:4]).rstrip(",.") + more


def _as_mlx_lm_reads_it(config: Mapping[str, Any]) -> dict[str, Any]:
    """Top-level entries to override so that mlx-lm builds the model that the config describes."""
    try:
        spec = read_config(config)
    except SpecError:
        return {}  # mlx-lm may know better; the fingerprint of what it builds decides which file serves it
    resolved = _resolved(spec)
    if config["model_type"] in FLAT:
        return resolved | {"model_type": "gemma4_text"}
    # The outer vocab_size is the one that mlx-lm believes, and it assumes 262144 where there is none.
    return {"text_config": dict(config["text_config"]) | resolved, "vocab_size": spec.vocab_size}


def _resolved(spec: Spec) -> dict[str, Any]:
    """The keys that published layouts leave out, null or elsewhere, in the form that mlx-lm reads."""
    full = next((layer for layer in spec.layers if layer.attention is Attention.FULL), spec.layers[0])
    return {
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads if full.k_eq_v else None,
        "num_kv_shared_layers": len(spec.layers) - len(spec.owners),
        "hidden_size_per_layer_input": spec.per_layer_input_size,
        "tie_word_embeddings": spec.tie_word_embeddings,
    }


def _classes(config: Mapping[str, Any]) -> tuple[type, type]:
    if config["model_type"] in FLAT:
        return _TextModel, gemma4_text.ModelArgs
    return _Model, gemma4.ModelArgs


def _text_names(weights: Mapping[str, mx.array], tied: bool) -> dict[str, mx.array]:
    """The tensors of the text model under the names of `gemma4_text.Model`, whichever program saved them."""
    named = {}
    for original, value in weights.items():
        if original.removeprefix("model.").startswith(OTHER_TOWERS):
            continue
        name = canonical(original)
        if not name.startswith("lm_head."):
            name = f"model.{name}"
        elif tied:
            continue  # tied: logits come from the embedding, here as in mlx-lm and transformers
        if name in named:
            raise ValueError(f"{name} is there twice, under two names")
        named[name] = value
    return named


class _Model(gemma4.Model):  # type: ignore[misc]
    """gemma4.Model while it loads."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        text = self.language_model
        named = text.sanitize(_text_names(weights, text.tie_word_embeddings))
        return {f"language_model.{name}": value for name, value in named.items()}


class _TextModel(gemma4_text.Model):  # type: ignore[misc]
    """gemma4_text.Model while it loads."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named: dict[str, mx.array] = super().sanitize(_text_names(weights, self.tie_word_embeddings))
        return named
