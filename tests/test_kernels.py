"""Fused sites without a GPU: plain forms against mlx-lm's modules, the self-check, its memory, and the texts.

The kernels themselves are checked on a GPU by tests/gpu/kernels.py.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from oracle import oracle

from straightline.runtime.kernels import (
    DualResidualNorms,
    GatedExperts,
    Geglu,
    PerLayerEnd,
    PerLayerGate,
    ProductHeads,
    QKVRope,
    QKVRopeInto,
    QuantizedMatvec,
    QuantizedPerLayerGate,
    QuantizedRouter,
    ResidualNorms,
    Router,
    Site,
    SummedExperts,
    backends,
    memory,
    report,
    resolve,
    resolve_all,
)
from straightline.runtime.kernels import resolve as resolve_function
from straightline.runtime.kernels.backends import Backend
from straightline.runtime.kernels.fast import CLUSTER
from straightline.runtime.kernels.launch import launcher
from straightline.runtime.kernels.memory import Finding
from straightline.runtime.kernels.norms import layout
from straightline.runtime.kernels.program import Program, Unsupported
from straightline.runtime.kernels.selfcheck import compare, different

resolving = sys.modules[resolve_function.__module__]

EPS = 1e-06
SITES: tuple[Site, ...] = (
    ResidualNorms(64, EPS, scaled=False, norms=0),
    ResidualNorms(64, EPS, scaled=False, norms=1),
    ResidualNorms(64, EPS, scaled=False, norms=3),
    ResidualNorms(64, EPS, scaled=True, norms=1),
    DualResidualNorms(64, EPS),
    QKVRope(4, 2, 64, EPS, 10000.0),
    QKVRope(8, 2, 128, EPS),
    QKVRope(8, 1, 128, EPS, None, k_eq_v=True),
    QKVRope(4, 0, 64, EPS, 10000.0),
    QKVRope(4, 0, 128, EPS),
    Geglu(128),
    Geglu(64, joined=False, experts=2),
    Geglu(64, joined=True, experts=2),
    PerLayerGate(64, 5),
    QuantizedMatvec(256, 96),
    GatedExperts(128, 64, 8),
    SummedExperts(64, 128, 8),
    Router(16, 3),
    QuantizedRouter(128, 16, 3),
    QuantizedPerLayerGate(128, 64, 3),
    QKVRopeInto(QKVRope(4, 2, 64, EPS, 10000.0)),
    QKVRopeInto(QKVRope(8, 1, 128, EPS, None, k_eq_v=True)),
    ProductHeads(QuantizedMatvec(128, 512), QKVRope(4, 2, 64, EPS, 10000.0)),
    ProductHeads(QuantizedMatvec(96, 512, bits=8, group_size=32), QKVRope(4, 0, 128, EPS, grouped=2)),
    ProductHeads(QuantizedMatvec(128, 512), QKVRopeInto(QKVRope(4, 2, 64, EPS, 10000.0))),
    ProductHeads(QuantizedMatvec(64, 1152), QKVRopeInto(QKVRope(8, 1, 128, EPS, None, k_eq_v=True))),
    PerLayerEnd(
        ResidualNorms(64, EPS, scaled=False, norms=0),
        QuantizedPerLayerGate(64, 32, 3),
        QuantizedMatvec(32, 64, bits=8, group_size=32),
        ResidualNorms(64, EPS, scaled=True, norms=1),
    ),
    QuantizedMatvec(256, 96, bits=8, group_size=32, glu=True),
)
ONE = SITES[3]
CUDA_ALONE = (
    *(GatedExperts, PerLayerEnd, ProductHeads, QKVRopeInto, QuantizedMatvec, QuantizedPerLayerGate),
    *(QuantizedRouter, Router, SummedExperts),
)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STRAIGHTLINE_KERNELS", raising=False)
    resolving.forget()
    yield
    resolving.forget()


def listed(outputs: Any) -> list[mx.array]:
    return [outputs] if isinstance(outputs, mx.array) else list(outputs)


# Plain forms


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("site", SITES, ids=repr)
def test_plain_is_the_monolith(site: Site, dtype: mx.Dtype) -> None:
    for rows in (1,) if site.one_row else (1, 3):
        for seed in range(4):
            inputs = site.inputs(seed, rows, dtype)
            found, expected = listed(site.plain(*inputs)), oracle(site, inputs)
            assert inputs[0].size == site.unit * rows
            assert tuple(array.shape for array in found[: len(site.shapes(rows))]) == site.shapes(rows)
            for a, b in zip(found, expected, strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                assert different(a, b).item() == 0


def test_inputs_are_reproducible_and_not_at_rest() -> None:
    for site in SITES:
        first, again, other = (site.inputs(seed) for seed in (1, 1, 2))
        assert different(first[0], again[0]).item() == 0
        assert different(first[0], other[0]).item() > 0
        for array in (one for one in first if isinstance(one, mx.array) and one.size > 1):
            assert (array != array.reshape(-1)[0]).any().item()


def test_a_scalar_position_serves_every_row() -> None:
    site = QKVRope(4, 2, 64, EPS, 10000.0)
    qkv, q_norm, k_norm, _ = site.inputs(1, rows=3)
    spread = site.spread((qkv, q_norm, k_norm, mx.array(7)), 3)
    assert spread[3].tolist() == [7, 7, 7]
    same = site.plain(qkv, q_norm, k_norm, mx.array(7)), site.plain(*spread)
    assert all(different(a, b).item() == 0 for a, b in zip(*map(listed, same), strict=True))


# Which form is used


def test_without_a_gpu_the_plain_form_with_a_reason() -> None:
    assert resolve(ONE) == ONE.plain
    assert resolve_all(SITES) == tuple(site.plain for site in SITES)
    assert report() == {site: ("plain", "the default device is the CPU") for site in (ONE, *SITES)}


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRAIGHTLINE_KERNELS", "off")
    assert resolve(ONE) == ONE.plain
    assert report() == {ONE: ("plain", "STRAIGHTLINE_KERNELS is off")}


@dataclass(frozen=True)
class Fake(Backend):
    """A device whose kernels run the plain form of a site, spoiled by `spoil(outputs, inputs)`."""

    name: str = "cuda"
    device: str = "Fake 9000"
    site: Site = ONE
    spoil: Callable[[list[mx.array], tuple[Any, ...]], list[mx.array]] = lambda outputs, inputs: outputs
    made: list[Program] = field(default_factory=list, hash=False, compare=False)
    calls: list[dict[str, Any]] = field(default_factory=list, hash=False, compare=False)

    def make(self, program: Program) -> Callable[..., list[mx.array]]:
        self.made.append(program)

        def kernel(*, inputs: tuple[Any, ...], **launch: Any) -> list[mx.array]:
            self.calls.append(launch)
            found = self.spoil(listed(self.site.plain(*inputs)), inputs)
            outputs = len(launch["output_shapes"])
            for buffer, new in zip(inputs[-4:-2], found[outputs:], strict=False):  # keys and values, if any are left
                overwrite(buffer, new)
            return found[:outputs]

        return kernel


def overwrite(buffer: mx.array, new: mx.array) -> None:
    """Behind MLX's back."""
    mx.eval(buffer, new)
    np.array(buffer.view(mx.uint16), copy=False)[:] = np.array(new.view(mx.uint16))


