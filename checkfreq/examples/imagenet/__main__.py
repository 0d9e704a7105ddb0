"""``python -m checkfreq.examples.imagenet``."""

try:
    from checkfreq.examples.imagenet.train import main
except ModuleNotFoundError as error:
    raise SystemExit(f'{error}: pip install "checkfreq[examples]"') from error

if __name__ == "__main__":
    main()
