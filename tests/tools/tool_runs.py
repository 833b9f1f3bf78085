"""The programs and modules of tools/, which is no package, for their tests."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """A module of tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def refusal(name: str, flag: str, *, cwd: Path) -> str:
    """What a program of tools/ says of a wrong flag, in an orderly way."""
    done = run_tool(name, flag, cwd=cwd)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


def run_tool(name: str, *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program of tools/ to its end."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{name}.py"), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