def use(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Fake:
    fake = Fake(**changes)
    monkeypatch.setattr(resolving, "detect", lambda: fake)
    return fake


def last_bit(outputs: list[mx.array], inputs: tuple[Any, ...]) -> list[mx.array]:
    """One value of the last output is one step away."""
    *others, last = outputs
    flat = last.view(mx.uint16).reshape(-1)
    spoiled = mx.concatenate([flat[:-1], flat[-1:] ^ mx.array(1, dtype=mx.uint16)])
    return [*others, spoiled.view(mx.bfloat16).reshape(last.shape)]


def later(outputs: list[mx.array], inputs: tuple[Any, ...]) -> list[mx.array]:
    return last_bit(outputs, inputs) if inputs[0].shape[0] > 1 else outputs


def fails(message: str, kind: type[BaseException] = RuntimeError) -> Callable[..., Any]:
    def fail(outputs: list[mx.array], inputs: tuple[Any, ...]) -> list[mx.array]:
        raise kind(message)

    return fail


@pytest.mark.parametrize("site", [site for site in SITES if site is not SITES[-1]], ids=repr)
def test_an_exact_kernel_is_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, site=site)
    call = resolve(site)
    state, reason = report()[site]
    assert (state, reason.split(":")[0]) == ("kernel", "exact")
    program = site.program("cuda")
    for rows in (1,) if site.one_row else (1, 2):
        fake.calls.clear()
        inputs = site.inputs(5, rows)
        outputs = listed(site.observed(call)(*inputs))
        assert all(different(a, b).item() == 0 for a, b in zip(outputs, listed(site.plain(*inputs)), strict=True))
        (launch,) = fake.calls
        assert tuple(launch["output_shapes"]) == site.shapes(rows)
        assert launch["grid"] == (program.threads * program.blocks, program.lines * rows, 1)
        assert launch["threadgroup"] == (program.threads, 1, 1)
    assert resolve(site) is call and len(fake.made) == 1


