"""How much host memory this process may still use, by the machine and by its cgroups.

No torch. Both versions of cgroups are read. A missing limit does not count; one far above the
machine's memory has no effect.
"""

from __future__ import annotations

from pathlib import Path

_V2 = Path("/sys/fs/cgroup")
_V1 = Path("/sys/fs/cgroup/memory")
_MEMINFO = Path("/proc/meminfo")


def available_host_bytes(
    *,
    v2: Path = _V2,
    v1: Path = _V1,
    meminfo: Path = _MEMINFO,
    own: Path = Path("/proc/self/cgroup"),
) -> int | None:
    """Return the bytes of host memory still available to this process; None if unknown.

    That is the smallest of what the machine has available and what each enclosing cgroup leaves.
    Page cache that the kernel would give back does not count as used.
    """
    groups = _own_groups(own)
    candidates = [
        _machine_available(meminfo),
        *(_left(v2 / g, "memory.max", "memory.current") for g in groups),
        *(_left(v1 / g, "memory.limit_in_bytes", "memory.usage_in_bytes") for g in groups),
    ]
    known = [value for value in candidates if value is not None]
    return min(known) if known else None


def _own_groups(own: Path) -> list[str]:
    """Paths of this process's memory cgroup and of its ancestors, relative to the mount."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return [""]
    groups = {""}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            parts = path.strip("/").split("/")
            groups |= {"/".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return sorted(groups)


def _left(group: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (group / limit_name).read_text().strip()
        usage = int((group / usage_name).read_text())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():  # "max"
        return None
    return max(0, int(limit) - usage + _reclaimable(group / "memory.stat"))


def _reclaimable(stat: Path) -> int:
    try:
        rows = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))


def _machine_available(meminfo: Path) -> int | None:
    return _in_meminfo(meminfo, "MemAvailable:")


def _in_meminfo(meminfo: Path, name: str) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def cgroup_limit_bytes(
    *,
    v2: Path = _V2,
    v1: Path = _V1,
    own: Path = Path("/proc/self/cgroup"),
    meminfo: Path = _MEMINFO,
) -> int | None:
    """The smallest limit on memory of the enclosing cgroups, below what the machine has, if any."""
    groups = _own_groups(own)
    files = [*(v2 / g / "memory.max" for g in groups)]
    files += [v1 / g / "memory.limit_in_bytes" for g in groups]
    limits = [limit for file in files if (limit := _limit(file)) is not None]
    total = _in_meminfo(meminfo, "MemTotal:")
    least = min(limits, default=None)
    return None if least is None or (total is not None and least >= total) else least


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
