"""The states of a run: which are kept, which is loaded, and what a killed process leaves."""

from __future__ import annotations

import errno
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import run_python
from tf_largebatch.core import state_directory
from tf_largebatch.core.atomic_file import replacing
from tf_largebatch.core.errors import ConfigurationError, DataError, StateWriteError
from tf_largebatch.core.state_directory import StateDirectory
from tf_largebatch.core.state_file import load_state_file


def save(states: StateDirectory, *updates: int) -> None:
    for update in updates:
        states.save(update, {"update": update}, [np.full(3, update)])


def names_in(folder: Path) -> list[int | str]:
    """The numbers of states, upwards, and then other names."""
    names = os.listdir(folder)
    numbers = [int(name[6:-4]) for name in names if name.startswith("state_")]
    return [*sorted(numbers), *sorted(name for name in names if not name.startswith("state_"))]


def loaded_update(folder: Path) -> int:
    loaded = StateDirectory(folder).load_newest()
    assert loaded is not None and loaded.contents == {"update": loaded.update}
    np.testing.assert_array_equal(loaded.arrays, [[loaded.update] * 3])
    return loaded.update


def damage(folder: Path, update: int) -> Path:
    path = folder / f"state_{update:012d}.tlb"
    os.truncate(path, path.stat().st_size - 1)
    return path


