"""tests/gpu where there is no GPU.

full_size.py: toys pass, and one changed bit is reported and fails the run. session.sh: whatever a job does, the next
one runs, and what was printed comes home. alternated.py: it finds a difference that is known.
"""

import json
import os
import random
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
import alternated
import session

GPU = Path(__file__).parent / "gpu"
SCRIPT = GPU / "full_size.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--toy", "--dtype", "float32", "--steps", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_toys_pass_and_leave_a_record(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ran = run("--sizes", "e2b", "--json", str(record))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("23 of 23 cells pass")
    sizes = json.loads(record.read_text())["sizes"]
    assert {size: len(rows) for size, rows in sizes.items()} == {"e2b": 23}


def test_one_changed_bit_fails_the_run() -> None:
    ran = run("--sizes", "26b", "--spoil")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "DEPARTS 26b: prefill inside the window: call 0 (5 wide): tap 11 at flat index" in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("1 of 23 cells pass")


# session.sh

TABLE = """
# A job, its limit, its command.
slow       1.5 echo begun; timeout 300 sleep {marker} & sleep {marker}; echo never
fail       20  echo $COMMIT; tar tzf $OUT/results.tgz; exit 3
huge       900 echo never
group.one  20  echo done > $RESULTS/more.json; echo one
group.two  20  echo two
"""


on_linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="session.py reads /proc")


