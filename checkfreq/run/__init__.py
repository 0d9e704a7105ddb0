"""What drives a run: the pipeline behind a boundary, stop signals, and checks of arguments."""
