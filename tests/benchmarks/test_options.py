"""The training script takes the original's flags, and refuses in a sentence what it cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkfreq.examples.imagenet import options

Capture = pytest.CaptureFixture[str]
RESUMABLE = ("--checkfreq", "--cf_iterator")


def parse(tmp_path: Path, *flags: str) -> options.argparse.Namespace:
    return options.parse(["--data", str(tmp_path), *flags])


def refusal(tmp_path: Path, capsys: Capture, *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(tmp_path, *flags)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_flags_of_the_original_script_are_taken(tmp_path: Path) -> None:
    args = parse(
        tmp_path,
        *("-a", "resnet18", "-b", "256", "--workers", "3", "--epochs", "2", "--deterministic"),
        *("--noeval", "--barrier", "--checkfreq", "--chk-freq", "0", "--chk_mode_baseline"),
        *("--chk-prefix", "./chk/", "--cf_iterator"),
    )
    assert (args.arch, args.batch_size, args.workers, args.epochs) == ("resnet18", 256, 3, 2)
    assert args.chk_prefix == Path("chk")
    assert args.chk_mode_baseline
    assert args.chk_freq == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((*RESUMABLE, "--chk_mode_baseline"), "--chk_mode_baseline needs --chk-freq"),
        ((*RESUMABLE, "--chk-freq", "5", "--static"), "leave out --chk-freq"),
        ((*RESUMABLE, "--max-overhead", "3.5"), "--max-overhead must be between 0 and 1"),
        ((*RESUMABLE, "--mtbf", "inf"), "--mtbf must be a number of seconds, more than 0"),
        (("--static",), "--max-overhead, --mtbf and --static need --checkfreq"),
        (("--checkfreq", "--chk-freq", "5"), "--checkfreq needs --cf_iterator"),
        (("--chk-freq", "5"), "--chk-freq needs --checkfreq"),
        (("--chk_mode_baseline",), "--chk_mode_baseline says how to checkpoint"),
        (("--steps-to-run", "5"), "--steps-to-run is counted by the resumable iterator"),
        (("--image-size", "16"), "--image-size must be at least 32"),
        (("-a", "inception_v3", "--image-size", "64"), "at least 299 for inception_v3"),
        (("-a", "no_such_net"), "--arch no_such_net is no classifier of torchvision"),
        (("--data", "no/such/folder"), "--data no/such/folder is not a folder"),
    ],
)
def test_unusable_options_are_refused_with_a_sentence(
    flags: tuple[str, ...], sentence: str, tmp_path: Path, capsys: Capture
) -> None:
    assert sentence in refusal(tmp_path, capsys, *flags)
