"""What the figures of a benchmark depend on besides the code."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import psutil

_PACKAGES = ("tensorflow", "keras", "numpy")


def machine_facts() -> dict[str, Any]:
    """Cores that this process may use, system, load average now, versions."""
    return {
        "cores": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": list(psutil.getloadavg()),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in _PACKAGES},
    }
