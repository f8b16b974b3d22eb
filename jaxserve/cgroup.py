"""What the machine and the container allow this process: CPU cores and memory, from cgroup v2 or v1. Knows no JAX.

A limit may stand at any level above the process, so all of them are read. Next: `runner.device` (threads), `runner.memory` and
`serve.supervisor` (front ends, shares of engines).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

MOUNT = "sys/fs/cgroup"


def usable_cores() -> int:
    """CPU cores that this process may run on, or its container's quota where that is less: as many threads are worth starting."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time the process may use, such as 2.5; None where nothing limits it."""
    quotas = []
    for directory in _directories(root, "cpu"):
        period: str | None
        if text := _read(directory / "cpu.max"):
            quota, period = text.split()
        else:
            quota, period = _read(directory / "cpu.cfs_quota_us") or "-1", _read(directory / "cpu.cfs_period_us")
        if quota not in ("max", "-1") and period:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def free_memory() -> int:
    """Bytes that this process may still take: what the machine has available, or less where its container has a limit."""
    available: int = psutil.virtual_memory().available
    headroom = memory_headroom()
    return available if headroom is None else min(available, headroom)


def memory_headroom(root: Path = Path("/")) -> int | None:
    """Bytes the process may still take before its container's limit; None where there is no limit.

    Page cache that the kernel would drop first does not count as taken.
    """
    rooms = []
    for directory in _directories(root, "memory"):
        v2 = (directory / "memory.max").exists()
        limit = _read(directory / ("memory.max" if v2 else "memory.limit_in_bytes"))
        used = _read(directory / ("memory.current" if v2 else "memory.usage_in_bytes"))
        # "No limit" is "max" in v2 and about 2^63 in v1.
        if limit and used and limit != "max" and int(limit) < 2**60:
            stats = dict(line.split() for line in (_read(directory / "memory.stat") or "").splitlines())
            rooms.append(int(limit) - int(used) + int(stats.get("inactive_file" if v2 else "total_inactive_file", 0)))
    return max(0, min(rooms)) if rooms else None


def _directories(root: Path, controller: str) -> Iterator[Path]:
    """The process's own cgroup directory and all above it, in each hierarchy that may hold the controller."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / MOUNT / controllers
        if controllers and not mount.exists():
            mount = root / MOUNT / controller
        # In a container the path often belongs to the host and is not there; the mount is then the process's own group.
        directory = mount / path.lstrip("/")
        while directory != mount:
            if directory.is_dir():
                yield directory
            directory = directory.parent
        yield mount


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
