"""Say which generated file serves a checkpoint, or which facts keep it from being served, and what each call would run.

Reads config.json, kv_config.json and the headers of safetensors files; loads no weights. Exit code 1 if no file serves
the checkpoint.
"""

import argparse
import json
import shlex
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from ...codegen.checkpoint import absent_shards
from ...codegen.errors import SpecError
from ...codegen.show import layer_table
from ...codegen.tensors import check_tensors, quantization_modes
from .calls import calls
from .differences import nearest
from .files import GeneratedFile, files_for
from .headers import Header, floating, read_headers, summary
from .sites import site_table
from .subject import Subject, read_subject
from .words import table

HELP = "which file serves a checkpoint, or which facts differ; what each kind of call would run"
TOOLS = ("jinja2", "libcst", "black")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="a folder, a hub id, or a published name")
    parser.add_argument("--random", metavar="NAME", help="a published architecture, such as gemma4-e4b")
    parser.add_argument("--json", action="store_true", help="the same for a program")


def run(options: argparse.Namespace) -> int:
    if (options.checkpoint is None) == (options.random is None):
        options.usage_error("name one CHECKPOINT, or --random NAME")
    found = explanation(read_subject(options.random if options.checkpoint is None else options.checkpoint))
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines(found)))
    return 0 if found["served"] else 1


def explanation(subject: Subject) -> dict[str, Any]:
    """Everything that is known, as JSON has it."""
    spec = subject.spec
    files = files_for(spec)
    headers = read_headers(subject.folder) if subject.folder else {}
    notes, fault = _tensors(subject, headers)
    found: dict[str, Any] = {
        "name": subject.name,
        "model_type": subject.config["model_type"],
        "fingerprint": spec.architecture,
        "fingerprint_with_kv_config": spec.fingerprint if spec.kv else None,
        "files": [asdict(one) | {"path": str(one.path)} for one in files],
        "checkpoint_fault": fault,
        "checkpoint_notes": notes,
        "quantization": summary(headers, spec, subject.config) if headers and not fault else [],
        "layer_table": layer_table(subject.target).splitlines()[1:],
    }
    if not files:
        name, different = nearest(spec)
        found |= {"nearest": name, "differences": list(different), "command": _command(subject)}
    found["calls"] = [asdict(one) for one in calls(spec, subject.kv_config, files)]
    found["served"] = not fault and any(call["path"] == "generated" for call in found["calls"])
    found["fused_sites"] = _fused(files, headers)
    return found


def _tensors(subject: Subject, headers: dict[str, Header]) -> tuple[list[str], str]:
    """Notes on the checkpoint's tensors, and what is wrong with them."""
    if not headers:
        return (["no weights are here; only config.json was read"] if subject.folder else []), ""
    absent = absent_shards(subject.folder) if subject.folder else ""
    if absent:
        return [], absent
    shapes = {name: header.shape for name, header in headers.items()}
    try:
        return list(check_tensors(subject.spec, shapes, quantization_modes(subject.config))), ""
    except SpecError as error:
        return [], str(error)


def _command(subject: Subject) -> str:
    """What makes a file for an architecture that has none."""
    if any(find_spec(tool) is None for tool in TOOLS):
        return "pip install 'straightline[codegen]', then in Python: load(CHECKPOINT, generate=True)"
    where = str(subject.folder)
    if subject.folder is None or not where.isprintable():
        where = "CHECKPOINT"
    return (
        f"in Python: load({where!r}, generate=True); in a checkout: "
        f"./regen.sh --from {shlex.quote(where)} --name my-gemma"
    )


def _fused(files: tuple[GeneratedFile, ...], headers: dict[str, Header]) -> dict[str, Any]:
    """For a new process that asks for kernels: where it would run, and each site by what is remembered."""
    import mlx.core as mx

    from ..kernels.backends import detect
    from ..kernels.states import remembered
    from ..registry import load_generated

    backend = detect()
    dtypes = floating(headers) or {"bfloat16"}
    # As the runtime has it: a model of several dtypes counts as float32.
    dtype = getattr(mx, dtypes.pop() if len(dtypes) == 1 else "float32")
    states = remembered([load_generated(one.path) for one in files], dtype)
    device = f"{backend.name}, {backend.device}" if backend.name else ""
    return {"device": device, "reason": backend.reason, "sites": [asdict(one) for one in states]}


def lines(found: dict[str, Any]) -> list[str]:
    """The explanation for people."""
    text = [f"{found['name']} ({found['model_type']})", f"  fingerprint  {found['fingerprint']}"]
    if found["fingerprint_with_kv_config"]:
        text.append(f"  with K/V quantized as kv_config.json says  {found['fingerprint_with_kv_config']}")
    text += ["", "File", *_file_lines(found)]
    if found["checkpoint_fault"] or found["checkpoint_notes"] or found["quantization"]:
        text += ["", "Weights", *(f"  {line}" for line in _weight_lines(found))]
    text += ["", "Layers", *(f"  {line}".rstrip() for line in found["layer_table"])]
    rows = [(call["what"], call["path"], call["file"] or call["reason"]) for call in found["calls"]]
    text += ["", "Calls", *table(rows)]
    if found["fused_sites"]["sites"]:
        text += ["", *_fused_lines(found["fused_sites"])]
    return text


def _fused_lines(fused: dict[str, Any]) -> list[str]:
    from ..kernels.states import SiteState

    where = f" on {fused['device']}" if fused["device"] else ""
    where += ", with kernels=True or --kernels" if fused["device"].startswith("metal") else ""
    return [f"Fused sites{where}", *site_table([SiteState(**one) for one in fused["sites"]])]


def _file_lines(found: dict[str, Any]) -> list[str]:
    if found["files"]:
        return table([(one["name"], _place(GeneratedFile(**one)), one["path"]) for one in found["files"]])
    count = len(found["differences"])
    facts = "1 fact that differs" if count == 1 else f"{count} facts that differ"
    close = [f"  none; {found['nearest']} comes closest, with {facts}:"]
    return [*close, *(f"    {line}" for line in found["differences"]), f"  to make one: {found['command']}"]


def _place(one: GeneratedFile) -> str:
    kv = "quantized K/V" if one.quantized else "plain K/V"
    return f"{kv}, {'packaged' if one.where == 'package' else 'in the cache folder'}"


def _weight_lines(found: dict[str, Any]) -> list[str]:
    fault = [f"cannot be used: {found['checkpoint_fault']}"] if found["checkpoint_fault"] else []
    return [*fault, *found["checkpoint_notes"], *found["quantization"]]
