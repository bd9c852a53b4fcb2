"""Peak memory of a stretch of work, as the operating system and CUDA saw it."""

from __future__ import annotations

import contextlib
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


def _resident_peak() -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
