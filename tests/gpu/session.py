"""Runs jobs one at a time, in the order given, each under its own time limit; without a job it lists them.

Reads jobs.txt (a line: name, seconds, command). Writes $RESULTS/NAME.txt (by default in /tmp/straightline-results)
and $OUT/results.tgz, which holds all of $RESULTS and is replaced in one step after each job and every 20 seconds of
one: a session that is cut brings home what was printed until then. `full_size` stands for full_size.e4b and all else
that begins so. A job that does not fit before the deadline is left out, and said (or cut, with --least). No job
outlives its limit, nor does anything that it started; what a session that was killed left running, the next one ends
first. The exit code is 0 if every job ran and ended with 0. Started by session.sh.
"""

import argparse
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
REFRESH = 20.0  # seconds
GRACE = 5.0  # between the request to end and the end
TAG = "STRAIGHTLINE_SESSION"  # of all that a session starts: where its results lie, and its process
CUT = 124  # the exit code of `timeout`


class Job(NamedTuple):
    """limit: seconds."""

    name: str
    limit: float
    command: str


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic()
    options = parse(arguments)
    if not options.jobs:
        print("\n".join(f"{job.name:<18} {job.limit:4.0f} s  {job.command}" for job in options.table))
        return 0
    if options.check:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what `finally` says is then done
    session = Session(options.commit, started, options.deadline, options.least)
    return max([session.run(job) for job in options.jobs])


class Session:
    """started: by time.monotonic(). deadline: seconds after it. least: see --least."""

    def __init__(self, commit: str, started: float, deadline: float, least: float | None) -> None:
        self.started = started
        self.deadline = deadline
        self.least = least
        self.results = Path(os.environ["RESULTS"])
        self.archive = Path(os.environ.get("OUT", "."), "results.tgz")
        self.results.mkdir(parents=True, exist_ok=True)
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        cache = os.environ.get("STRAIGHTLINE_CACHE", "/tmp/straightline-cache")  # kernels are compiled once for all
        own = {"COMMIT": commit, "PYTHON": sys.executable, "STRAIGHTLINE_CACHE": cache}
        self.environment = os.environ | own | {"PYTHONUNBUFFERED": "1"}
        if left := leftovers(self.environment[TAG]):
            end(lambda: leftovers(self.environment[TAG]))
            self._say(f"ended {len(left)} processes of an earlier session")
        self.machine = self._machine(commit)

    def run(self, job: Job) -> int:
        """0 if it ended with 0, else 1."""
        left = self.deadline - (time.monotonic() - self.started)
        if self.least is not None and job.limit > left >= self.least:
            job = job._replace(limit=left)
        if job.limit > left:
            self._say(f"{job.name:<18} left out: {left:.0f} s are left, its limit is {job.limit:.0f} s")
            return 1
        path = self.results / f"{job.name}.txt"
        begun = time.monotonic()
        try:
            with path.open("w") as file:
                file.write(f"command   {job.command}\nlimit     {job.limit:.0f} s\n{self.machine}\n")
                file.flush()
                code = limited(job, file, self.environment, self._pack)
        finally:
            self._pack()
        spent = time.monotonic() - begun
        with path.open("a") as file:
            file.write(f"\nexit code {code}, {spent:.0f} s\n")
        self._say(f"{job.name:<18} exit code {code}, {spent:.0f} s: {last_line(path)}")
        return int(code != 0)

    def _machine(self, commit: str) -> str:
        """In a process of its own, which gives the device back."""
        command = [sys.executable, str(HERE / "machine.py"), "--commit", commit]
        try:
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            return f"commit    {commit}\nmachine   not known: no answer within 60 s\n"
        return done.stdout or f"commit    {commit}\nmachine   not known: {done.stderr.strip()[-300:]}\n"

    def _say(self, line: str) -> None:
        print(line, flush=True)
        with (self.results / "session.txt").open("a") as file:
            file.write(line + "\n")
        self._pack()

    def _pack(self) -> None:
        beside = self.archive.with_name(self.archive.name + ".part")
        with tarfile.open(beside, "w:gz") as tar:
            tar.add(self.results, "results")
        os.replace(beside, self.archive)


def limited(job: Job, file: io.TextIOBase, environment: dict[str, str], meanwhile: Callable[[], None]) -> int:
    """Its exit code; 124 where its time was up. Nothing that it started is left behind."""
    process = subprocess.Popen(
        ["bash", "-c", job.command],
        cwd=HERE.parents[1],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    until = time.monotonic() + job.limit
    try:
        while (left := until - time.monotonic()) > 0:
            try:
                return process.wait(min(left, REFRESH))
            except subprocess.TimeoutExpired:
                meanwhile()
        return CUT
    finally:
        end(lambda: members(process.pid))
        process.poll()


def end(running: Callable[[], list[int]]) -> None:
    """Asks all that run to end, then makes them."""
    for which in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + GRACE
        for one in running():
            with suppress(ProcessLookupError):
                os.kill(one, which)
        while running() and time.monotonic() < until:
            time.sleep(0.05)


def members(session: int) -> list[int]:
    """The processes of a session that still run. (Not of a group: `timeout` makes one of its own for what it runs.)"""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its_session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


def leftovers(tag: str) -> list[int]:
    """The processes of earlier sessions with the same folder of results, themselves included."""
    mine, folder = f"{TAG}={tag}".encode(), f"{TAG}={tag.rpartition(' ')[0]} ".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            tags = [one for one in path.read_bytes().split(b"\0") if one.startswith(folder)]
            if tags and mine not in tags:
                found.append(int(path.parent.name))
    return found


def last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return next((line[:150] for line in reversed(lines) if not line.startswith("exit code")), "")


# The table


def read(path: Path) -> list[Job]:
    lines = [line.split(None, 2) for line in path.read_text().splitlines()]
    return [Job(name, float(limit), command) for name, limit, command in filter(wanted, lines)]


def wanted(parts: list[str]) -> bool:
    return bool(parts) and not parts[0].startswith("#")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    parser.add_argument("--commit", default="unknown", help="of this checkout: there is no git on the machine")
    parser.add_argument("--deadline", type=float, default=560, help="seconds from the start (default: %(default)s)")
    parser.add_argument(
        "--least", type=float, metavar="S", help="cut a job that does not fit, if S seconds are left for it"
    )
    parser.add_argument("--check", action="store_true", help="only say whether there are such jobs")
    parser.add_argument("--table", type=Path, default=HERE / "jobs.txt", help="other jobs")
    options = parser.parse_args(arguments)
    options.table = read(options.table)
    jobs: list[Job] = []
    for name in options.jobs:
        found = [job for job in options.table if job.name == name or job.name.startswith(f"{name}.")]
        if not found:
            parser.error(f"no job {name!r}; expected some of {', '.join(job.name for job in options.table)}")
        jobs += [job for job in found if job not in jobs]
    options.jobs = jobs
    return options


if __name__ == "__main__":
    sys.exit(main())
