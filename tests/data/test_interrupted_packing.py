"""Packing that is killed, or finds the disk full, and what the next run makes of it.

That needs processes of their own: to be killed, or to have a limit. One imports TensorFlow; before
it runs any op, it forks one for each.
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data._packing import WRITERS, NamedSource, both_formats, contents, random_bytes
from tests.processes import run_python
from tf_largebatch.core.errors import DataError

IN_FORKS = """
import sys
from pathlib import Path
from tests.data.test_interrupted_packing import kill_while_packing, pack_on_full_disks
kill_while_packing(Path(sys.argv[1]) / "killed")
pack_on_full_disks(Path(sys.argv[1]) / "full")
"""
KILL_AT_BYTES = (1, 400_000, 2_500_000)
LIMITS_BYTES = (100, 1_000, 400_000)  # below the manifest, in a first record, in a shard


def forked(action: Callable[[], None], *, num_cores: int) -> int:
    child = os.fork()
    if child == 0:
        # As many shards are written at once, whatever the machine has.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_cores])
        try:
            action()
        finally:
            os._exit(0)
    return child


def interrupted_source() -> NamedSource:
    return NamedSource(random_bytes(200, size=30_000), [i % 2 for i in range(200)], seconds=0.01)


def pack_interrupted_source(folder: Path, record_format: str) -> Any:
    return WRITERS[record_format](interrupted_source(), folder, num_shards=9, check_images=False)


def size_bytes(folder: Path) -> int:
    total = 0
    for entry in os.scandir(folder) if folder.exists() else ():
        try:
            total += entry.stat().st_size
        except FileNotFoundError:  # renamed meanwhile
            continue
    return total


def kill_while_packing(folder: Path) -> None:
    """Kills a packer at each point, counted in bytes; each goes on where the last was killed."""
    for record_format in WRITERS:
        target = folder / record_format
        for point, at_bytes in enumerate(KILL_AT_BYTES):
            child = forked(
                functools.partial(pack_interrupted_source, target, record_format), num_cores=2
            )
            deadline = time.monotonic() + 20
            while size_bytes(target) < at_bytes and time.monotonic() < deadline:
                time.sleep(0.001)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "the packer had ended before it was killed"
            shutil.copytree(target, f"{target}_{point}")


def pack_on_full_disks(folder: Path) -> None:
    for record_format in WRITERS:
        for limit_bytes in LIMITS_BYTES:
            target = folder / f"{record_format}_{limit_bytes}"
            pack = functools.partial(pack_with_limit, target, record_format, limit_bytes)
            os.waitpid(forked(pack, num_cores=1), 0)


def pack_with_limit(target: Path, record_format: str, limit_bytes: int) -> None:
    """No file can grow beyond the limit, which fails as a full disk does."""
    source = interrupted_source()
    source._images[:100] = b"small"  # the first four shards are below the larger limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        WRITERS[record_format](source, target, num_shards=8, check_images=False)
    except DataError as error:
        print(f"{target.name}: {error}", flush=True)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder that all that leaves behind, and what was printed."""
    folder = tmp_path_factory.mktemp("interrupted")
    printed = run_python("-c", IN_FORKS, str(folder))
    return folder, printed.splitlines()


@both_formats
def test_after_sigkill_the_same_call_goes_on(
    tmp_path: Path, interrupted: tuple[Path, list[str]], record_format: str
) -> None:
    pack_interrupted_source(tmp_path, record_format)
    expected = contents(tmp_path)
    num_partial, kept = 0, []
    for point in range(len(KILL_AT_BYTES)):
        folder = interrupted[0] / "killed" / f"{record_format}_{point}"
        found = contents(folder)
        whole = {name: data for name, data in found.items() if not name.startswith(".")}
        assert whole.items() <= expected.items()
        num_partial += len([name for name in found if name.endswith(".partial")])
        kept.append(len([name for name in whole if name != "data.json"]))
        assert pack_interrupted_source(folder, record_format).num_kept == kept[-1]
        assert contents(folder) == expected
    assert num_partial > 0 and kept == sorted(kept) and 0 < kept[-1] < 9  # kills in the middle


@both_formats
def test_a_full_disk(
    tmp_path: Path, interrupted: tuple[Path, list[str]], record_format: str
) -> None:
    folder, printed = interrupted
    for limit_bytes, num_whole in zip(LIMITS_BYTES, (0, None, 4), strict=True):
        target = folder / "full" / f"{record_format}_{limit_bytes}"
        (line,) = [line for line in printed if line.startswith(f"{target.name}: ")]
        assert " cannot be written: " in line and "File too large" in line
        names = {name for name in os.listdir(target) if name != "data.json"}
        assert (limit_bytes == 100) == ("data.json cannot be written" in line)
        if num_whole is not None:
            assert names == {f"data-{s:05d}-of-00008.{record_format}" for s in range(num_whole)}