def start(folder: Path, table: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "jobs.txt").write_text(table)
    where = {"OUT": str(folder / "out"), "RESULTS": str(folder / "results"), "PYTHON": sys.executable}
    where["STRAIGHTLINE_PATH"] = str(folder / "path")
    command = ["bash", str(GPU / "session.sh"), "--table", str(folder / "jobs.txt"), "--commit", "abc123", *arguments]
    return subprocess.Popen(
        command, env=os.environ | where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def archived(folder: Path) -> dict[str, str]:
    with tarfile.open(folder / "out" / "results.tgz") as tar:
        files = {one.name.removeprefix("results/"): tar.extractfile(one) for one in tar.getmembers() if one.isfile()}
        return {name: file.read().decode() for name, file in files.items() if file}


def running(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if text in line]


@on_linux
def test_a_session_brings_everything_home(tmp_path: Path) -> None:
    marker = str(100 + random.random())
    process = start(tmp_path, TABLE.format(marker=marker), "slow", "fail", "huge", "group", "--deadline", "120")
    lines = process.communicate(timeout=100)[0].splitlines()
    assert process.returncode == 1
    assert [line.partition(":")[0].split()[:4] for line in lines] == [
        ["slow", "exit", "code", "124,"],
        ["fail", "exit", "code", "3,"],
        ["huge", "left", "out"],
        ["group.one", "exit", "code", "0,"],
        ["group.two", "exit", "code", "0,"],
    ]
    assert lines[3].endswith(": one") and lines[2].endswith("its limit is 900 s")
    found = archived(tmp_path)
    assert set(found) == {"slow.txt", "fail.txt", "group.one.txt", "group.two.txt", "more.json", "session.txt"}
    assert found["session.txt"].splitlines() == lines
    slow = found["slow.txt"].splitlines()
    assert slow[-1].startswith("exit code 124, ") and "begun" in slow and "never" not in slow
    for name in ("slow", "fail", "group.two"):
        head = dict(line.split(None, 1) for line in found[f"{name}.txt"].splitlines()[:8])
        assert head["commit"] == "abc123" and "mlx" in head["packages"] and {"device", "driver", "limit"} <= set(head)
    assert "\nabc123\n" in found["fail.txt"]
    assert "results/slow.txt" in found["fail.txt"]  # archived before the next job began
    assert not running(marker)  # neither the job nor what it left in a group of its own
    assert not list((tmp_path / "out").glob("*.part"))


def a_long_job(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A session whose job has begun, and what its command line can be told by."""
    marker = str(100 + random.random())
    process = start(folder, f"long 400 echo begun; sleep {marker}\n", "long")
    while not any(line.startswith(f"sleep {marker}") for line in running(marker)):  # not its shell, which says it too
        assert process.poll() is None
        time.sleep(0.05)
    return process, marker


@on_linux
def test_a_session_that_is_cut_brings_home_what_there_is(tmp_path: Path) -> None:
    process, marker = a_long_job(tmp_path)
    process.terminate()
    assert process.wait(timeout=30) == 143
    assert archived(tmp_path)["long.txt"].splitlines()[-1] == "begun"
    assert not running(marker)


@on_linux
def test_what_a_killed_session_left_is_ended_by_the_next_one(tmp_path: Path) -> None:
    process, marker = a_long_job(tmp_path)
    process.kill()
    process.wait(timeout=30)
    assert running(marker)
    lines = start(tmp_path, "next 20 echo done\n", "next").communicate(timeout=60)[0].splitlines()
    assert lines[0].startswith("ended ") and lines[0].endswith(" processes of an earlier session")
    assert lines[1].endswith(": done") and not running(marker)


def test_an_unknown_job_is_refused_before_any_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        session.main(["verify", "no_such_job"])
    assert (
        stopped.value.code == 2 and "no job 'no_such_job'; expected some of full_size.e4b, " in capsys.readouterr().err
    )


def test_the_jobs_of_the_next_session() -> None:
    """Each fits into a call by itself, and starts a script that is there."""
    jobs = session.read(GPU / "jobs.txt")
    assert len({job.name for job in jobs}) == len(jobs) > 20
    assert all(20 < job.limit <= 320 for job in jobs)
    for job in jobs:
        scripts = [word for word in job.command.split() if word.startswith("tests/gpu/")]
        assert all((GPU.parents[1] / script).is_file() for script in scripts)
        assert scripts or " -m straightline.runtime " in job.command


# alternated.py


def turns_of(slower: float, jitter: float, turns: int) -> list[tuple[float, ...]]:
    """On a host that slows down to half its speed; each round has a jitter of its own, some a hiccup."""
    draw, ways, now = random.Random(5), [[0.0] * turns for _ in range(4)], 0
    for turn in range(turns):
        for which in alternated.order(turn):
            speed = 1 + now / (4 * turns)
            hiccup = 3 if draw.random() < 0.05 else 1
            ways[which][turn] = speed * hiccup * (1 + draw.gauss(0, jitter)) * (1 + slower * (which == 1))
            now += 1
    return alternated.slower(ways[1], [ways[0], ways[3]])


def test_four_turns_are_fair() -> None:
    """Each way has each place once and follows each other way once."""
    turns = [alternated.order(number) for number in range(4)]
    assert [sorted(column) for column in zip(*turns, strict=True)] == [[0, 1, 2, 3]] * 4
    pairs = [pair for turn in turns for pair in pairwise(turn)]
    assert sorted(pairs) == [(one, other) for one in range(4) for other in range(4) if one != other]


def test_an_interval_holds_the_difference_and_is_narrow() -> None:
    for slower in (0.0, 0.005, 0.02):
        found = alternated.interval(turns_of(slower, 0.02, 400))
        assert found.low <= slower <= found.high and found.half < 0.004
    assert alternated.interval(turns_of(0.02, 0.02, 400)).low > 0.01
    assert alternated.interval(turns_of(0.0, 0.2, 20)).half > 0.01  # too little is known, and it says so
    assert alternated.interval([(3.0,)]) == (3.0, 3.0, 3.0)


def test_those_of_quantized_caches() -> None:
    """Every walk of optiq.py; every product and attention of quantized_attention.py, one cell a line."""
    commands = {
        "optiq.py": ["--toy", "--dtype", "float32", "--sizes", "12b", "--steps", "3"],
        "quantized_attention.py": ["--toy", "--limit", "1"],
    }
    printed = {}
    for name, arguments in commands.items():
        command = [sys.executable, str(GPU / name), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        printed[name] = ran.stdout.splitlines()
    assert printed["optiq.py"][-1].startswith("12 of 12 cells equal")
    cells = [line for line in printed["quantized_attention.py"] if " bits of " in line]
    assert len(cells) > 15 and all(" ok " in line and "WRONG" not in line for line in cells)
