"""Scripts for a GPU work where there is none: toys pass, and one changed bit is reported and fails the run."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "gpu" / "full_size.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--toy", "--dtype", "float32", "--steps", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_toys_pass_and_leave_a_record(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ran = run("--sizes", "e2b", "--json", str(record))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("20 of 20 cells pass")
    sizes = json.loads(record.read_text())["sizes"]
    assert {size: len(rows) for size, rows in sizes.items()} == {"e2b": 20}


def test_one_changed_bit_fails_the_run() -> None:
    ran = run("--sizes", "26b", "--spoil")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "DEPARTS 26b: prefill inside the window: call 0 (5 wide): tap 11 at flat index" in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("1 of 20 cells pass")


def test_those_of_quantized_caches() -> None:
    """Every walk of optiq.py; every product and attention of quantized_attention.py, one cell a line."""
    folder = SCRIPT.parent
    commands = {
        "optiq.py": ["--toy", "--dtype", "float32", "--sizes", "12b", "--steps", "3"],
        "quantized_attention.py": ["--toy", "--limit", "1"],
    }
    printed = {}
    for name, arguments in commands.items():
        command = [sys.executable, str(folder / name), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        printed[name] = ran.stdout.splitlines()
    assert printed["optiq.py"][-1].startswith("12 of 12 cells equal")
    cells = [line for line in printed["quantized_attention.py"] if " bits of " in line]
    assert len(cells) > 15 and all(" ok " in line and "WRONG" not in line for line in cells)
