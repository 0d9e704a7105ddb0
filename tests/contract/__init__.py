"""The public contract, sentence by sentence, on the real thing.

Each sentence of ARCHITECTURE.md's contract is the name of a test here:

=========================  =====================================================================
test_state                 what CFCheckpoint takes, what it refuses, generators
test_arguments             signatures, defaults, modes, settings
test_weight_update         weight_update, scalers, closures, the fence
test_updating              updating(): writes that no hook sees
test_boundaries            step, end_epoch, global_step, where boundaries are with CFIterator
test_save                  save: marks, wait, slots
test_restore               restore: walking back, older steps, positions, generators
test_load                  checkfreq.load, latest_step, all_steps
test_close                 wait, close, exceptions
test_stop                  signals, TrainingStopped, on_stop, forked children
test_failures              tolerate_failures, retries, a worker that dies
test_stats_and_events      stats, last_event, events.jsonl, the INFO line
test_iterator_contract     CFIterator's arguments and loops beside a manager
test_iterator_boundaries   what CFManager and CFIterator agree on about boundaries
test_auto                  the interval: chosen, logged, kept, carried on
test_directory             where checkpoints are kept: locks, links, replaced directories
test_finish                finish(): a finished run stays finished
test_forks                 forks of the training process
test_wrappers              optimizers and schedulers wrapped by other libraries
=========================  =====================================================================

Everything runs in this process with a real persist worker. Nothing sleeps and no time is
asserted: where an order matters, a fault script (``checkfreq.faults``) holds one side.
"""
