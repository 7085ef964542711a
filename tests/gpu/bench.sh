#!/usr/bin/env bash
# The table of decoding beside mlx-lm, one file a model: $OUT/bench_NAME.txt (and .svg). Random weights, no download.
#
#   . tests/gpu/path.sh; bash tests/gpu/bench.sh                 all of them: at most 9 minutes on one H200
#   . tests/gpu/path.sh; bash tests/gpu/bench.sh e4b 31b         these only
#   SUITE=no ... bash tests/gpu/bench.sh e4b 12b                 without the standard set, which e4b and 12b have
#   MORE="--tier fast" ... bash tests/gpu/bench.sh e4b           further flags for every command
#
# Each has its own time limit; a table that was cut by it holds the cells that were done. The first line of a table is
# the one of issue 5: one token a call, 4-bit weights, 64 compared steps. Expected: e4b and 12b 2.5 minutes each with
# the standard set (1 without), the others 40 s to 1 minute, most of it compiling.
set -u
OUT=${OUT:-.}
SUITE=${SUITE:-yes}
MORE=${MORE:-}
python=${PYTHON:-python3}

bench() { # NAME LIMIT FLAGS...: one table
  local name=$1 limit=$2 started=$SECONDS
  shift 2
  # shellcheck disable=SC2086
  timeout "$limit" "$python" -m straightline.runtime bench "$@" --kernels --steps 64 \
    --svg "$OUT/bench_$name.svg" $MORE >"$OUT/bench_$name.txt" 2>&1
  local code=$?
  echo "== $name: exit code $code, $((SECONDS - started)) s"
  tail -n +3 "$OUT/bench_$name.txt"
}

suite() { # the flags of the standard set, if it is wanted
  [ "$SUITE" = no ] || echo --suite --seconds 4
}

[ $# -gt 0 ] || set -- e4b 12b 26b 31b e2b e4b-8bit e4b-mixed
for name in "$@"; do
  # shellcheck disable=SC2046
  case $name in
    e4b) bench e4b 165 --random gemma4-e4b --context 600 $(suite) ;;
    12b) bench 12b 150 --random gemma4-12b --context 1100 $(suite) ;;
    26b) bench 26b 60 --random gemma4-26b --context 1100 --rounds 12 ;;
    31b) bench 31b 60 --random gemma4-31b --context 1100 --rounds 12 ;;
    e2b) bench e2b 40 --random gemma4-e2b --context 600 --rounds 12 ;;
    e4b-8bit) bench e4b-8bit 35 --random gemma4-e4b --bits 8 --context 600 --width 1,4 --seconds 3 ;;
    e4b-mixed) bench e4b-mixed 30 --random gemma4-e4b --bits mixed --context 600 --width 1,4 --seconds 3 ;;
    *) echo "$name: expected some of e4b 12b 26b 31b e2b e4b-8bit e4b-mixed" ;;
  esac
done
