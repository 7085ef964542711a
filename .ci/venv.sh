# Sourced by regen.sh and tests/run.sh: makes .venv on first use, and again when pyproject.toml changes.
# STRAIGHTLINE_PYTHON: the interpreter to make it with (default python3).
# STRAIGHTLINE_EXTRA: the MLX backend extra (default: cpu on Linux; none on macOS, where plain mlx brings Metal).
case "$(uname -s)" in
  Darwin) extra=${STRAIGHTLINE_EXTRA:-} ;;
  *) extra=${STRAIGHTLINE_EXTRA:-cpu} ;;
esac
case "$extra" in
  "" | cpu | cuda13) ;;
  *) echo "STRAIGHTLINE_EXTRA is \"$extra\"; expected cpu or cuda13" >&2; exit 2 ;;
esac
stamp=".venv/straightline.stamp"
want="$(cksum < pyproject.toml) ${extra:-none} $PWD"
if [ ! -x .venv/bin/python ] || [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
  python=${STRAIGHTLINE_PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "$python is missing or older than Python 3.11; install a newer one or set STRAIGHTLINE_PYTHON to it" >&2
    exit 2
  fi
  echo "Setting up .venv (first use, or pyproject.toml changed): about half a minute..." >&2
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev${extra:+,$extra}]" >&2
  printf '%s' "$want" > "$stamp"
fi
