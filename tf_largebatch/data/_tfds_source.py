"""Rows of data sets that TensorFlow Datasets has prepared on this machine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.data._array_record_source import ArrayRecordSource
from tf_largebatch.data._records import ParseFn, RecordSource, traced_outputs
from tf_largebatch.data._tfrecord_source import TFRecordSource


class TfdsSource(RecordSource):
    """A split of a prepared TFDS data set, rows in the order in which TFDS stores them.

    Records are read from the files of the split by `TFRecordSource` or `ArrayRecordSource`, and
    parsed by the features of the data set (`features.deserialize_example`) in the graph, a
    vectorised batch at a time: no Python decodes. Nothing is downloaded and nothing prepared.

    Images of 8 bits stay encoded, a string `[]` a row, so that `row_fn` decodes the crop alone.
    `decoders` says otherwise, image by image. Rows must all have the same shapes: what differs
    from row to row (decoded images of no fixed size, sequences of no fixed length) is refused.

    Args:
        builder: `tfds.builder(name, data_dir=...)`, `tfds.builder_from_directory(directory)`, or
            what `tfds.data_source(...)` returns for one split: its data set, split and decoders
            are used, its own way of reading (`deserialize_method`) is not.
        split: as TFDS takes it: `"train"`, `"train[:80%]"`, `"train[100:200]+test"`, a
            `tfds.core.ReadInstruction`; not with a data source, which has one.
        decoders: as `as_dataset` takes them: a dict with a decoder for some of the features
            (`None` for TFDS's own, which decodes an image), or a `tfds.decode.PartialDecoding`,
            which also leaves features out.
        supervised: whether a row is the tuple of the data set's `supervised_keys`, mostly
            `(image, label)`, with nothing else parsed, or the dict of all features. By default
            the tuple where the data set has such keys.
        index_dir: see `TFRecordSource`.

    Raises:
        ConfigurationError: TFDS is not installed; `builder` is something else, is not prepared,
            or keeps its data in another format; `split` or `decoders` do not fit the data set;
            features whose shape differs from row to row (named).
        DataError: the split has no rows, or its files cannot be read, or hold another number of
            records than TFDS has noted.
    """

    def __init__(
        self,
        builder: Any,
        *,
        split: Any = None,
        decoders: Any = None,
        supervised: bool | None = None,
        index_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        tfds = _import_tfds()
        info, split, decoders = _data_set(tfds, builder, split, decoders)
        parse_fn = _parse_fn(tfds, info, decoders, supervised)
        instructions = _file_instructions(info, split)
        # [instruction]: where its rows begin, among ours and among the records of the files.
        takes = [instruction.take for instruction in instructions]
        self._first_rows = np.cumsum([0, *takes[:-1]], dtype=np.int64)
        self._records, self._first_records = _open_records(info, instructions, index_dir)
        super().__init__(sum(takes), parse_fn)

    def describe_row(self, row: int) -> str:
        """The file and the number of the record in it, see the source of that format."""
        return self._records.describe_row(int(self._record_numbers(np.asarray([row]))[0]))

    @property
    def fingerprint(self) -> str:
        """That of the files, and which of their records are rows."""
        parts = [self._records.fingerprint, self._first_rows.tolist(), self._first_records.tolist()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def read_records(self, rows: npt.NDArray[np.int64]) -> Sequence[bytes]:
        """See `RecordSource.read_records`; rows out of range raise DataError."""
        return self._records.read_records(self._record_numbers(rows))

    def _record_numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        self.check_rows(rows)
        part = np.searchsorted(self._first_rows, rows, side="right") - 1
        return rows - self._first_rows[part] + self._first_records[part]


def _data_set(tfds: Any, builder: Any, split: Any, decoders: Any) -> tuple[Any, Any, Any]:
    """The `DatasetInfo`, split and decoders of a builder or a data source."""
    if isinstance(builder, tfds.core.DatasetBuilder):
        if not builder.info.splits:
            raise ConfigurationError(
                f"{builder.info.full_name} is not prepared in {os.fspath(builder.data_dir)!r}; "
                "call builder.download_and_prepare() once, on one worker, or give the data_dir "
                "where it is."
            )
        if split is None:
            raise ConfigurationError(f"Give split, one of {_names(builder.info)} or a part of it.")
        return builder.info, split, decoders
    if not (hasattr(builder, "dataset_info") and hasattr(builder, "split")):
        raise ConfigurationError(
            "builder must be tfds.builder(name, data_dir=...), "
            "tfds.builder_from_directory(directory) or what tfds.data_source(...) returns for one "
            f"split, but is {builder!r}."
        )
    if split is not None:
        raise ConfigurationError(
            f"split={split!r} is given with a data source, which has the split "
            f"{builder.split!r}; leave it out, or give the builder."
        )
    decoders = builder.decoders if decoders is None else decoders
    return builder.dataset_info, builder.split, decoders


def _names(info: Any) -> str:
    return ", ".join(repr(str(name)) for name in info.splits)


def _file_instructions(info: Any, split: Any) -> list[Any]:
    """For each file that the split reads: `filename`, `skip`, `take`, `examples_in_shard`."""
    try:
        instructions = info.splits[split].file_instructions
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"split={split!r} is no part of {info.full_name}, which has {_names(info)}: {error}"
        ) from error
    if not any(instruction.take for instruction in instructions):
        raise DataError(f"split={split!r} of {info.full_name} has no rows.")
    return list(instructions)


def _open_records(
    info: Any, instructions: list[Any], index_dir: str | os.PathLike[str] | None
) -> tuple[RecordSource, npt.NDArray[np.int64]]:
    """The records of all files of a split, and the first of each instruction among them."""
    file_format = getattr(info.file_format, "value", info.file_format)
    # A file comes more than once where parts of it are added: "train[:10]+train[20:]".
    counts = {os.fspath(part.filename): part.examples_in_shard for part in instructions}
    if file_format == "tfrecord":
        records: RecordSource = TFRecordSource(list(counts), index_dir=index_dir)
    elif file_format == "array_record":
        records = ArrayRecordSource(list(counts))
    else:
        raise ConfigurationError(
            f"{info.full_name} is stored as {file_format!r}; rows are read by number from "
            "'tfrecord' and 'array_record'. Prepare it with "
            "tfds.builder(..., file_format='array_record')."
        )
    if len(records) != sum(counts.values()):
        raise DataError(
            f"The files of {info.full_name} hold {len(records)} records, but TFDS has noted "
            f"{sum(counts.values())}; prepare it again. The first is {next(iter(counts))!r}."
        )
    firsts = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))
    return records, np.asarray(
        [firsts[os.fspath(part.filename)] + part.skip for part in instructions], np.int64
    )


def _parse_fn(tfds: Any, info: Any, decoders: Any, supervised: bool | None) -> ParseFn:
    features, keys = info.features, info.supervised_keys
    if not isinstance(features, tfds.features.FeaturesDict):
        raise ConfigurationError(
            f"{info.full_name} has the features {features!r}, not a tfds.features.FeaturesDict."
        )
    if supervised and not keys:
        raise ConfigurationError(
            f"supervised=True, but {info.full_name} has no supervised_keys; its rows are dicts."
        )
    as_tuple = bool(keys) if supervised is None else supervised
    try:
        if isinstance(decoders, tfds.decode.PartialDecoding):
            features, decoders = decoders.extract_features(features), decoders.decoders
        decoders = _with_encoded_images(tfds, features, decoders or {})
        if as_tuple:
            wanted = set(tf.nest.flatten(keys))
            features = tfds.features.FeaturesDict({key: features[key] for key in wanted})
            decoders = {key: decoder for key, decoder in decoders.items() if key in wanted}
        parse = _batch_parser(
            lambda record: features.deserialize_example(record, decoders=decoders), info.full_name
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"decoders={decoders!r} does not fit the features of {info.full_name}: {error}"
        ) from error
    if not as_tuple:
        return parse

    def parse_tuple(records: tf.Tensor) -> Any:
        row = parse(records)
        return tf.nest.map_structure(row.__getitem__, keys)

    return parse_tuple


def _with_encoded_images(tfds: Any, features: Any, decoders: Mapping[str, Any]) -> dict[str, Any]:
    """The decoders, and for each 8-bit image that they do not name one that leaves it encoded."""
    unknown = set(decoders) - set(features)
    if unknown:
        raise ValueError(f"there are no features {sorted(unknown)}, only {sorted(features)}.")
    filled = dict(decoders)
    for name, feature in features.items():
        if isinstance(feature, tfds.features.FeaturesDict):
            filled[name] = _with_encoded_images(tfds, feature, filled.get(name) or {})
        elif isinstance(feature, tfds.features.Image) and feature.np_dtype == np.uint8:
            filled.setdefault(name, tfds.decode.SkipDecoding())
    return filled


def _batch_parser(parse_one: Callable[[tf.Tensor], Any], name: str) -> ParseFn:
    """From one record, string `[]`, to a batch of them.

    Microseconds of CPU a record of 43 kB: 26 by `tf.vectorized_map`, 45 and more by `tf.map_fn`.
    """
    row = traced_outputs(parse_one, tf.TensorSpec([], tf.string))
    _check_shapes(row, name, "")
    shapes = [leaf.shape for leaf in tf.nest.flatten(row)]

    def parse(records: tf.Tensor) -> Any:
        batch = tf.vectorized_map(parse_one, records)
        for tensor, shape in zip(tf.nest.flatten(batch), shapes, strict=True):
            tensor.set_shape([records.shape[0], *shape])
        return batch

    return parse


def _check_shapes(row: Any, name: str, path: str) -> None:
    if isinstance(row, dict):
        for key, value in row.items():
            _check_shapes(value, name, f"{path}/{key}" if path else key)
    elif not isinstance(row, tf.Tensor) or not row.shape.is_fully_defined():
        what = f"shape {row.shape}" if isinstance(row, tf.Tensor) else type(row).__name__
        raise ConfigurationError(
            f"The feature {path!r} of {name} ({what}) is not the same in all rows, so that they "
            "make no batch. Leave it out, as decoders=tfds.decode.PartialDecoding({'image': "
            "True, 'label': True}), or an image encoded."
        )


def _import_tfds() -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ConfigurationError(
            "TfdsSource needs the library tensorflow_datasets, which cannot be imported "
            f"({error}): pip install 'tf_largebatch[records]'"
        ) from error
    return tensorflow_datasets
