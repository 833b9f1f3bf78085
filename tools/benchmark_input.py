"""Times input pipelines for ImageNet on this machine: ours against the usual one.

    python tools/benchmark_input.py --output=input.json

The images are made: JPEGs of 500 x 375 pixels and about 90 kB, cut from photographs that
scikit-image and scikit-learn ship; they are packed into TFRecord and ArrayRecord files as well. All
of them stay in the page cache, so what is timed is processor work, not a disk. Passes of the
pipelines alternate, `--repeats` times after one to warm up; their first and last batches are not
timed.

Pipelines:
    decode_alone        the random crop decoded from bytes in memory, and nothing else: the limit
    usual               TFRecordDataset, in order; crop, resize to 224, flip and normalise in
                        float32, image by image; the crop's window is given, not drawn
    ours_tfrecord, ours_array_record, ours_image_folder
                        GlobalShuffleSharder over all images for one worker of two, uint8;
                        normalising is left to the device

Images a second and core are given by processor time of the whole process (the cost of an image,
whatever else runs on the machine), and by the clock over `cores` (in `machine`). Memory is by how
much the process grew during a pass; pages that it kept from passes before do not count.

A pipeline of ours is verified when both workers' parts of an epoch hold each image once, not in
order, and the pixels of one image a batch lie within 0.5, the rounding to uint8, of a float32
crop and resize of the same window.

JSON: {"results": [{"pipeline", "images_per_second_per_core_p50", "images_per_second_per_core_all",
"images_per_cpu_second_p50", "images_per_cpu_second_all", "memory_growth_mib", "verified",
"problems"}], "ratios": [{"pipeline", "reference", "ratio", "wall_ratio", "verified"}], "settings",
"machine"}. `ratio` is that of the medians by processor time.

Exit code: 0 when all rows are verified, 1 when one is not, 2 for a wrong command line.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from _command_line import exit_for_usage, hand_over, parse_flags, prepare_environment
from _input_results import Pass, compare, figures_table, summarise
from _machine import machine_facts
from _made_images import write_image_folder
from absl import app, flags
from rich.console import Console

_SOURCE_NAMES = ("tfrecord", "array_record", "image_folder")
_SOURCES = flags.DEFINE_list("sources", list(_SOURCE_NAMES), "One or more of these.")
_IMAGES = flags.DEFINE_integer("images", 2048, "Images of a pass.", lower_bound=2)
_BATCH = flags.DEFINE_integer("batch_size", 32, "Images of a batch.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 7, "Passes of each pipeline.", lower_bound=1)
_CORES = flags.DEFINE_integer(
    "cores", None, "Cores to use; default: all that there are.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")

_REFERENCES = ("decode_alone", "usual")
_SEED = 1
_SAMPLE_SECONDS = 0.02
_BATCHES_LEFT_OUT = 8  # at each end of a pass
_MOST_DIFFERENT = 512  # made images; the others are links to them


class _PeakMemory:
    """The largest resident memory of this process, sampled while the context lasts."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _PeakMemory:
        self._before = self._peak = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def growth_bytes(self) -> int:
        return self._peak - self._before

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, self._process.memory_info().rss)


def _timed_pass(name: str, dataset: Any) -> Pass:
    """Times a pass without its first and last batches.

    So that iterators are made and threads started before, and that as many images lie ready in
    buffers at the end as at the beginning.
    """
    batches = iter(dataset)
    images = 0
    for _ in range(_BATCHES_LEFT_OUT):
        next(batches)
    with _PeakMemory() as memory:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(_IMAGES.value // _BATCH.value - 2 * _BATCHES_LEFT_OUT):
            batch = next(batches)
            images += len(batch[0] if isinstance(batch, tuple) else batch)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Pass(name, images, wall, cpu, memory.growth_bytes)


def _made_data(folder: Path, console: Console) -> None:
    """Twice the images of a pass, as two workers share them, of which a part differ."""
    import tf_largebatch as tlb

    different = min(_IMAGES.value, _MOST_DIFFERENT)
    console.print(f"Making {different} images in {folder}")
    write_image_folder(folder / "made", num_images=different, num_classes=1, seed=_SEED)
    made = sorted((folder / "made").rglob("*.jpg"))
    for row in range(2 * _IMAGES.value):
        place = folder / "images" / f"{row:06d}"
        place.mkdir(parents=True)
        os.link(made[row % different], place / "image.jpg")
    source = tlb.data.ImageFolderSource(folder / "images")
    for name, write in (
        ("tfrecord", tlb.data.write_tfrecords),
        ("array_record", tlb.data.write_array_records),
    ):
        write(source, folder / "packed", name=name, num_shards=2, check_images=False)


def _run_all(folder: Path, console: Console) -> tuple[list[Pass], dict[str, list[str]]]:
    from _input_pipelines import Pipelines

    pipelines = Pipelines(folder, batch_size=_BATCH.value, seed=_SEED)
    datasets = {"decode_alone": pipelines.decode_alone(), "usual": pipelines.usual()}
    problems = {}
    for source in _SOURCES.value:
        problems[f"ours_{source}"] = pipelines.problems(source)
        datasets[f"ours_{source}"] = pipelines.ours(source)
    passes = []
    for repeat in range(_REPEATS.value + 1):
        for name, dataset in datasets.items():
            done = _timed_pass(name, dataset)
            if repeat > 0:  # the first one warms up
                passes.append(done)
        console.print(f"[{repeat}/{_REPEATS.value}] passes done")
    return passes, problems


def _check_flags() -> None:
    if not _SOURCES.value or not set(_SOURCES.value) <= set(_SOURCE_NAMES):
        exit_for_usage(f"--sources must be one or more of {', '.join(_SOURCE_NAMES)}.")
    batches = 2 * _BATCHES_LEFT_OUT + 1
    if batches * _BATCH.value > _IMAGES.value:
        exit_for_usage(
            f"--images={_IMAGES.value} must be {batches} batches at least, so --batch_size at most "
            f"{_IMAGES.value // batches}, but is {_BATCH.value}."
        )


def main(_: Sequence[str]) -> int:
    _check_flags()
    prepare_environment()
    if _CORES.value:  # before TensorFlow counts them
        process = psutil.Process()
        process.cpu_affinity(process.cpu_affinity()[: _CORES.value])
    machine = machine_facts()
    console = Console(stderr=True, highlight=False, markup=False)
    with tempfile.TemporaryDirectory() as folder:
        _made_data(Path(folder), console)
        passes, problems = _run_all(Path(folder), console)
    rows = summarise(passes, cores=machine["cores"], problems=problems)
    ratios = compare(rows, references=_REFERENCES)
    for row in rows:
        for problem in row["problems"]:
            console.print(f"NOT VERIFIED: {problem}")
    report = {
        "results": rows,
        "ratios": ratios,
        "settings": {flag.name: flag.value for flag in (_IMAGES, _BATCH, _REPEATS)},
        "machine": machine,
    }
    return hand_over(figures_table(rows, ratios), report, output=_OUTPUT.value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
