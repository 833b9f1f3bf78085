"""The report of runs: what it reads, and says in tables."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import tf_largebatch as tlb
from tests.tools._report_examples import HISTORY, SUMMARY, make_run
from tests.tools.tool_runs import load, refusal, run_tool

pytestmark = pytest.mark.timeout(120)

histories = load("_report_history")
runs_module = load("_report_runs")
tables = load("_report_tables")
pages = load("_report_page")


def read(*folders: Path) -> list[Any]:
    return runs_module.read_runs(folders)


def read_history(tmp_path: Path, contents: str | bytes) -> Any:
    path = tmp_path / "history.csv"
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    return histories.read_history(path)


# history.csv


def test_what_was_logged_is_read(tmp_path: Path) -> None:
    history = read_history(tmp_path, HISTORY)
    assert history.epochs == [1, 2, 3, 4]
    assert history.notes == ()
    assert list(history.columns) == HISTORY.split("\r\n")[0].split(",")[1:]
    assert history.columns["learning_rate"] == [4.0, 0.4, 0.04000000000000001, 0.004000000000000001]
    assert history.best("val_accuracy") == (0.9570000171661377, 3)  # the first of equals
    assert history.last("val_loss") == 0.18971416354179382


def test_no_history_yet(tmp_path: Path) -> None:
    assert histories.read_history(tmp_path / "history.csv").epochs == []
    for empty in ("", "epoch,loss\r\n"):
        history = read_history(tmp_path, empty)
        assert (history.epochs, history.columns, history.notes) == ([], {}, ())
        assert history.best("loss") is history.last("loss") is None


@pytest.mark.parametrize("kept", range(1, len("2,0.25,0.125\r\n")))
def test_a_line_cut_anywhere_is_passed_over(tmp_path: Path, kept: int) -> None:
    whole = "epoch,accuracy,loss\r\n0,0.5,2.5\r\n1,0.75,1.5\r\n"
    history = read_history(tmp_path, whole + "2,0.25,0.125\r\n"[:kept])
    assert history.epochs == [1, 2]
    assert history.columns == {"accuracy": [0.5, 0.75], "loss": [2.5, 1.5]}
    assert history.notes == ("history.csv, line 4: has no end, passed over.",)


def test_lines_that_are_no_epochs_are_passed_over(tmp_path: Path) -> None:
    lines = ["epoch,loss", "0,2.5", "1,", "2", "x,1.0", "-1,1.0", "3,1.0,9", "\0\0", '"4', "5,0.5"]
    history = read_history(tmp_path, "\n".join(lines) + "\n")
    assert history.epochs == [1, 2, 6]
    assert history.columns == {"loss": [2.5, None, 0.5]}
    assert [re.findall(r"line (\d+)", note) for note in history.notes] == [
        [str(number)] for number in range(4, 10)
    ]


def test_bytes_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    history = read_history(tmp_path, b"epoch,loss\r\n0,2.5\r\n\xff\xfe\x00,1\r\n")
    assert history.columns == {"loss": [2.5]}
    assert len(history.notes) == 1


def test_an_epoch_that_is_logged_again_counts_once(tmp_path: Path) -> None:
    history = read_history(tmp_path, "epoch,loss\n0,3.0\n1,2.0\n1,1.0\n2,0.5\n")
    assert history.epochs == [1, 2, 3]
    assert history.columns == {"loss": [3.0, 1.0, 0.5]}
    assert history.notes == ("history.csv, line 4: epoch 2 again; the later line counts.",)


def test_a_header_in_the_middle_names_what_follows(tmp_path: Path) -> None:
    history = read_history(tmp_path, "epoch,loss,lr\n0,3.0,0.1\nepoch,lr,top5\n4,0.2,0.9\n")
    assert history.epochs == [1, 5]
    assert history.columns == {"loss": [3.0, None], "lr": [0.1, 0.2], "top5": [None, 0.9]}
    assert history.notes == ()


def test_what_is_no_number_is_missing_and_nan_is_not(tmp_path: Path) -> None:
    text = 'epoch,a,b,c\r\n0,NA,nan,"""[1, 2]"""\r\n1,1.0,inf,\r\n2,2.0,-inf,x\r\n'
    history = read_history(tmp_path, text)
    assert list(history.columns) == ["a", "b"]  # c never has a number
    assert history.columns["a"] == [None, 1.0, 2.0]
    np.testing.assert_array_equal(history.columns["b"], [np.nan, np.inf, -np.inf])
    epoch, column, value = history.first_not_finite("a", "b")
    assert (epoch, column) == (1, "b") and math.isnan(value)


# Run directories


def test_no_run_directory_is_one_line(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "good")
    broken = make_run(tmp_path / "broken")
    (broken / "config.json").write_text('{"dataset": "mn')
    listed = make_run(tmp_path / "listed")
    (listed / "config.json").write_text("[1]")
    foreign = make_run(tmp_path / "foreign")
    (foreign / "config.json").write_text('{"lr": 0.1}')
    newer = make_run(tmp_path / "newer")
    config = json.loads((newer / "config.json").read_text())
    config["recipe"]["warmup_shape"] = "cosine"
    (newer / "config.json").write_text(json.dumps(config))
    folder = make_run(tmp_path / "folder", history=None)
    (folder / "history.csv").mkdir()
    for name, complaint in {
        "absent": "is no directory",
        "listed/config.json": "is no directory",
        "runs": f"has no config.json.*Did you mean {tmp_path}/runs/good?",
        "broken": "config.json: is not JSON",
        "listed": "config.json: is not an object",
        "foreign": "has no recipe",
        "newer": "has no field 'warmup_shape'",
        "folder": "history.csv: cannot be read: Is a directory",
    }.items():
        with pytest.raises(tlb.DataError, match=complaint) as raised:
            read(tmp_path / name)
        assert "\n" not in str(raised.value)


def test_a_run_named_twice_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(tlb.ConfigurationError, match="link: is named twice"):
        read(folder, tmp_path / "link")


def test_labels_are_as_short_as_tells_apart(tmp_path: Path) -> None:
    names = ("x/sgd", "x/lars", "y/sgd")
    runs = read(*(make_run(tmp_path / name) for name in names))
    assert [run.label for run in runs] == list(names)
    assert [run.label for run in read(tmp_path / "x/sgd", tmp_path / "x/lars")] == ["sgd", "lars"]
    assert read(tmp_path / "y" / ".." / "x" / "sgd" / "." / ".." / "sgd")[0].label == "sgd"


def test_states(tmp_path: Path) -> None:
    one = "epoch,loss\n0,1.0\n"
    cases = {
        "finished": {},
        "no epoch yet": {"history": None, "summary": None},
        "1 of 4 epochs": {"history": one, "summary": None},
        "finished after 1 epochs": {"history": one},
        "2 of 4 epochs, loss NaN at epoch 2": {"history": one + "1,nan\n", "summary": None},
        "2 of 4 epochs, loss infinite at epoch 2": {"history": one + "1,inf\n", "summary": None},
    }
    for number, (state, files) in enumerate(cases.items()):
        assert read(make_run(tmp_path / str(number), **files))[0].state == state
    for logs, times in {
        "worker_00.log": "",
        "worker_01.restart_1.log": ", started again once",
    }.items():
        folder = tmp_path / "0" / "logs"
        folder.mkdir(exist_ok=True)
        (folder / logs).touch()
        assert read(tmp_path / "0")[0].state == f"finished{times}"
    (tmp_path / "0" / "worker_00.restart_2.log").touch()
    assert read(tmp_path / "0")[0].state == "finished, started again 2 times"


def test_a_broken_summary_is_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "summary.json").write_text("{")
    (run,) = read(folder)
    assert run.state == "4 of 4 epochs"
    assert len(run.notes) == 1 and "summary.json: is not JSON" in run.notes[0]


# Tables


def test_the_line_of_a_run(tmp_path: Path) -> None:
    (run,) = read(make_run(tmp_path / "lars", num_replicas=4, accumulation_steps=2))
    assert tables.overview(run) == {
        "run": "lars",
        "data set": "mnist5k",
        "model": "resnet_small",
        "global batch": "256",
        "replicas": "4",
        "peak rate": "32",
        "warmup": "gradual, 1",
        "epochs": "4",
        "val. accuracy": "95.70%",
        "best": "95.70% (3)",
        "loss": "0.2143",
        "val. loss": "0.1897",
        "images/s": "831",  # the median of 948, 831 and 372
        "updates": "500",
        "state": "finished",
    }


def test_the_line_of_a_run_without_anything(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "new", history=None, summary=None, warmup="none")
    row = tables.overview(read(folder)[0])
    assert row["warmup"] == "none"
    assert row["updates"] == "0"
    for heading in ("val. accuracy", "best", "loss", "val. loss", "images/s"):
        assert row[heading] == "-"
    history = "epoch,loss,val_accuracy\n0,nan,nan\n1,inf,nan\n"
    folder = make_run(tmp_path / "lost", history=history, summary=None)
    row = tables.overview(read(folder)[0])
    assert (row["val. accuracy"], row["best"], row["loss"]) == ("NaN", "-", "inf")
    assert row["updates"] == "250"  # 2 epochs of 4000 / 32


def test_what_differs(tmp_path: Path) -> None:
    finished = {**SUMMARY, "versions": {"tensorflow": "2.20.0"}}
    runs = read(
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", num_replicas=8, decay_epochs=[2.0, 3.0], data_dir=""),
        make_run(tmp_path / "c", summary=finished, epochs=6, optimizer="sgd"),
        make_run(tmp_path / "d", summary=None),
    )
    assert tables.differences(runs) == {
        "epochs": ["4", "4", "6", "4"],
        "decay_epochs": ["default", "[2.0, 3.0]", "default", "default"],
        "optimizer": ["lars", "lars", "sgd", "lars"],
        "data_dir": ["-", '""', "-", "-"],
        "num_replicas": ["1", "8", "1", "1"],
        "versions.tensorflow": ["2.21.0", "2.21.0", "2.20.0", "-"],
    }
    assert tables.differences([runs[0], runs[3]]) == {}  # a run without versions has no others


def printed(runs: Sequence[Any], *, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    tables.print_report(runs, console)
    return console.file.getvalue()


def test_printed_wide_and_narrow(tmp_path: Path) -> None:
    runs = read(make_run(tmp_path / "[red]one"), make_run(tmp_path / "two", num_replicas=2))
    wide, narrow = printed(runs, width=200), printed(runs, width=80)
    (line,) = [line for line in wide.splitlines() if "two" in line and "mnist5k" in line]
    assert re.search(r"two +mnist5k +resnet_small +64 +2 +8 .* finished", line)
    assert max(map(len, narrow.splitlines())) <= 80
    assert re.search(r"^ +peak rate +4 +8 *$", narrow, re.M)
    for text in (wide, narrow):
        assert text.count("[red]one") == 2  # not read as rich's markup
        assert re.search(r"^ +num_replicas +1 +2 *$", text, re.M)


# The program


def test_a_report_of_two_runs(tmp_path: Path) -> None:
    for name, replicas in (("one", 1), ("eight", 8)):
        make_run(tmp_path / "runs" / name, num_replicas=replicas)
    done = run_tool("report_runs", "runs/one", "runs/eight", "--output=x.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(r"eight +mnist5k +resnet_small +256 +8 +32 ", done.stdout)
    assert done.stdout.endswith("\nThe page is x.html.\n")
    assert (tmp_path / "x.html").read_text() == pages.page(
        read(tmp_path / "runs" / "one", tmp_path / "runs" / "eight")
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "x.html"]


def test_wrong_command_lines(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    assert "No run directories given" in refusal("report_runs", "--output=x.html", cwd=tmp_path)
    assert refusal("report_runs", "two", cwd=tmp_path) == (
        "two: is no directory; give run directories of examples/train.py.\n"
    )
    done = run_tool("report_runs", "one", "--output=absent/x.html", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "--output=absent/x.html: No such file or directory.\n"
    done = run_tool("report_runs", "one", "--output=.", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("--output=.: ")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
