#!/usr/bin/env bash
# Lint, types and tests, on a machine that has only Python 3.11 or newer. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. .ci/venv.sh
if [ $# -eq 0 ]; then
  .venv/bin/ruff check .
  .venv/bin/black --quiet --check --diff .
  # mypy cannot follow an editable install that maps folders, so it is shown the same folders under the import name.
  mkdir -p .venv/typed/straightline
  for folder in codegen templates generated runtime; do ln -sfn "$PWD/$folder" ".venv/typed/straightline/$folder"; done
  MYPYPATH=.venv/typed .venv/bin/mypy -p straightline.codegen -p straightline.runtime
fi
# Two at a time: the tests are many and small, and most of MLX on a CPU is one thread.
exec .venv/bin/python -m pytest --numprocesses 2 --dist loadfile "$@"