def test_one_row_kernels_leave_more_rows_to_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    site = QuantizedMatvec(256, 96)
    fake = use(monkeypatch, site=site)
    call = resolve(site)
    fake.calls.clear()
    assert call(*site.inputs(0, rows=2)).shape == (2, 1, 96)
    assert not fake.calls


def test_a_wrong_kernel_is_off_and_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, spoil=last_bit)
    assert resolve(ONE) == ONE.plain
    reason = "not exact here: 1 of 64 values differ (output 1, seed 0)"
    assert report() == {ONE: ("plain", reason)}
    resolving.forget()
    assert resolve(ONE) == ONE.plain and len(fake.made) == 1
    assert report() == {ONE: ("plain", f"{reason} (found earlier)")}


def test_a_kernel_exact_for_one_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, spoil=later)
    for _ in range(2):
        call = resolve(ONE)
        assert report()[ONE] == ("kernel", "exact: 3072 values compared; one row only")
        fake.calls.clear()
        listed(call(*ONE.inputs(0, rows=3)))
        assert not fake.calls
        resolving.forget()


def test_a_kernel_of_another_shape_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, spoil=lambda outputs, inputs: [outputs[0][..., :8], outputs[1]])
    assert resolve(ONE) == ONE.plain
    assert report()[ONE][1] == (
        "not exact here: output 0 is mlx.core.bfloat16 [1, 1, 8], expected mlx.core.bfloat16 [1, 1, 64]"
    )


def test_a_kernel_that_does_not_compile_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "Failed to compile kernel: a.h(3): warning: x\na.h(7): error: y is undefined\n\n1 error detected"
    use(monkeypatch, spoil=fails(log))
    assert resolve(ONE) == ONE.plain
    assert report()[ONE] == ("plain", "failed: a.h(7): error: y is undefined | 1 error detected")


