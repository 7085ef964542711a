#!/usr/bin/env bash
# Sessions beside each other on a machine of several GPUs: each with a GPU, a folder of results and caches of its own.
#
#   . /tmp/gpu/unpack.sh; bash tests/gpu/lanes.sh "--commit HASH --deadline 540" "verify bench.e4b" "bench.12b bench.26b"
#
# The first argument goes to every session.sh; each further one is the jobs of one GPU, in order. Results: $OUT/0/results.tgz,
# $OUT/1/results.tgz, ... The exit code is the worst of theirs.
lane() { # GPU JOBS
  local gpu=$1 own=/tmp/straightline-lane-$1
  mkdir -p "$own/tmp"
  export CUDA_VISIBLE_DEVICES=$gpu OUT=${OUT:-.}/$gpu RESULTS=$own/results TMPDIR=$own/tmp
  export STRAIGHTLINE_CACHE=$own/cache STRAIGHTLINE_PATH=$own/path MLX_PTX_CACHE_DIR=$own/ptx
  # shellcheck disable=SC2086
  bash "$(dirname "${BASH_SOURCE[0]}")/session.sh" $shared $2 2>&1 | sed -u "s/^/gpu $gpu: /"
  return "${PIPESTATUS[0]}"
}

shared=$1 gpu=0 worst=0
shift
# shellcheck disable=SC2048,SC2086
"${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/session.py" --check $* || exit
lanes=()
for jobs in "$@"; do
  lane $gpu "$jobs" &
  lanes+=($!)
  gpu=$((gpu + 1))
done
for one in "${lanes[@]}"; do
  wait "$one" || worst=$?
done
exit $worst
