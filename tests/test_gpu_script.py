"""tests/gpu/full_size.py works where there is no GPU: toys pass, and one changed bit is reported and fails the run."""

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
