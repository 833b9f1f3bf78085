"""The door to mpi4py: who is one of several ranks, and which MPI is refused, each with a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi_processes import ROOT, run_ranks, why_not, without_launcher
from tests.processes import run_python
from tf_largebatch.distribute._mpi import launched_ranks

needs_mpi = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
FOLDER = Path(__file__).parent
LOADS = """
import sys
sys.path.insert(0, sys.argv[1])
from _mpi_alone import without_tensorflow
without_tensorflow()
from tf_largebatch.distribute._mpi import load_mpi
try:
    mpi = load_mpi(timeout_seconds=20.0)
except Exception as error:
    print(type(error).__name__, *(each.__name__ for each in type(error).__mro__))
    print(error)
else:
    is_multiple = mpi.Query_thread() == mpi.THREAD_MULTIPLE
    # In one piece, as ranks share the output.
    print(f"LOADED {mpi.COMM_WORLD.size} {is_multiple}\\n", end="")
    import mpi4py
    print("FINALIZES", mpi4py.rc.finalize)
    mpi.Finalize()
"""


def load(*, before: str = "", **environment: str) -> list[str]:
    """What a Python that was started without a launcher prints of it, in lines."""
    done = subprocess.run(
        [sys.executable, "-c", before + LOADS, str(FOLDER)],
        cwd=ROOT,
        env={**without_launcher(dict(PATH="/usr/bin:/bin")), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_moves_bytes_imports_neither_tensorflow_nor_mpi() -> None:
    """MPI starts where it is imported; ranks without TensorFlow are there in a moment."""
    names = ("_mpi", "_mpi_cluster", "_mpi_engine", "_mpi_transfers", "_packed_blocks")
    imports = "\n".join(f"import tf_largebatch.distribute.{name}" for name in names)
    script = f"""
import sys
sys.path.insert(0, sys.argv[1])
from _mpi_alone import without_tensorflow
without_tensorflow()
{imports}
print(sorted({{"tensorflow", "keras", "mpi4py"}} & set(sys.modules)))
"""
    assert run_python("-c", script, str(FOLDER)) == "[]\n"


# --- Who was started with others


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, ("mpiexec", 4, 3)),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            ("Open MPI's mpirun", 2, 1),
        ),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, ("srun", 8, 5)),
        # An allocation, in which nothing was started by srun.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        # A launcher within a step of srun: the inner one counts.
        (
            {
                "PMI_SIZE": "2",
                "PMI_RANK": "1",
                "SLURM_STEP_NUM_TASKS": "1",
                "SLURM_PROCID": "0",
            },
            ("mpiexec", 2, 1),
        ),
        ({"PMI_SIZE": "two", "PMI_RANK": "0"}, None),
        ({"PMI_SIZE": "", "PMI_RANK": ""}, None),
        ({"PMI_SIZE": "-2", "PMI_RANK": "0"}, None),
        ({"PMI_SIZE": "2"}, None),
        # The other way round, mpiexec started one alone by a step that srun has made for it.
        (
            {
                "PMI_SIZE": "1",
                "PMI_RANK": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "0",
            },
            None,
        ),
    ],
)
def test_launchers_are_known_by_their_variables(
    environment: dict[str, str], expected: tuple[str, int, int] | None
) -> None:
    assert launched_ranks(environment) == expected


def test_it_is_this_processs_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("PMI_RANK", "2")
    assert launched_ranks() == ("mpiexec", 3, 2)
    monkeypatch.setenv("PMI_SIZE", "1")
    assert launched_ranks() is None


# --- What is refused


def test_without_mpi4py_the_error_says_what_to_install() -> None:
    hides = """
import sys
class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mpi4py":
            raise ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")
sys.meta_path.insert(0, Hides())
"""
    kinds, text = load(before=hides)
    assert kinds.split()[0] == "UnsupportedVersionError" and "ImportError" in kinds
    assert "No module named 'mpi4py'" in text
    assert "pip install 'tf_largebatch[mpi]'" in text and "pip install mpich" in text


@needs_mpi
def test_without_an_mpi_library_the_error_says_why() -> None:
    kinds, *lines = load(MPI4PY_LIBMPI="/nonexistent.so")
    text = " ".join(lines)
    assert kinds.split()[0] == "UnsupportedVersionError"
    assert "needs an MPI library, which mpi4py cannot load" in text
    assert "/nonexistent.so" in text
    assert "pip install mpich" in text


@needs_mpi
@pytest.mark.parametrize("level", ["serialized", "funneled", "single"])
def test_an_mpi_for_one_thread_at_a_time_is_refused(level: str) -> None:
    kinds, text = load(before=f"import mpi4py; mpi4py.rc.thread_level = {level!r}")
    assert kinds.split()[0] == "ConfigurationError" and "ValueError" in kinds
    assert "needs MPI_THREAD_MULTIPLE" in text
    assert "mpi4py.rc.thread_level" in text and "transport='tensorflow'" in text


@needs_mpi
def test_an_mpi_that_sees_none_of_the_launchers_ranks_is_refused() -> None:
    """As started by the mpiexec of another MPI than the one that mpi4py loads."""
    kinds, text = load(OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="2")
    assert kinds.split()[0] == "TopologyError"
    assert "Open MPI's mpirun started this process as rank 2 of 4" in text
    assert "sees one rank alone" in text and "mpiexec that belongs to this library" in text


@needs_mpi
def test_alone_it_is_loaded_and_left_to_us_to_end() -> None:
    assert load() == ["LOADED 1 True", "FINALIZES False"]


@needs_mpi
@pytest.mark.parametrize(
    "before",
    [
        "from mpi4py import MPI",
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI",
    ],
)
def test_an_mpi_that_the_user_has_loaded_is_taken(before: str) -> None:
    """And ended as he would have it: mpi4py's own default."""
    assert load(before=before) == ["LOADED 1 True", "FINALIZES None"]


@needs_mpi
def test_ranks_of_mpiexec_are_its_ranks() -> None:
    ended = run_ranks("-c", LOADS, str(FOLDER), num_ranks=2, seconds=60.0)
    assert ended.log.count("LOADED 2 True") == 2
