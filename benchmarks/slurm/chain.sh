#!/bin/bash
# Where a site forbids requeueing: COUNT jobs at once, each waiting for the end of the one before.
#
#   benchmarks/slurm/chain.sh COUNT [OPTION OF SBATCH ...] SCRIPT [ARGUMENT ...]
#   benchmarks/slurm/chain.sh 5 --time=2:00:00 benchmarks/slurm/single.sbatch python train.py
#
# Run it on a login node. A job begins when the one before ended in any other way than with status 0,
# a time limit or a crash included. When one succeeds, the run is done and the rest leave the queue.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 2; }
count=$1
shift

first=()  # the first job waits for nobody
for ((i = 0; i < count; i++)); do
  job=$(sbatch --parsable --no-requeue --export="ALL,REQUEUE=no" "${first[@]}" "$@")
  echo "$job"
  first=(--dependency="afternotok:${job%%;*}" --kill-on-invalid-dep=yes)
done