def test_no_memory_and_an_interrupt_say_nothing_about_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for message in ("cudaMallocAsync failed: out of memory", "[malloc_async] Unable to allocate 4096 bytes."):
        use(monkeypatch, spoil=fails(message))
        assert resolve(ONE) == ONE.plain
        assert report()[ONE] == ("plain", "the device had no memory left to check it")
        assert findings() == {}  # "checking" would be taken for a death
        resolving.forget()
    use(monkeypatch, spoil=fails("", KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        resolve(ONE)
    assert findings() == {}
    use(monkeypatch)
    resolve(ONE)
    assert report()[ONE][0] == "kernel"


def test_no_memory_for_several_rows_does_not_make_it_a_kernel_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(outputs: list[mx.array], inputs: tuple[Any, ...]) -> list[mx.array]:
        return fails("out of memory")(outputs, inputs) if inputs[0].shape[0] > 1 else outputs

    use(monkeypatch, spoil=full)
    assert resolve(ONE) == ONE.plain
    assert (report()[ONE][1], findings()) == ("the device had no memory left to check it", {})


def test_what_was_exact_is_compared_once_as_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch)
    resolve(ONE)
    reason = report()[ONE]
    resolving.forget()
    fake.calls.clear()
    resolve(ONE)
    assert (len(fake.calls), report()[ONE]) == (1, reason)
    resolving.forget()
    use(monkeypatch, spoil=last_bit)
    resolve(ONE)
    assert report()[ONE][0] == "plain"
    assert [one["state"] for one in findings().values()] == ["plain"]


def test_other_dtypes_and_sizes_are_plain_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    reasons = {
        ResidualNorms(60, EPS, True, 1): "rows of 60 values; the kernel is for multiples of 8 up to 8192",
        QKVRope(1, 1, 1024, EPS): "heads of 1024; the kernel is for multiples of 8 up to 512",
        Geglu(30): "rows of 30 values; the kernel is for multiples of 8",
        PerLayerGate(4096, 2): "rows of 4096 values; the kernel is for multiples of 8 up to 2048",
        QuantizedMatvec(256, 64, bits=6): "6-bit weights in groups of 64; the kernel is for 4 and 8 bits",
        GatedExperts(128, 64, 7): "7 experts a token; the kernel is for 8 to 16",
        SummedExperts(128, 64, 8, bits=8): "8-bit weights of experts; the kernel is for 4 bits",
        SummedExperts(96, 64, 8, group_size=32): "64 x 96 weights of experts; expected a multiple of 8 x one of 64",
    }
    resolve_all(reasons, progress=False)
    assert report() == {site: ("plain", reason) for site, reason in reasons.items()}
    assert resolve(ONE, mx.float16) == ONE.plain
    assert report()[ONE] == ("plain", "float16: kernels are for bfloat16")


def per_layer_end(gate: int = 4, projection: int = 4) -> PerLayerEnd:
    return PerLayerEnd(
        ResidualNorms(64, EPS, scaled=False, norms=0),
        QuantizedPerLayerGate(64, 64, 3, gate),
        QuantizedMatvec(64, 64, projection),
        ResidualNorms(64, EPS, scaled=True, norms=1),
    )


def test_a_joint_is_for_what_its_parts_are_for() -> None:
    rope = QKVRope(4, 2, 64, EPS)
    bits = "6-bit weights in groups of 64; the kernel is for 4 and 8 bits"
    reasons = {
        ProductHeads(QuantizedMatvec(64, 512, bits=6), rope): bits,
        ProductHeads(QuantizedMatvec(64, 512, bits=6), QKVRopeInto(rope)): bits,
        ProductHeads(QuantizedMatvec(64, 3072), QKVRope(1, 1, 1024, EPS)): (
            "heads of 1024; the kernel is for multiples of 8 up to 512"
        ),
        per_layer_end(gate=6): bits,
        per_layer_end(projection=6): bits,
    }
    for site, reason in reasons.items():
        with pytest.raises(Unsupported) as refused:
            site.program("cuda")
        assert str(refused.value) == reason


def test_progress_is_shown_where_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = use(monkeypatch)
    resolve_all((ONE, ONE, SITES[2]))
    assert capsys.readouterr().err == "" and len(fake.made) == 2  # soon over
    resolving.forget()
    monkeypatch.setattr(resolving, "PATIENCE", 0.0)
    resolve_all((ONE, ONE, SITES[2]))
    assert "checking fused kernels on Fake 9000: 100%" in capsys.readouterr().err
    made = len(fake.made)
    resolve_all((ONE, SITES[2]))
    assert capsys.readouterr().err == "" and len(fake.made) == made


def test_kernels_are_the_default_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    off = ("plain", "kernels are off; specialize(model, kernels=True) checks them")
    for name, kernels, expected in (
        ("cuda", None, "kernel"),
        ("metal", None, off),
        ("metal", True, "kernel"),
        ("cuda", False, off),
    ):
        resolving.forget()
        use(monkeypatch, name=name)
        resolve_all((ONE,), progress=False, kernels=kernels)
        assert expected in (report()[ONE], report()[ONE][0])


def test_threads_share_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch)
    threads = [threading.Thread(target=resolve, args=(ONE,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.made) == 1


def test_launcher_without_rows_uses_the_plain_form() -> None:
    program = ONE.program("cuda")
    call = launcher(ONE, program, fails("not for rows"), mx.bfloat16, several=False)
    assert listed(call(*ONE.inputs(0, rows=2)))[0].shape == (2, 1, 64)


def test_comparison_counts() -> None:
    assert compare(ONE, ONE.plain, mx.bfloat16, seeds=3, rows=2).values == 3 * 2 * 2 * 64
    nan = mx.array([float("nan"), 1.0])
    assert different(nan, nan).item() == 0  # bytes, not values
    assert different(mx.array([0.0]), mx.array([-0.0])).item() == 1


# What is remembered


def findings() -> dict[str, Any]:
    held: dict[str, Any] = json.loads((Path(os.environ["STRAIGHTLINE_CACHE"]) / "kernels.json").read_text())
    found: dict[str, Any] = held["findings"]
    return found


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"format": 0, "findings": {}}', '{"format": 1, "findings": []}', "\x00\xff"]
)
def test_a_damaged_file_is_no_file(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    path = Path(os.environ["STRAIGHTLINE_CACHE"]) / "kernels.json"
    path.parent.mkdir(parents=True)
    path.write_text(damage, encoding="latin-1")
    resolve(ONE)
    assert report()[ONE][0] == "kernel"
    assert [one["state"] for one in findings().values()] == ["kernel"]


@pytest.mark.parametrize("entry", [None, 3, {}, {"state": "kernel"}, {"state": "maybe", "reason": ""}])
def test_a_damaged_entry_is_no_entry(entry: Any) -> None:
    memory.remember("good", Finding("kernel", "exact", True), {"site": "s"})
    path = Path(os.environ["STRAIGHTLINE_CACHE"]) / "kernels.json"
    held = json.loads(path.read_text())
    held["findings"]["bad"] = entry
    path.write_text(json.dumps(held))
    assert memory.recall("bad") is None
    assert memory.recall("good") == Finding("kernel", "exact", True)
    assert memory.recall("unknown") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path / "file"))
    use(monkeypatch)
    resolve(ONE)
    assert report()[ONE][0] == "kernel"
    assert "namespace straightline" in backends.header_of(ONE.program("cuda"))  # the text itself, in place of a path


