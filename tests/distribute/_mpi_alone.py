"""For scripts of ranks: the modules of transport "mpi" without TensorFlow, and a file a rank."""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def without_tensorflow() -> None:
    """Lets `tf_largebatch.distribute._mpi*` be imported without their package's `__init__`.

    That imports TensorFlow, in seconds of processor time a rank; what moves bytes does not.
    """
    package = types.ModuleType("tf_largebatch.distribute")
    package.__path__ = [str(ROOT / "tf_largebatch" / "distribute")]
    sys.modules[package.__name__] = package


def save(folder: str, rank: int, results: Any) -> None:
    assert "tensorflow" not in sys.modules, "what moves bytes needs no TensorFlow"
    (Path(folder) / f"{rank:02d}.pickle").write_bytes(pickle.dumps(results))


def saved(folder: Path) -> list[Any]:
    """What the ranks saved, in their order."""
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("*.pickle"))]
