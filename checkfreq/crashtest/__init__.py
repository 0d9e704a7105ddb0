"""``checkfreq crashtest``: does a training script resume exactly?

Two sides. In the training process, and only if the environment variable `plan.VARIABLE` is set, a
recorder (``recorder``, ``hooks``, ``found``, ``flat``) writes a line at each boundary. Beside it
the crash test (``trial``) starts the script, kills it, starts it again (``life``), reads what was
recorded (``history``), compares (``compare``) and looks for the cause (``causes``).
"""
