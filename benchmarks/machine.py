"""What a measurement depends on besides the code: machine, versions, load."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def describe(packages: Sequence[str]) -> dict[str, str]:
    """Processor, cores, system and the versions of some packages."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def load() -> str:
    """How many processes wanted a core, over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
