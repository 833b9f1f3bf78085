"""Packs a folder of images, one folder a class, into sharded files of records.

    python tools/pack_images.py --input=imagenet/train --output=packed --name=train
    python tools/pack_images.py --input=imagenet/val --output=packed --name=val \
        --class_names=classes.txt --format=array_record

Writes NAME-00003-of-00064.tfrecord (or .array_record) and NAME.json into the output folder;
`tlb.data.write_tfrecords` tells what is in them. Every image is decoded once, so that broken files
are known now; all of them are listed at the end, and with --nocheck_images none is looked at. After
an interruption the same command goes on where it was.

Progress goes to standard error, the last line, a summary, to standard output. Exit code: 0 when all
is written; 1 when images or files cannot be read or written; 2 for a wrong command line; 130 after
Ctrl-C.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from _command_line import exit_for_usage, parse_flags, prepare_environment
from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import tf_largebatch as tlb

_INPUT = flags.DEFINE_string("input", None, "Folder with a folder of images for each class.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the packed files, made if need be.")
_FORMAT = flags.DEFINE_enum("format", "tfrecord", ["tfrecord", "array_record"], "Of the files.")
_NAME = flags.DEFINE_string("name", "data", "Start of the names of the files.")
_NUM_SHARDS = flags.DEFINE_integer(
    "num_shards", None, "How many files; default: as many as make each about 128 MiB."
)
_CLASS_NAMES = flags.DEFINE_string(
    "class_names",
    None,
    "Text file with one class folder a line, in the order of the labels; default: sorted.",
)
_CHECK_IMAGES = flags.DEFINE_bool("check_images", True, "Decode every image, to find broken ones.")
flags.mark_flags_as_required(["input", "output"])

_FAILED, _INTERRUPTED = 1, 130
_LINE_SECONDS = 30.0  # between lines of progress where standard error is no terminal


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, else a line now and then."""
    if not console.is_terminal:
        yield _LineProgress(console)
        return
    columns = (TextColumn("packing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("packing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _LineProgress:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_at = time.monotonic() + _LINE_SECONDS

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at += _LINE_SECONDS
            self._console.print(f"{done:,} of {total:,} images packed")


def _class_names() -> tuple[str, ...] | None:
    if _CLASS_NAMES.value is None:
        return None
    try:
        lines = Path(_CLASS_NAMES.value).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        exit_for_usage(f"--class_names={_CLASS_NAMES.value} cannot be read: {error}")
    return tuple(line.strip() for line in lines if line.strip())


def _pack(console: Console) -> None:
    started_at = time.monotonic()
    class_names = _class_names()
    source = tlb.data.ImageFolderSource(_INPUT.value, class_names=class_names)
    array_record = _FORMAT.value == "array_record"
    write = tlb.data.write_array_records if array_record else tlb.data.write_tfrecords
    with _progress(console) as progress:
        packed = write(
            source,
            _OUTPUT.value,
            name=_NAME.value,
            num_shards=_NUM_SHARDS.value,
            check_images=_CHECK_IMAGES.value,
            progress=progress,
        )
    seconds = time.monotonic() - started_at
    kept = f", {packed.num_kept} of them there already" if packed.num_kept else ""
    print(
        f"{packed.num_rows:,} images of {len(source.class_names):,} classes, "
        f"{packed.size_bytes / 1e6:,.1f} MB, in {len(packed.files):,} files{kept}, "
        f"after {seconds:.1f} s: {_OUTPUT.value}/{_NAME.value}-*.{_FORMAT.value}"
    )


def main(_: Sequence[str]) -> int:
    prepare_environment()
    try:
        _pack(Console(stderr=True, highlight=False, markup=False, soft_wrap=True))
    except tlb.ConfigurationError as error:
        exit_for_usage(str(error))
    except tlb.DataError as error:
        print(error, file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("Interrupted. Files that are whole stay; the same command goes on.", file=sys.stderr)
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
