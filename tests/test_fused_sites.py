"""How `explain` and `verify` say that each fused site runs: in this process, and in one to come."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import toys
from pairs import pair
from test_kernels import ONE, Fake

from straightline.generated import gemma4_e4b
from straightline.runtime import specialize
from straightline.runtime.cli import main
from straightline.runtime.commands.sites import site_table
from straightline.runtime.kernels import memory, resolve, states
from straightline.runtime.kernels.backends import Backend
from straightline.runtime.kernels.memory import Finding
from straightline.runtime.kernels.resolve import forget
from straightline.runtime.kernels.states import SiteState, remembered, running

GPU = Backend("cuda", "Fake 9000")
NAMES = (
    *("sliding_qkv", "sliding_attention", "full_qkv", "full_attention", "sliding_query", "full_query"),
    *("attention_end", "geglu", "feedforward_end", "per_layer_gate", "layer_end"),
)


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path / "cache"))
    forget()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "detect", lambda: GPU)
    monkeypatch.setattr("straightline.runtime.kernels.backends.detect", lambda: GPU)


def remember(name: str, finding: Finding) -> None:
    site = vars(gemma4_e4b)[name.upper()]
    memory.remember(memory.key(GPU, site.program("cuda"), site), finding, {})


def test_on_the_cpu_every_site_is_plain() -> None:
    found = remembered([gemma4_e4b])
    assert tuple(one.name for one in found) == NAMES
    assert {(one.state, one.reason) for one in found} == {("plain", "the default device is the CPU")}
    assert site_table(found) == [
        f"  11 sites, all plain (the default device is the CPU): {', '.join(NAMES)}",
    ]


def test_a_process_to_come_on_a_gpu(on_gpu: None) -> None:
    """What was found earlier, what was never checked, and what is no kernel at all; nothing is compiled."""
    remember("geglu", Finding("kernel", "exact: 1024 values compared", True))
    remember("layer_end", Finding("plain", "not exact here: 3 of 64 values differ (output 0, seed 1)"))
    remember("full_qkv", memory.checking())
    dead = 1 << 30  # above any process id
    remember("full_query", Finding("checking", process=dead, host=os.uname().nodename))
    remember("sliding_query", Finding("checking", deaths=1, process=dead, host=os.uname().nodename))
    found = {one.name: (one.state, one.reason) for one in remembered([gemma4_e4b])}
    assert found == {
        **dict.fromkeys(NAMES, ("not checked yet", "")),
        **dict.fromkeys(
            ("sliding_attention", "full_attention"), ("written out", "if it is exact, which every load checks")
        ),
        "geglu": ("kernel", "exact: 1024 values compared"),
        "layer_end": ("off", "not exact here: 3 of 64 values differ (output 0, seed 1)"),
        "full_qkv": ("not checked yet", "another process is checking it"),
        "full_query": ("not checked yet", "one process died"),
        "sliding_query": ("off", "two processes died while they checked it"),
    }
    table = site_table(remembered([gemma4_e4b]))
    assert [line.split("  ")[1].strip() for line in table] == list(NAMES)
    assert "kernel (exact: 1024 values compared)" in table[7] and table[7].endswith(
        "Geglu(size=10240, joined=True, experts=0)"
    )
    assert "off: not exact here" in table[10] and "not checked yet" in table[0]


def test_other_dtypes_have_no_kernels(on_gpu: None) -> None:
    (reason,) = {one.reason for one in remembered([gemma4_e4b], mx.float16)}
    assert reason == "float16: kernels are for bfloat16"


def test_an_earlier_finding_is_what_the_next_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same memory under the same key as the self-check's."""
    resolving = sys.modules[resolve.__module__]
    fake = Fake(device="Fake for states")
    monkeypatch.setattr(resolving, "detect", lambda: fake)
    monkeypatch.setattr(states, "detect", lambda: fake)
    file: Any = type(gemma4_e4b)("file")
    file.ONE = ONE
    assert [one.state for one in remembered([file])] == ["not checked yet"]
    resolve(ONE)
    (found,) = remembered([file])
    assert (found.name, found.state, found.reason[:6]) == ("one", "kernel", "exact:")


def test_of_a_model_in_this_process() -> None:
    model = specialize(pair(toys.E6, strict=False).model)
    found = running(model)
    assert {one.state for one in found} == {"plain"} and len(found) > 5
    model.train()
    model(toys.tokens(1, 2))
    assert running(model) == ()


def test_another_model_of_the_same_sizes_is_not_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[resolve.__module__], "detect", lambda: Fake("metal"))
    plain = pair(toys.E6, dtype=mx.bfloat16, strict=False).model
    model = specialize(plain, kernels=True)
    found = running(model)
    assert sum(one.reason.startswith("failed: ") for one in found) > 3
    others = specialize(plain, kernels=False), specialize(pair(toys.E6, strict=False).model, kernels=True)
    reasons = [{one.reason for one in running(other)} for other in others]
    assert reasons == [
        {"kernels are off; specialize(model, kernels=True) checks them"},
        {"float32: kernels are for bfloat16"},
    ]
    assert running(model) == found


def test_explain_says_it(capsys: pytest.CaptureFixture[str], on_gpu: None) -> None:
    remember("geglu", Finding("kernel", "exact: 1024 values compared", True))
    assert main(["explain", "gemma4-e4b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("Fused sites on cuda, Fake 9000")
    table = lines[start + 1 :]
    assert [line.split()[0] for line in table] == list(NAMES)
    assert sum("not checked yet" in line for line in table) == 8
    assert main(["explain", "gemma4-e4b", "--json"]) == 0
    fused = json.loads(capsys.readouterr().out)["fused_sites"]
    assert fused["device"] == "cuda, Fake 9000"
    assert fused["sites"][7] == {
        "name": "geglu",
        "site": "Geglu(size=10240, joined=True, experts=0)",
        "state": "kernel",
        "reason": "exact: 1024 values compared",
    }


def test_the_table_says_a_shared_reason_once() -> None:
    two = [SiteState(name, "Site()", "not checked yet", "") for name in ("a", "b")]
    assert site_table(two) == ["  2 sites, all not checked yet: a, b"]
    assert site_table([]) == []
