"""What a wheel holds: every folder of code, under the import name that it has in a checkout."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = ("codegen", "templates", "generated", "runtime")


def test_every_folder_of_code_is_a_package() -> None:
    folders = {
        path.parent.relative_to(ROOT)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".toml", ".j2", ".h") and "__pycache__" not in path.parts
    }
    expected = {f"straightline.{'.'.join(folder.parts)}": folder.as_posix() for folder in folders}
    assert SETUP["package-dir"] == expected
    assert sorted(SETUP["packages"]) == sorted(expected)


def test_every_other_file_is_package_data() -> None:
    for name, folder in SETUP["package-dir"].items():
        files = [path for path in (ROOT / folder).iterdir() if path.is_file() and path.suffix not in (".py", ".tmp")]
        patterns = SETUP["package-data"].get(name, [])
        left = [path.name for path in files if not any(path.match(pattern) for pattern in patterns)]
        assert left == [], f"{name}: in no wheel"
