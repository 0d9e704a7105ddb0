"""A base image like python:3.11-slim, from this machine's own files: nothing has to be pulled.

The interpreter of this environment in /usr/local, a shell, the few commands that the Dockerfiles
run, and the libraries that these and the wheels from PyPI need.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

_COMMANDS = (
    *("sh", "env", "cat", "chmod", "chown", "cp", "find", "grep", "id", "install", "ln", "ls"),
    *("mkdir", "mv", "rm", "sed", "sleep", "touch", "useradd"),
)
#: Of the interpreter's library: what no image of Python brings, or what is not Python's own.
_LEFT_OUT = re.compile(r"/(site-packages|test|tests|idlelib|config-[^/]*|__pycache__)$")
#: Wheels take these from the system.
_OF_WHEELS = ("libstdc++.so.6", "libgcc_s.so.1", "librt.so.1", "libpthread.so.0", "libdl.so.2")
_FOLDERS = ("dev", "etc", "home", "opt", "proc", "root", "sys", "usr/sbin", "var", "run")
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "etc/shadow": "root:*:19000:0:99999:7:::\n",
    "etc/gshadow": "root:*::\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
    "etc/hosts": "127.0.0.1 localhost\n",
}


def why_not() -> str | None:
    """What keeps the base from being made here; None if nothing does."""
    missing = [name for name in (*_COMMANDS, "ldd", "ldconfig") if shutil.which(name) is None]
    return f"no {', '.join(missing)} to put into a base image" if missing else None


def write(target: Path, *, index: str) -> None:
    """The file system of the image as a tar file. pip asks ``index``, and nothing else."""
    texts = {**_FILES, "etc/pip.conf": f"[global]\nindex-url = {index}\n"}
    with tarfile.open(target, "w") as tar:
        for name in _FOLDERS:
            tar.addfile(_entry(name, tarfile.DIRTYPE, mode=0o755))
        tar.addfile(_entry("tmp", tarfile.DIRTYPE, mode=0o1777))
        for name, leads_to in _LINKS.items():
            tar.addfile(_entry(name, tarfile.SYMTYPE, leads_to=leads_to))
        for name, text in texts.items():
            content = text.encode()
            tar.addfile(_entry(name, tarfile.REGTYPE, size=len(content)), io.BytesIO(content))
        for name, path in sorted(_contents().items()):
            tar.add(path, name, recursive=False, filter=_of_root)


def _contents() -> dict[str, Path]:
    """Where in the image, and which file of this machine."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = Path(sys.base_prefix)
    interpreter = (prefix / "bin" / version).resolve()
    found = {f"usr/bin/{name}": _program(name) for name in _COMMANDS}
    for name in ("python3", version):
        found[f"usr/local/bin/{name}"] = interpreter
    library = list(_tree(prefix / "lib" / version))
    found |= {f"usr/local/{path.relative_to(prefix)}": path for path in library}
    for path in _needed(found.values()) | _of_wheels():
        is_ours = path.is_relative_to(prefix)  # found there through a path in the interpreter
        found[f"usr/lib/{path.name}" if is_ours else _merged(path)] = path.resolve()
    return found


def _tree(folder: Path) -> Iterator[Path]:
    """The files below it that an image needs."""
    for path in folder.iterdir():
        if _LEFT_OUT.search(str(path)):
            continue
        if path.is_dir():
            yield from _tree(path)
        else:
            yield path


def _program(name: str) -> Path:
    found = shutil.which(name)
    assert found is not None
    return Path(found).resolve()


def _needed(files: Iterable[Path]) -> set[Path]:
    """The shared libraries of all of these, with what those need."""
    binaries = {path for path in files if path.suffix != ".py" and _is_elf(path)}
    done = subprocess.run(["ldd", *sorted(binaries)], capture_output=True, text=True, check=False)
    return {Path(path) for path in re.findall(r"(/\S+) \(0x", done.stdout)}


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _of_wheels() -> set[Path]:
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    found = (re.search(rf"{re.escape(name)} \(.*x86-64.*=> (\S+)", listed) for name in _OF_WHEELS)
    return {Path(match[1]) for match in found if match is not None}


def _merged(path: Path) -> str:
    """``/lib`` is a link to ``usr/lib`` in the image, whatever it is here."""
    return str(path).lstrip("/") if path.is_relative_to("/usr") else f"usr{path}"


def _entry(
    name: str, kind: bytes, *, mode: int = 0o644, size: int = 0, leads_to: str = ""
) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.size, entry.linkname = kind, mode, size, leads_to
    return entry


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Readable for all, and root's."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode = 0o755 if entry.mode & 0o100 else 0o644
    return entry
