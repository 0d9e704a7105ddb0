#!/bin/bash
# What a spot machine or a container runs when it starts, until training is done or the machine goes.
#
#   benchmarks/spot/entrypoint.sh python train.py
#
# Status 0: done. 75: told to stop, and the last checkpoint is durable; the next machine runs the same
# line and continues. Any other: training crashed more than MAX_CRASHES times.
stopping=no
pass_on() {
  stopping=yes
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap pass_on TERM INT

crashes=0
while :; do
  "$@" &
  child=$!
  [ "$stopping" = no ] || kill -TERM "$child" # told to stop while it was started
  wait "$child"
  status=$?
  while kill -0 "$child" 2>/dev/null; do # the wait above was ended by the signal, not by the end
    wait "$child"
    status=$?
  done
  case $status in 0|75) exit "$status" ;; esac
  crashes=$((crashes + 1))
  [ "$stopping" = no ] && [ "$crashes" -le "${MAX_CRASHES:-3}" ] || exit "$status"
  echo "training ended with status $status: starting it again from its last checkpoint" >&2
  sleep "${PAUSE_S:-10}" & # a signal ends a wait, not a sleep
  child=$!
  wait "$child"
  [ "$stopping" = no ] || exit "$status"
done
