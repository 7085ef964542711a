# Source this where straightline is not installed (a lent GPU machine):  . tests/gpu/path.sh
# Lays the four folders under their one import name, as pyproject.toml maps them, and puts that first on PYTHONPATH.
straightline_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
straightline_path=${STRAIGHTLINE_PATH:-/tmp/straightline-path-$(cksum <<< "$straightline_root" | cut -d" " -f1)}
mkdir -p "$straightline_path/straightline"
for folder in codegen templates generated runtime; do
  ln -sfn "$straightline_root/$folder" "$straightline_path/straightline/$folder"
done
export PYTHONPATH=$straightline_path${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
