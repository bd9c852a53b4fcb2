"""Peak memory of a stretch of work, and what is free before it, as the operating system and CUDA see it."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from pathlib import Path

import torch

_CLEAR = Path("/proc/self/clear_refs")
# (limit, used, the name of droppable page cache in memory.stat) of a container, cgroups version 2 and 1. Version 1
# writes a limit near 2^63 for none.
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"), "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        "total_inactive_file",
    ),
)


def reset_peak() -> None:
    """Starts a new peak; where the system cannot (not Linux), the process's peak goes on counting.

    What an earlier stage freed goes back to the system first (glibc keeps it), so that it is not in the new one.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")  # resets VmHWM, proc(5)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> dict[str, int]:
    """`host_peak_bytes` (resident set) and, with a GPU, `device_peak_bytes`."""
    peaks = {"host_peak_bytes": _resident_peak()}
    if torch.cuda.is_available():
        peaks["device_peak_bytes"] = int(torch.cuda.max_memory_allocated())
    return peaks


def _resident_peak() -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory() -> int | None:
    """Bytes that a training step can take: of the GPU where there is one, else of the host; None if unknown.

    What torch's allocator holds and does not use counts as free.
    """
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    return available_memory()


def available_memory() -> int | None:
    """Bytes of host memory that a process could still take, within a container's limit; None if unknown."""
    known = [free for free in (_host_available(), _cgroup_available()) if free is not None]
    return min(known, default=None)


def _host_available() -> int | None:
    """MemAvailable, proc(5)."""
    kilobytes = _fields(Path("/proc/meminfo")).get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _cgroup_available() -> int | None:
    """What the container's limit leaves, page cache that can be dropped counted as free; None without a limit."""
    for limit, used, cache in _CGROUPS:
        try:
            most, now = int(limit.read_text(encoding="ascii")), int(used.read_text(encoding="ascii"))
        except (OSError, ValueError):  # not this version of cgroups, or the limit is "max"
            continue
        return max(0, most - now + _fields(used.with_name("memory.stat")).get(cache, 0))
    return None


def _fields(path: Path) -> dict[str, int]:
    """Lines of `name number`."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}