def test_processes_do_not_lose_each_others_findings() -> None:
    code = (
        "import sys; from straightline.runtime.kernels import memory\n"
        "for i in range(20): memory.remember(f'{sys.argv[1]}-{i}', memory.Finding('kernel', 'exact'), {})"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(number)]) for number in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(findings()) == 60
    assert not list(Path(os.environ["STRAIGHTLINE_CACHE"]).glob("*.tmp"))


def test_whatever_may_change_bits_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ONE.program("cuda")
    base = memory.key(Backend("cuda", "A"), program, ONE)
    assert memory.key(Backend("cuda", "A"), ONE.program("cuda"), ONE) == base
    assert memory.key(Backend("cuda", "B"), program, ONE) != base
    assert memory.key(Backend("metal", "A"), program, ONE) != base
    assert memory.key(Backend("cuda", "A"), ONE.program("metal"), ONE) != base
    assert memory.key(Backend("cuda", "A"), program, SITES[0]) != base
    monkeypatch.setattr(memory, "MLX", "0.99.0")
    assert memory.key(Backend("cuda", "A"), program, ONE) != base


def test_a_kernel_that_kills_two_processes_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch)
    name = memory.key(fake, ONE.program("cuda"), ONE)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = Finding("checking", process=gone.pid, host=memory.checking().host)
    assert dead.died and not memory.checking().died
    assert replace(memory.checking(), born=1).died  # an earlier process of the same number
    assert not Finding("checking", process=gone.pid, host="elsewhere").died

    marks: list[Any] = []
    use(monkeypatch, spoil=lambda outputs, inputs: marks.append(memory.recall(name)) or outputs)
    memory.remember(name, dead, {})
    resolve(ONE)
    assert report()[ONE][0] == "kernel"
    assert (marks[0].state, marks[0].deaths, marks[0].process) == ("checking", 1, os.getpid())

    resolving.forget()
    memory.remember(name, Finding("checking", deaths=1, process=gone.pid, host=dead.host), {})
    resolve(ONE)
    assert report()[ONE] == ("plain", "two processes died while they checked it (found earlier)")


# The texts


def test_layouts_are_those_of_mlx() -> None:
    found = {size: layout("cuda", size) for size in (256, 512, 1536, 2560, 2816, 3840, 5376)}
    assert found == {
        256: (64, 1),
        512: (64, 1),
        1536: (64, 3),
        2560: (64, 5),
        2816: (128, 3),
        3840: (128, 4),
        5376: (128, 6),
    }
    assert [layout("metal", size) for size in (256, 2560, 5376)] == [(64, 1), (640, 1), (1024, 2)]


