"""A folder that the crash test puts on PYTHONPATH, for its ``sitecustomize``."""