def test_a_state_comes_back_from_a_folder_that_was_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "states"
    states = StateDirectory(folder)
    assert states.load_newest() is None and not folder.exists()
    path = states.save(7, {"update": 7}, [np.full(3, 7)])
    assert path == folder / "state_000000000007.tlb"
    loaded = StateDirectory(str(folder)).load_newest()
    assert loaded is not None
    assert (loaded.path, loaded.update, loaded.contents) == (path, 7, {"update": 7})
    assert loaded.digest == load_state_file(path).digest
    np.testing.assert_array_equal(loaded.arrays, [[7, 7, 7]])


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept_by_number(tmp_path: Path, keep: int) -> None:
    updates = [0, 9, 10, 11, 100, 10**12 - 1, 10**12, 10**18]
    states = StateDirectory(tmp_path, keep=keep)
    for count, update in enumerate(updates, start=1):
        save(states, update)
        assert names_in(tmp_path) == updates[:count][-keep:]
        assert loaded_update(tmp_path) == update
    save(StateDirectory(tmp_path, keep=1), 10**18)  # the same again
    assert names_in(tmp_path) == [10**18]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    others = ["state_1.tlb", "state_0000000000001.tlb", "state_000000000001.tlb.bak", "x.tmp"]
    others += [".state_1.tlb.1-00000000.tmp", ".other.1-00000000.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    states = StateDirectory(tmp_path, keep=1)
    save(states, 5, 6)
    assert loaded_update(tmp_path) == 6
    assert set(os.listdir(tmp_path)) == {*others, "state_000000000006.tlb"}


def test_two_folders_know_nothing_of_each_other(tmp_path: Path) -> None:
    first, second = StateDirectory(tmp_path / "a", keep=1), StateDirectory(tmp_path / "b", keep=1)
    save(first, 10)
    save(second, 3)
    save(first, 11)
    assert (names_in(tmp_path / "a"), names_in(tmp_path / "b")) == ([11], [3])


def test_a_damaged_state_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    save(StateDirectory(tmp_path, keep=3), 1, 2, 3)
    paths = [damage(tmp_path, update) for update in (2, 3)]
    states = StateDirectory(tmp_path, keep=3)
    with pytest.warns(UserWarning) as warned:
        loaded = states.load_newest()
    assert loaded is not None and loaded.update == 1
    texts = [str(warning.message) for warning in warned]
    assert [repr(str(path)) in text for path, text in zip(reversed(paths), texts, strict=True)]
    assert all("state_000000000001.tlb is loaded" in text and "bytes" in text for text in texts)
    assert warned[0].filename == __file__
    assert names_in(tmp_path) == [1, 2, 3]  # loading removes nothing
    save(states, 2)  # what was passed over counts neither as later nor as kept
    assert names_in(tmp_path) == [1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loaded_update(tmp_path) == 2


def test_without_a_state_that_can_be_read_all_are_listed(tmp_path: Path) -> None:
    save(StateDirectory(tmp_path), 1, 2)
    paths = [damage(tmp_path, update) for update in (1, 2)]
    with pytest.raises(DataError, match="None of the 2 states in") as raised:
        StateDirectory(tmp_path).load_newest()
    assert all(repr(str(path)) in str(raised.value) for path in paths)
    assert names_in(tmp_path) == [1, 2]


def test_an_earlier_update_than_what_is_there_is_refused(tmp_path: Path) -> None:
    save(StateDirectory(tmp_path), 10)
    path = damage(tmp_path, 10)
    states = StateDirectory(tmp_path)
    with pytest.raises(ConfigurationError, match=r"state of update 10, which is later than.* 9"):
        save(states, 9)
    assert path.exists() and names_in(tmp_path) == [10]


def test_a_state_saved_while_another_process_reads_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = StateDirectory(tmp_path, keep=1)
    save(writer, 1)

    def load_late(path: Path) -> Any:
        if path.name == "state_000000000001.tlb":
            save(writer, 2)  # which removes what is about to be read
        return load_state_file(path)

    monkeypatch.setattr(state_directory, "load_state_file", load_late)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loaded_update(tmp_path) == 2


def test_a_failed_save_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = StateDirectory(tmp_path, keep=1)
    save(states, 1)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(StateWriteError, match=r"state_000000000002\.tlb': No space left"):
            save(states, 2)
    assert names_in(tmp_path) == [1]
    assert loaded_update(tmp_path) == 1


def test_what_somebody_still_writes_is_left_alone(tmp_path: Path) -> None:
    # Of this very process, as in a container, where the next run has the same number.
    dead = tmp_path / f".state_000000000003.tlb.{os.getpid()}-00000000.tmp"
    dead.write_bytes(b"half")
    with replacing(tmp_path / "state_000000000004.tlb", num_bytes=1) as file:
        save(StateDirectory(tmp_path), 3)
        assert not dead.exists()
        assert os.path.basename(file.name) in os.listdir(tmp_path)
    assert names_in(tmp_path) == [3, 4]


def test_what_cannot_be_removed_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "state_000000000001.tlb").mkdir()
    with pytest.warns(UserWarning, match="000001.tlb' cannot be removed: Is a directory") as warned:
        StateDirectory(tmp_path, keep=1).save(2, {"update": 2}, [np.full(3, 2)])
    assert warned[0].filename == __file__
    assert loaded_update(tmp_path) == 2


@pytest.mark.parametrize("path", [3, None, "", b"states", ["states"], "a\0b", "\ud800"])
def test_a_path_of_another_kind_is_refused(path: Any) -> None:
    with pytest.raises(ConfigurationError, match="path must be that of a folder, but is"):
        StateDirectory(path)


@pytest.mark.parametrize("keep", [0, -1, 1.0, True, None])
def test_another_keep_is_refused(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ConfigurationError, match="keep must be"):
        StateDirectory(tmp_path, keep=keep)


@pytest.mark.parametrize("update", [-1, 1.5, "1", 10**18 + 1])
def test_another_update_is_refused(tmp_path: Path, update: Any) -> None:
    with pytest.raises(ConfigurationError, match="update must be"):
        StateDirectory(tmp_path / "states").save(update, {}, [])
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file' is a file"):
        StateDirectory(tmp_path / "file")
    below = StateDirectory(tmp_path / "file" / "states")
    with pytest.raises(StateWriteError, match="Not a directory"):
        save(below, 1)
    with pytest.raises(DataError, match="states' cannot be read: Not a directory"):
        below.load_newest()


def test_a_folder_that_may_not_be_used_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:  # root may do anything
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    states = StateDirectory(tmp_path)
    save(states, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refuse)
        with pytest.raises(DataError, match="cannot be read: Permission denied"):
            states.load_newest()
        with pytest.raises(StateWriteError, match="Permission denied") as raised:
            save(states, 2)
    assert raised.value.errno == errno.EACCES


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("killed")
    return json.loads(run_python("-m", "tests.core._killed_saves_script", str(folder)))


ONE, TWO, THREE = (f"state_{update:012d}.tlb" for update in (1, 2, 3))


def test_killed_at_any_byte_the_last_state_is_there(killed: dict[str, Any]) -> None:
    for kill in killed["at_bytes"]:
        assert kill["signal"] == signal.SIGXFSZ
        assert (kill["loaded"], kill["states"][-1]) == (1, ONE)
        # Of this kill alone: the save of the next process removes what the last one left.
        assert kill["leftovers"] == [kill["position"]]
    assert killed["after_a_save"]["states"] == [ONE, TWO]
    assert killed["after_a_save"]["leftovers"] == []


def test_killed_around_any_call_there_is_the_old_or_the_new(killed: dict[str, Any]) -> None:
    kills = killed["around_calls"]
    assert {kill["signal"] for kill in kills} == {signal.SIGKILL}
    assert [kill["loaded"] for kill in kills] == [2, 2, 3, 3, 3, 3, 3]
    assert [len(kill["leftovers"]) for kill in kills] == [1, 1, 0, 0, 0, 0, 0]
    assert kills[5]["states"] == [ONE, TWO, THREE]  # about to remove the first
    assert kills[6]["states"] == [TWO, THREE]


def test_killed_at_any_moment_the_last_state_is_there(killed: dict[str, Any]) -> None:
    last = 3
    for update, kill in enumerate(killed["at_moments"], start=4):
        assert kill["signal"] in (0, signal.SIGKILL)
        assert kill["loaded"] in (last, update)
        if kill["signal"] == 0:
            assert kill["loaded"] == update
        last = kill["loaded"]
    assert killed["at_last"]["loaded"] == 100
    assert len(killed["at_last"]["states"]) == 2 and killed["at_last"]["leftovers"] == []