@pytest.mark.parametrize("backend", ["cuda", "metal"])
@pytest.mark.parametrize("site", SITES, ids=repr)
def test_texts_are_whole(site: Site, backend: str) -> None:
    if backend == "metal" and isinstance(site, CUDA_ALONE):
        with pytest.raises(
            Unsupported,
            match=r"^(MLX's own kernel is used on Metal|how Metal's partition orders equal scores is not known"
            r"|keys and values are written in place on CUDA alone)$",
        ):
            site.program(backend)
        return
    program = site.program(backend)
    again = site.program(backend)
    assert (program.text, program.source, program.digest) == (again.text, again.source, again.digest)
    assert program.text.count("{") == program.text.count("}")
    assert f"DEVICE void {program.function}(" in program.text
    assert program.threads % 32 == 0 and (program.threads <= 512 or backend == "metal")
    assert len(program.source) < 400  # hashed at every call
    taken = {*program.inputs, *program.outputs}
    assert taken <= set(program.arguments) <= taken and len(taken) == len(program.inputs) + len(program.outputs)
    assert not any(f"{name}_{what}" in program.source for name in taken for what in ("shape", "strides", "ndim"))
    if backend == "metal":
        shared_only = (
            program.text.replace(program.text[program.text.index("#else") :], "")
            if "#else" in program.text
            else program.text
        )
        assert "__" not in shared_only.replace("__METAL_VERSION__", "")
        assert "thread_position_in_threadgroup" in program.source


def test_joints_are_launched_as_whole_clusters() -> None:
    for site in SITES:
        if isinstance(site, (PerLayerEnd, ProductHeads)):
            program = site.program("cuda")
            sizes = dict(program.constants)
            heads = sizes["HEADS"] + 2 * sizes["KV_HEADS"] if isinstance(site, ProductHeads) else 1
            assert (program.blocks, program.lines, sizes["CLUSTER"]) == (heads * CLUSTER, 1, CLUSTER)
            assert program.threads == sizes["THREADS"] and program.threads % sizes["BLOCK"] == 0


def test_a_text_line_for_line() -> None:
    program = QKVRope(8, 0, 256, EPS, 10000.0).program("cuda")
    assert program.source == (
        "SHARED(float, sums, 2) SHARED(straightline::T, head, 256) "
        "straightline::qkv_rope(qkv, qn, qn, at, qn, q, q, q, sums, head, HERE);"
    )
    assert """namespace straightline {
CONSTANT int HEADS = 8;
CONSTANT int KV_HEADS = 0;
CONSTANT int HEAD_DIM = 256;
CONSTANT int WIDTH = 2048;
CONSTANT bool K_EQ_V = false;
CONSTANT float EPS = 9.999999974752427e-07f;
CONSTANT bool USES_FREQS = false;
CONSTANT float LOG2_THETA = 13.287712097167969f;
CONSTANT int BLOCK = 128;
CONSTANT int WARPS = 2;
}
""" in program.text


def test_digests_do_not_depend_on_the_process() -> None:
    code = (
        "from straightline.runtime.kernels import ResidualNorms\n"
        "print(ResidualNorms(64, 1e-06, scaled=True, norms=1).program('cuda').digest, end='')"
    )
    for seed in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        digest = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert digest.stdout == ONE.program("cuda").digest
    digests = [site.program("cuda").digest for site in SITES]
    assert len(set(digests)) == len(SITES)


def test_cuda_kernels_include_their_text_from_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **what: made.append(what) or (lambda **launch: []))
    program = ONE.program("cuda")
    Backend("cuda", "A").make(program)
    path = Path(os.environ["STRAIGHTLINE_CACHE"]) / "kernels" / f"{program.digest}.h"
    assert made[0]["header"] == f'#include "{path}"\n'
    assert path.read_text() == program.text
    path.write_text("damaged")
    Backend("cuda", "A").make(program)
    assert path.read_text() == program.text
    assert (made[0]["input_names"], made[0]["output_names"]) == (["y", "h", "post", "scalar", "w0"], ["h2", "x0"])


def test_metal_kernels_carry_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **what: made.append(what) or (lambda **launch: []))
    program = ONE.program("metal")
    Backend("metal", "M").make(program)
    assert program.text in made[0]["header"]
