"""./regen.sh: what it writes, checks, shows and refuses. Every test but the freshness one works on copies."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_checkpoint import SHARD, prefixed, save, shapes_of
from toys import D6, nested

from straightline.codegen import SpecError, driver, generate, upstream
from straightline.codegen.__main__ import main
from straightline.codegen.check import DIFF_LINES
from straightline.codegen.target import Target, target_names
from straightline.codegen.write import write_files

Command = Callable[..., tuple[int, str, str]]
NAMES = target_names()
FILES = [f"{name.replace('-', '_')}.py" for name in NAMES]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def file_name(target: Target) -> str:
    return f"{target.module}.py"


@pytest.fixture(scope="session")
def fresh() -> dict[str, bytes]:
    return driver.rendered(driver.chosen(()))


@pytest.fixture
def generated(tmp_path: Path, fresh: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of generated/ in place of the repository's; rendering again is made cheap."""
    folder = tmp_path / "generated"
    folder.mkdir()
    for name, data in fresh.items():
        (folder / name).write_bytes(data)
    (folder / "__init__.py").write_text('"""Rendered."""\n')
    monkeypatch.setattr(driver, "GENERATED", folder)
    monkeypatch.setattr(driver, "rendered", lambda targets: {name: fresh[name] for name in map(file_name, targets)})
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(list(arguments))
        except SystemExit as exited:
            code = int(exited.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def drifted(monkeypatch: pytest.MonkeyPatch) -> str:
    sentence = (
        "mlx_lm/models/gemma4_text.py: Router.__call__ changed in mlx-lm 0.33.0; "
        "review templates/experts.py.j2, then ./regen.sh --accept-upstream"
    )
    monkeypatch.setattr(upstream, "drift", lambda: (sentence,))
    return sentence


def test_generated_is_fresh(fresh: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's own: what CI asks, in process."""
    monkeypatch.setattr(driver, "rendered", lambda targets: fresh)
    assert driver.check(driver.chosen(())) == ()


def test_there_are_five_sizes_and_three_quantized_targets() -> None:
    sizes = ("gemma4-12b", "gemma4-26b", "gemma4-31b", "gemma4-e2b", "gemma4-e4b")
    assert tuple(sorted([*sizes, "gemma4-12b-optiq", "gemma4-26b-optiq", "gemma4-e4b-optiq"])) == NAMES


# --- check -------------------------------------------------------------------------------------------------------


def test_a_clean_check(generated: Path, command: Command) -> None:
    assert command("--check") == (0, f"generated/ is fresh: {', '.join(NAMES)}\n", "")
    assert command("--check", "gemma4-e2b") == (0, "generated/ is fresh: gemma4-e2b\n", "")


def test_check_shows_a_changed_file(generated: Path, command: Command) -> None:
    path = generated / "gemma4_12b.py"
    path.write_bytes(path.read_bytes().replace(b"LAYERS = 48\n", b"LAYERS = 49\n"))
    before = contents(generated)
    code, out, err = command("--check")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[:3] == [
        "generated/gemma4_12b.py: changed",
        "--- generated/gemma4_12b.py (on disk)",
        "+++ generated/gemma4_12b.py (rendered)",
    ]
    assert "-LAYERS = 49" in lines and "+LAYERS = 48" in lines
    assert lines[-1] == "To repair: ./regen.sh gemma4-12b"
    assert contents(generated) == before
    assert command("--check", "gemma4-e2b")[0] == 0


def test_check_names_a_missing_file(generated: Path, command: Command) -> None:
    (generated / "gemma4_e4b.py").unlink()
    out = "generated/gemma4_e4b.py: missing\nTo repair: ./regen.sh gemma4-e4b\n"
    assert command("--check") == (1, out, "")
    assert not (generated / "gemma4_e4b.py").exists()


def test_check_names_an_orphan_whatever_the_target(generated: Path, command: Command) -> None:
    (generated / "gemma4_27b.py").write_text("")
    (generated / "old file.py").write_text("")
    out = (
        "generated/gemma4_27b.py: orphan, made by no spec\ngenerated/old file.py: orphan, made by no spec\n"
        "To repair: rm generated/gemma4_27b.py 'generated/old file.py'\n"
    )
    assert command("--check") == command("--check", "gemma4-12b") == (1, out, "")


def test_check_names_drift(generated: Path, command: Command, drifted: str) -> None:
    out = f"{drifted}\nTo repair after that review: ./regen.sh --accept-upstream\n"
    assert command("--check") == command("--check", "gemma4-12b") == (1, out, "")


def test_check_names_everything_at_once(generated: Path, command: Command, drifted: str) -> None:
    (generated / "gemma4_12b.py").unlink()
    (generated / "gemma4_27b.py").write_text("")
    code, out, _ = command("--check")
    assert code == 1
    assert out.splitlines() == [
        "generated/gemma4_12b.py: missing",
        "generated/gemma4_27b.py: orphan, made by no spec",
        drifted,
        "To repair after that review: rm generated/gemma4_27b.py && ./regen.sh --accept-upstream",
    ]


def test_check_repairs_all_with_the_short_command(generated: Path, command: Command) -> None:
    for name in FILES:
        (generated / name).unlink()
    assert command("--check")[1].splitlines()[-1] == "To repair: ./regen.sh"
    assert command("--check", "gemma4-12b", "gemma4-e2b")[1].splitlines()[-1] == (
        "To repair: ./regen.sh gemma4-12b gemma4-e2b"
    )


def test_a_long_diff_is_cut(generated: Path, command: Command) -> None:
    (generated / "gemma4_12b.py").write_bytes(b"\xff\x00\n" * 300)
    lines = command("--check")[1].splitlines()
    assert len(lines) == 1 + DIFF_LINES + 2
    assert lines[-2].startswith("... and ") and lines[-2].endswith(" more lines of this diff")


def test_a_missing_folder_is_named(generated: Path, command: Command) -> None:
    shutil.rmtree(generated)
    error = "error: generated/ is not there; expected the committed folder (git checkout generated)\n"
    assert command("--check") == command() == (1, "", error)


# --- write -------------------------------------------------------------------------------------------------------


def test_write_repairs_what_check_finds(generated: Path, command: Command, fresh: dict[str, bytes]) -> None:
    (generated / "gemma4_12b.py").write_text("old")
    (generated / "gemma4_e4b.py").unlink()
    code, out, err = command()
    assert (code, err) == (0, "")
    stale = ("gemma4_12b.py", "gemma4_e4b.py")
    assert out == "".join(f"generated/{name}: {'written' if name in stale else 'unchanged'}\n" for name in FILES)
    assert contents(generated) == fresh | {"__init__.py": b'"""Rendered."""\n'}
    assert command("--check")[0] == 0


def test_one_target_touches_one_file(generated: Path, command: Command) -> None:
    for name in FILES:
        (generated / name).write_text("old")
    assert command("gemma4-12b", "gemma4-12b") == (0, "generated/gemma4_12b.py: written\n", "")
    assert [name for name in FILES if (generated / name).read_text() == "old"] == FILES[1:]


def test_a_fresh_file_is_not_touched(generated: Path, command: Command) -> None:
    os.utime(generated / "gemma4_12b.py", (1, 1))
    assert command("gemma4-12b") == (0, "generated/gemma4_12b.py: unchanged\n", "")
    assert (generated / "gemma4_12b.py").stat().st_mtime == 1


def test_write_mentions_orphans(generated: Path, command: Command) -> None:
    (generated / "gemma4_27b.py").write_text("")
    out = "generated/gemma4_12b.py: unchanged\ngenerated/gemma4_27b.py: orphan, made by no spec; remove it\n"
    assert command("gemma4-12b") == (0, out, "")


def test_drift_is_refused_and_nothing_is_written(generated: Path, command: Command, drifted: str) -> None:
    (generated / "gemma4_12b.py").write_text("old")
    assert command() == command("gemma4-12b") == (1, "", f"error: {drifted}\n")
    assert (generated / "gemma4_12b.py").read_text() == "old"


def test_several_drifts_are_counted(generated: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "drift", lambda: ("one", "two", "three"))
    assert command() == (1, "", "error: one (2 more: ./regen.sh --check)\n")


def test_acceptance_writes_the_lock_and_renders(
    generated: Path, command: Command, drifted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = tmp_path / "upstream.lock"
    lock.write_text("old")
    monkeypatch.setattr(upstream, "LOCK", lock)
    monkeypatch.setattr(upstream, "accepted", lambda: "new")
    (generated / "gemma4_12b.py").unlink()
    code, out, err = command("--accept-upstream", "gemma4-12b")
    assert (code, err) == (0, "")
    assert out == f"generated/gemma4_12b.py: written\n{tmp_path.name}/upstream.lock: written\n"
    assert lock.read_text() == "new"


def test_an_error_in_one_target_leaves_all(generated: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FILES:
        (generated / name).write_text("old")
    before = contents(generated)

    def fail_last(targets: object) -> dict[str, bytes]:
        raise SpecError("templates: broken; expected whole")

    monkeypatch.setattr(driver, "rendered", fail_last)
    assert command() == (1, "", "error: templates: broken; expected whole\n")
    assert contents(generated) == before


@pytest.mark.parametrize(
    "template",
    [b"\xff\xfe", b"{{ 1 // 0 }}", b"{{ 1 + plan }}", b"{% include 'file.py.j2' %}", b"{{ plan.steps[999].x }}"],
)
def test_a_template_that_fails_in_any_way(template: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file.py.j2").write_bytes(template)
    monkeypatch.setattr("straightline.codegen.render.TEMPLATES", tmp_path)
    with pytest.raises(SpecError, match=r"^templates: .*; expected .*only fields of the plan$"):
        generate(D6, "toy")


def test_a_pipe_in_the_place_of_the_file_is_replaced(
    generated: Path, command: Command, fresh: dict[str, bytes]
) -> None:
    path = generated / "gemma4_12b.py"
    path.unlink()
    os.mkfifo(path)
    assert command("gemma4-12b")[0] == 0
    assert path.read_bytes() == fresh["gemma4_12b.py"]


def test_a_file_that_cannot_be_replaced_leaves_all(generated: Path, command: Command) -> None:
    for name in FILES:
        (generated / name).write_text("old")
    (generated / FILES[-1]).unlink()
    (generated / FILES[-1]).mkdir()
    before = contents(generated)
    error = "error: generated: cannot be written (Is a directory); expected a folder that can\n"
    assert command() == (1, "", error)
    assert contents(generated) == before


def test_temporary_files_of_dead_runs_are_removed(generated: Path, command: Command) -> None:
    stale, other = generated / ".gemma4_12b.py.123.tmp", generated / ".notes.tmp"
    stale.write_text("half")
    other.write_text("mine")
    assert command("gemma4-12b")[0] == 0
    assert not stale.exists() and other.exists()


def test_new_files_follow_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        write_files(tmp_path, {"a.py": b""})
    finally:
        os.umask(previous)
    assert (tmp_path / "a.py").stat().st_mode & 0o777 == 0o644


def test_writers_of_one_folder_take_turns(tmp_path: Path) -> None:
    texts = [f"{number}".encode() * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda text: write_files(tmp_path, {"a.py": text, "b.py": text}), texts * 4):
            pass
    found = contents(tmp_path)
    assert set(found) == {"a.py", "b.py"}
    assert found["a.py"] == found["b.py"] and found["a.py"] in texts


WRITE = """
import os, signal, sys
from pathlib import Path
from straightline.codegen.write import write_files

steps = int(sys.argv[2])

def count(event, arguments):
    global steps
    if event in ("open", "os.rename", "os.remove") and sys.argv[1] in str(arguments[0]):
        steps -= 1
        if steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)

original = os.fsync
def fsync(descriptor):
    count("open", (sys.argv[1],))
    original(descriptor)

os.fsync = fsync
sys.addaudithook(count)
write_files(Path(sys.argv[1]), {"a.py": b"new" * 1000, "b.py": b"new" * 1000, "c.py": b"new" * 1000})
"""


def test_a_write_killed_at_any_step_leaves_old_or_new(tmp_path: Path) -> None:
    old, new = b"old" * 1000, b"new" * 1000
    kills = 0
    for step in range(1, 100):
        for name in ("a.py", "b.py"):
            (tmp_path / name).write_bytes(old)
        (tmp_path / "c.py").unlink(missing_ok=True)
        code = subprocess.run([sys.executable, "-c", WRITE, str(tmp_path), str(step)]).returncode
        assert code in (0, -signal.SIGKILL)
        found = contents(tmp_path)
        assert all(found[name] in (old, new) for name in ("a.py", "b.py"))
        assert found.get("c.py", new) == new
        if code == 0:
            break
        kills += 1
    assert kills >= 10
    assert sorted(contents(tmp_path)) == ["a.py", "b.py", "c.py"], "the last run cleaned up after the killed ones"


def test_a_killed_regen_leaves_old_or_new(tmp_path: Path, fresh: dict[str, bytes]) -> None:
    code = "import sys; from pathlib import Path; from straightline.codegen import driver; "
    code += "driver.GENERATED = Path(sys.argv.pop(1)); "
    code += "from straightline.codegen.__main__ import main; sys.exit(main())"
    old = b"old"
    new = fresh["gemma4_12b.py"]
    (tmp_path / "gemma4_12b.py").write_bytes(old)
    started = time.monotonic()
    arguments = [sys.executable, "-c", code, str(tmp_path), "gemma4-12b"]
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    took = time.monotonic() - started
    assert (tmp_path / "gemma4_12b.py").read_bytes() == new
    for share in (0.2, 0.6, 0.85, 0.95):
        (tmp_path / "gemma4_12b.py").write_bytes(old)
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
        time.sleep(took * share)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / "gemma4_12b.py").read_bytes() in (old, new)


# --- a checkpoint of one's own -----------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "my checkpoint", nested(D6), prefixed(shapes_of(D6), "language_model.model."))


def test_from_writes_a_file_that_says_nothing_of_the_folder(
    checkpoint: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    assert command("--from", str(checkpoint), "--name", "my-gemma") == (0, "./my_gemma.py: written\n", "")
    assert command("--from", str(checkpoint), "--name", "my-gemma") == (0, "./my_gemma.py: unchanged\n", "")
    source = (out / "my_gemma.py").read_text()
    assert list(contents(out)) == ["my_gemma.py"]
    assert source.startswith(
        "# Code generated by straightline from a checkpoint's config.json. DO NOT EDIT.\n"
        "# To change it, run: ./regen.sh --from DIR --name my-gemma\n"
    )
    assert "my checkpoint" not in source and str(tmp_path) not in source

    there = tmp_path / "there"
    there.mkdir()
    assert command("--from", str(checkpoint), "--name", "my-gemma", "--out", str(there)) == (
        0,
        f"{there}/my_gemma.py: written\n",
        "",
    )
    assert (there / "my_gemma.py").read_text() == source
    assert command("--from", str(checkpoint), "--name", "my-gemma", "--print") == (0, source, "")


def test_from_notes_a_head_that_is_ignored(tmp_path: Path, command: Command) -> None:
    folder = save(tmp_path / "tied", D6, shapes_of(D6) | {"lm_head.weight": (97, 64)})
    code, out, err = command("--from", str(folder), "--name", "my-gemma", "--plan")
    assert code == 0
    assert out.startswith("my-gemma: 6 layers (4 sliding, 2 full), no KV sharing, no experts.\n")
    assert err == ("note: lm_head is ignored, since tie_word_embeddings is true: logits come from the embedding\n")


def test_from_refuses_and_writes_nothing(checkpoint: Path, command: Command, tmp_path: Path, drifted: str) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def refused(*arguments: str) -> str:
        code, printed, error = command(*arguments)
        assert code == 1 and printed == "" and not list(out.iterdir())
        return error

    own = ("--from", str(checkpoint), "--name", "my-gemma", "--out", str(out))
    assert refused(*own) == f"error: {drifted}\n"
    assert refused("--from", str(checkpoint), "--name", "My Gemma", "--out", str(out)) == (
        'error: name is "My Gemma"; expected lower-case letters and digits in words joined by -\n'
    )
    config = (checkpoint / "config.json").read_bytes()
    for hostile in (b"[" * 100_000, b'{"model_type": "gemma4", "text_config": "); import os"}', b"\x00" * 10**7):
        (checkpoint / "config.json").write_bytes(hostile)
        assert refused(*own).startswith("error: config.json: ")
    (checkpoint / "config.json").write_bytes(config)
    assert refused("--from", str(out), "--name", "a", "--out", str(out)) == (
        f"error: {out}/config.json: cannot be read (No such file or directory); expected a Gemma 4 config.json\n"
    )
    (checkpoint / SHARD).write_bytes(b"")
    assert refused(*own).startswith("error: model.safetensors: cannot be read (")


def test_an_out_that_cannot_be_written(checkpoint: Path, command: Command, tmp_path: Path) -> None:
    for out, reason in ((tmp_path / "no", "No such file or directory"), (checkpoint / SHARD, "Not a directory")):
        error = f"error: {out}: cannot be written ({reason}); expected a folder that can\n"
        assert command("--from", str(checkpoint), "--name", "my-gemma", "--out", str(out)) == (1, "", error)


# --- showing, and the command line -------------------------------------------------------------------------------


def test_print_shows_the_committed_bytes(generated: Path, command: Command, fresh: dict[str, bytes]) -> None:
    (generated / "gemma4_12b.py").unlink()
    assert command("gemma4-12b", "--print") == (0, fresh["gemma4_12b.py"].decode(), "")
    assert not (generated / "gemma4_12b.py").exists()


def test_plan_shows_a_table_for_each_target(command: Command) -> None:
    code, out, err = command("--plan")
    assert (code, err) == (0, "")
    tables = out.split("\n\ngemma4-")
    assert len(tables) == 8
    assert "\n 22  sliding_source  sliding_mask  512     8 x 2 x 256       10240  cache 22\n" in out
    assert "  10240  cache 22, 4 bits in groups of 64\n" in out
    assert "  10240  of layer 23, 4 bits in groups of 64\n" in out
    assert "\n 29  full_reader     full_mask     all     8 x 2 x 512       10240  of layer 23\n" in out


USAGE = {
    ("--bogus",): "unrecognized arguments: --bogus",
    ("--check", "--plan"): "argument --plan: not allowed with argument --check",
    ("--from", "x"): "--from DIR and --name NAME go together",
    ("--name", "x"): "--from DIR and --name NAME go together",
    ("--out", "x"): "--out goes with --from; the committed targets have their place in generated/",
    ("--from", "x", "--name", "a", "gemma4-12b"): "--from makes one file of its own; name no targets beside it",
    (
        "--from",
        "x",
        "--name",
        "a",
        "--check",
    ): "--check and --accept-upstream are for the committed targets, not for --from",
    ("--print",): "--print shows one file; name one target",
    ("--print", "gemma4-12b", "gemma4-e2b"): "--print shows one file; name one target",
}


@pytest.mark.parametrize(("arguments", "message"), USAGE.items(), ids=[" ".join(one) for one in USAGE])
def test_usage_errors(arguments: tuple[str, ...], message: str, command: Command) -> None:
    assert command(*arguments) == (2, "", f"error: {message} (see ./regen.sh --help)\n")


def test_an_unknown_target_is_refused(generated: Path, command: Command) -> None:
    error = f'error: target "../x" is unknown; expected one of {", ".join(NAMES)}\n'
    assert command("gemma4-12b", "../x") == (1, "", error)


def test_help(command: Command) -> None:
    code, out, _ = command("--help")
    assert code == 0
    assert all(word in out for word in ("--check", "--accept-upstream", "--from DIR", "--name", "--out", "--plan"))


def test_an_interrupt_says_nothing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(names: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "chosen", interrupted)
    assert command() == (130, "", "")


def codegen(shell: str) -> subprocess.CompletedProcess[str]:
    line = f"set -o pipefail; {shell.replace('CODEGEN', f'{sys.executable} -P -m straightline.codegen')}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True)


def test_a_closed_or_full_standard_output() -> None:
    head = codegen("CODEGEN --plan | head -c 1")
    assert (head.returncode, head.stdout, head.stderr) in [(141, "g", ""), (0, "g", "")]
    full = codegen("CODEGEN --plan > /dev/full") if Path("/dev/full").exists() else None
    assert full is None or (full.returncode, full.stderr) == (1, "error: standard output: No space left on device\n")
    closed = codegen("CODEGEN --plan >&-")
    assert (closed.returncode, closed.stderr) == (0, "")


def test_help_and_errors_load_no_tool() -> None:
    code = "import sys; from straightline.codegen.__main__ import main\n"
    code += "try: main(['--bogus'])\nexcept SystemExit: pass\n"
    code += "main(['--plan']); main(['nope'])\n"
    code += "assert not {'jinja2', 'libcst', 'black', 'safetensors', 'mlx'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
