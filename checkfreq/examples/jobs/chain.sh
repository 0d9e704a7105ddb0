#!/bin/bash
# Where a site forbids requeueing: COUNT jobs at once, each waiting for the end of those before.
#
#   jobs/chain.sh COUNT [OPTION OF SBATCH ...] SCRIPT [ARGUMENT ...]
#   jobs/chain.sh 5 --time=2:00:00 jobs/single.sbatch python train.py
#
# Run it on a login node. A job begins when the one before ended with any status but 0: told to stop,
# out of time, or crashed. When one succeeds, the run is done and the rest leave the queue.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 2; }
count=$1
shift

export REQUEUE=no  # the jobs inherit it, and do not try
after=()           # the first one waits for nobody
for ((i = 0; i < count; i++)); do
  job=$(sbatch --parsable --no-requeue "${after[@]}" "$@")
  job=${job%%;*}  # without the name of the cluster
  echo "$job"
  # All before, not the last alone: that one may have left the queue because the run was done.
  before=${before:-afternotok}:$job
  after=(--dependency="$before" --kill-on-invalid-dep=yes)
done
