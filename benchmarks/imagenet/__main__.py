"""``python -m benchmarks.imagenet``."""

from benchmarks.imagenet.train import main

if __name__ == "__main__":
    main()
