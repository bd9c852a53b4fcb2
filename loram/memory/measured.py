"""Peak memory of a stretch of work, as the operating system and CUDA saw it."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

import torch

_CLEAR = Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Starts a new peak; where the system cannot (not Linux), the process's peak goes on counting."""
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


def available_memory() -> int:
    """Bytes of host memory that a process could still take: what the system has free, within a container's limit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
        return free if limit == "max" else max(0, min(free, int(limit) - int(used)))
    except (OSError, ValueError):
        return free


def _resident_peak() -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
