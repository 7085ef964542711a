#!/usr/bin/env bash
# Runs jobs of jobs.txt on a lent GPU machine, one at a time, and brings home what they print, whatever happens:
#
#   . /tmp/gpu/unpack.sh; bash tests/gpu/session.sh --commit HASH full_size optiq
#
# session.py beside this file says what it does; without a job it lists them.
. "$(dirname "${BASH_SOURCE[0]}")/path.sh"
cd "$straightline_root" || exit 2
export RESULTS=${RESULTS:-/tmp/straightline-results}
export STRAIGHTLINE_SESSION="$RESULTS $$" # by which the next session finds what this one may leave
exec "${PYTHON:-python3}" tests/gpu/session.py "$@"
