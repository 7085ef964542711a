"""The documents against the code: what they run, name and list is there."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").glob("*.md"))]
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"

# Calls whose text arguments are, or become, messages to a user.
RAISERS = {
    "StraightlineError",
    "OtherLayout",
    "SpecError",
    "ImportError",
    "usage_error",
    "error",
    "Unsupported",
    "Fast",
}
# Functions that return a message, or nothing.
REASONERS = {"refuse", "mixed_layouts", "usage_error", "_choose", "_checked_form", "detect", "lay"} | {
    "judge",
    "_compared",
    "_measured",
    "_check_decode",
    "_other_logits",
    "_other_cache",
    "_asked_twice",
    "_told",
    "_refuse",
    "fast_refused",
    "refused",
}
# Seen only by whoever changes templates.
FOR_PROGRAMMERS = {
    "templates: {} was given to the filter py; expected a plain literal",
    "templates: {}; expected only fields of the plan",
}
LONG = 12  # letters that tell one message from another
FOLDERS = "codegen|templates|generated|runtime|examples|tests|docs"


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_readme_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word, and it prints what the README says."""
    text = README.read_text()
    (session,) = [code for code in fenced(text, "python") if "toy()" in code]
    (expected,) = [shown for shown in fenced(text, "console") if "session.py" in shown]
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", session], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected.partition("\n")[2]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_files_exist(path: Path) -> None:
    text = path.read_text()
    beside = re.findall(r"\]\(([^)#:]+)\)", text)
    named = re.findall(rf"(?<![\w/-])((?:{FOLDERS})/[\w./-]*\w)", text)
    # Where a document shows how to add a target, and a file that nobody made.
    named = [one for one in named if "gemma4_short" not in one and not one.endswith(("/NAME", "/NAME.py", "/mine.py"))]
    missing = [one for one in beside if not (path.parent / one).exists()]
    missing += [one for one in named if not (ROOT / one).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_and_flags_exist(path: Path) -> None:
    from straightline.codegen.__main__ import parser as regen
    from straightline.runtime.cli import PASSING_ON, parser

    (chosen,) = [action for action in parser()._actions if action.dest == "command"]
    assert chosen.choices is not None
    for name, rest in re.findall(r"straightline ([a-z][a-z-]*)((?: [^\n`|#]*)?)", path.read_text()):
        if name not in chosen.choices:
            # Prose: "straightline is not on PyPI".
            assert "--" not in rest, f"straightline {name}{rest}"
        elif name not in PASSING_ON:
            flags = {flag for action in chosen.choices[name]._actions for flag in action.option_strings}
            unknown = set(re.findall(r"--[a-z][a-z-]*", rest)) - flags
            assert not unknown, f"straightline {name}: {unknown}"
    flags = {flag for action in regen()._actions for flag in action.option_strings}
    for rest in re.findall(r"\./regen\.sh([^\n`#]*)", path.read_text()):
        assert not set(re.findall(r"--[a-z][a-z-]*", rest)) - flags, rest


def test_the_readme_has_every_command_and_document() -> None:
    from straightline.runtime.cli import COMMANDS, PASSING_ON

    text = README.read_text()
    wanted = [f"`straightline {name} " for name in (*COMMANDS, *PASSING_ON)]
    wanted += [f"](docs/{path.name})" for path in DOCS if path != README]
    assert not [one for one in wanted if one not in text]


def test_the_layer_that_is_followed_is_the_rendered_one() -> None:
    rendered = (ROOT / "generated" / "gemma4_12b.py").read_text()
    shown = fenced((ROOT / "docs" / "how-it-works.md").read_text(), "python")
    functions = [code for code in shown if code.startswith("def ")]
    assert len(functions) == 2
    assert all(code in rendered for code in functions)


def texts(node: ast.AST) -> Iterator[str]:
    """Each string below a node, a {} in the place of what is put into it."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def messages(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in RAISERS:
                for argument in node.args:
                    yield from texts(argument)
            for keyword in node.keywords:
                if keyword.arg == "reason":
                    yield from texts(keyword.value)
        elif isinstance(node, ast.FunctionDef) and node.name in REASONERS:
            for inside in ast.walk(node):
                if isinstance(inside, ast.Return | ast.Assign) and inside.value is not None:
                    yield from texts(inside.value)


@cache
def all_messages() -> set[str]:
    sources = [*(ROOT / "runtime").rglob("*.py"), *(ROOT / "codegen").rglob("*.py")]
    found = {text for source in sources for text in messages(ast.parse(source.read_text()))}
    return {re.sub(r"\s+", " ", text) for text in found} - FOR_PROGRAMMERS


def fragments(message: str) -> list[str]:
    parts = [part.strip() for part in message.split("{}")]
    return [part for part in parts if len(part) >= LONG and " " in part]


def undocumented(text: str) -> list[str]:
    text = re.sub(r"\s+", " ", text)
    return sorted(message for message in all_messages() if any(part not in text for part in fragments(message)))


def test_messages_are_found() -> None:
    """The collector itself: one of each form."""
    found = all_messages()
    assert len(found) > 150
    assert "cache {} is {}, file expects {}" in found
    assert "the model is in training mode; call model.eval() for the generated path" in found
    assert "an integer from {} to {}" in found
    assert "rows of {} values; the kernel is for multiples of 8" in found
    assert "the default device is the CPU" in found
    assert "its logits differ from those of forward at step {}: {}" in found


def test_troubleshooting_has_every_message() -> None:
    assert undocumented(TROUBLESHOOTING.read_text()) == []


def test_a_missing_message_is_seen() -> None:
    text = TROUBLESHOOTING.read_text().replace("in training mode", "training")
    assert undocumented(text) == ["the model is in training mode; call model.eval() for the generated path"]
