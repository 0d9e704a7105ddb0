"""``CFManager("s3://bucket/run")``: a directory of this machine that stands for the URL.

Checkpoints are committed there as in any directory, and a mirror copies them to the URL. The
directory is named after the URL, so that a run started again on the same machine finds it.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from checkfreq.config import CFConfig
from checkfreq.errors import ConfigError
from checkfreq.mirror.settings import Mirror, is_url
from checkfreq.store.fileops import user_path

_FOLDED_URL = re.compile(r"[a-z][a-z0-9]{1,5}:/[^/]")


def staged(chk_dir: str | bytes | os.PathLike[str], config: CFConfig) -> tuple[Path, CFConfig]:
    """The directory, in place of a URL one of this machine, and then the mirror on for that URL.

    Raises ConfigError for a mirror at another URL, for an empty path, and if there is no place for
    the directory.
    """
    given = os.fsdecode(chk_dir)
    if not isinstance(chk_dir, str) and _FOLDED_URL.match(given):
        raise ConfigError(
            f"chk_dir={chk_dir!r}: a Path is no URL, since it folds the slashes: pass a "
            "text such as 's3://bucket/run'"
        )
    if not is_url(given):
        return user_path(given), config
    mirror = Mirror.of(config.mirror) or Mirror(given)
    if mirror.url != Mirror(given).url:
        raise ConfigError(
            f"chk_dir={given!r} and CFConfig(mirror={mirror.url!r}): expected the same URL, or a "
            "local directory as chk_dir"
        )
    folder = staging_folder(config.staging_dir) / xxh3_128_hexdigest(mirror.url.encode())
    return folder, replace(config, mirror=mirror)


def staging_folder(given: str | os.PathLike[str] | None) -> Path:
    """Where the directories of URLs are: ``given``, or the user's cache folder."""
    if given is not None:
        return user_path(given)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
    except RuntimeError as error:
        raise ConfigError(
            f"no folder for local copies ({error}): set CFConfig(staging_dir=...), or HOME"
        ) from None
    return home / "checkfreq" / "staging"
