#!/usr/bin/env bash
# Renders generated/ from codegen/specs/ and templates/; `./regen.sh --help` lists what it takes.
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
. .ci/venv.sh
root=$PWD
cd "$caller"
exec "$root/.venv/bin/python" -P -m straightline.codegen "$@"
