#!/usr/bin/env bash
# The tables of decoding beside mlx-lm: $OUT/bench_NAME.txt, .svg (and .err). Random weights, no download.
#
#   . tests/gpu/path.sh; bash tests/gpu/bench.sh                    all of them, in at most 9 minutes ($LIMIT seconds)
#   . tests/gpu/path.sh; bash tests/gpu/bench.sh e4b 31b            these only
#   MORE="--tier fast" LIMIT=200 bash tests/gpu/bench.sh e4b        with further flags, in 200 seconds
#
# e4b, 12b, 26b, 31b, e2b: 64 compared steps, then one token a call and the loop, at context 600 (E sizes) or 1100, 4-bit
# weights. e4b-suite, 12b-suite, 26b-suite: the standard set. e4b-8bit, e4b-mixed: other weights, widths 1 and 4.
# e4b-prompts, 12b-blocks: parts of the set by themselves. e4b-peaks: memory, kernel after kernel.
#
# Exits with 1 if a table was cut, left out, or has a cell that departs or cannot be run.
# A table that its time limit cut holds the cells that were done. Seen on an H200: 39 s for e4b, 55 s for 12b, and more
# than 105 s for 26b where its kernels had not been compiled before. Expected: 2 to 3 minutes for each standard set.
. "$(dirname "${BASH_SOURCE[0]}")/path.sh"
set -u
OUT=${OUT:-.}
LIMIT=${LIMIT:-530}
MORE=${MORE:-}
python=${PYTHON:-python3}
mkdir -p "$OUT"
worst=0

bench() { # NAME MOST_SECONDS FLAGS...: one table
  local name=$1 most=$2 started=$SECONDS left=$((LIMIT - SECONDS))
  shift 2
  [ "$left" -lt "$most" ] && most=$left
  [ "$most" -lt 20 ] && { echo "== $name: left out, $left s are too few"; worst=1; return; }
  # shellcheck disable=SC2086
  timeout "$most" "$python" -m straightline.runtime bench "$@" --kernels --svg "$OUT/bench_$name.svg" $MORE \
    >"$OUT/bench_$name.txt" 2>"$OUT/bench_$name.err"
  local code=$?
  echo "== $name: exit code $code, $((SECONDS - started)) s"
  tail -n +3 "$OUT/bench_$name.txt"
  [ $code -eq 0 ] && return
  worst=1
  tail -c 2000 "$OUT/bench_$name.err" | tr '\r' '\n' | tail -n 5
}

[ $# -gt 0 ] || set -- e4b 12b 26b e2b 31b e4b-suite 12b-suite 26b-suite e4b-8bit e4b-mixed e4b-peaks
for name in "$@"; do
  case $name in
    e4b) bench e4b 120 --random gemma4-e4b --context 600 --loop --steps 64 ;;
    12b) bench 12b 120 --random gemma4-12b --context 1100 --loop --steps 64 ;;
    26b) bench 26b 180 --random gemma4-26b --context 1100 --loop --steps 64 ;;
    31b) bench 31b 150 --random gemma4-31b --context 1100 --loop --steps 64 ;;
    e2b) bench e2b 120 --random gemma4-e2b --context 600 --loop --steps 64 ;;
    e4b-suite) bench e4b-suite 320 --random gemma4-e4b --suite --seconds 3 ;;
    12b-suite) bench 12b-suite 320 --random gemma4-12b --suite --seconds 3 ;;
    26b-suite) bench 26b-suite 320 --random gemma4-26b --suite --seconds 3 ;;
    e4b-prompts) bench e4b-prompts 100 --random gemma4-e4b --context 512 --width 1,16 --prefill 2048,8192 --steps 16 --seconds 3 ;;
    12b-blocks) bench 12b-blocks 120 --random gemma4-12b --context 512 --width 2,4,8 --batch 1,4 --steps 16 --seconds 3 ;;
    e4b-8bit) bench e4b-8bit 100 --random gemma4-e4b --bits 8 --context 600 --width 1,4 --loop --seconds 4 ;;
    e4b-mixed) bench e4b-mixed 100 --random gemma4-e4b --bits mixed --context 600 --width 1,4 --loop --seconds 4 ;;
    e4b-peaks)
      # One kernel at a time. Else the peak is also a matter of how far the host is ahead of the device.
      CUDA_LAUNCH_BLOCKING=1 MLX_USE_CUDA_GRAPHS=0 MLX_MAX_OPS_PER_BUFFER=1 bench e4b-peaks 140 --random gemma4-e4b \
        --context 512 --batch 1,4,16 --width 1,8 --prefill 2048 --steps 3 --rounds 3 --tokens 3
      ;;
    *) worst=2; echo "$name: expected some of e4b 12b 26b 31b e2b e4b-suite 12b-suite 26b-suite e4b-prompts 12b-blocks e4b-8bit e4b-mixed e4b-peaks" ;;
  esac
done
exit $worst
