"""How an all-reduce is done: the strategy's defaults, and what a single call may override."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count
from tf_largebatch.distribute._tf_internals import Options

ALGORITHMS = ("auto", "ring", "halving_doubling", "tensorflow")
TRANSPORTS = ("tensorflow", "mpi")
WIRE_DTYPES = (None, "bfloat16", "float16")
DEFAULT_BUCKET_BYTES = 8 * 2**20
DEFAULT_BUCKETS_IN_FLIGHT = 4


class AllReduceOptions(Options):  # type: ignore[misc]
    """Options of an all-reduce; `LargeBatchStrategy` takes the same as arguments.

    For a custom loop, where one all-reduce is to differ from the strategy's own:

        tf.distribute.get_replica_context().all_reduce(
            "SUM", values, options=tlb.AllReduceOptions(algorithm="ring"))

    Args:
        algorithm: `"ring"`, `"halving_doubling"`, `"tensorflow"` (TensorFlow's own: a ring on CPU,
            NCCL on GPU), or `"auto"`: for each bucket the one with the least predicted time.
        bucket_bytes: values are reduced in buckets of at most this size, each as soon as its
            values exist; a larger value has a bucket of its own. Default 8 MiB.
        max_buckets_in_flight: a bucket waits for the one this many before it. Default 4.
        transport: `"tensorflow"` or `"mpi"`, if the strategy has it; None: the strategy's. By MPI
            `"auto"` means MPI's own algorithm, and `"tensorflow"` still TensorFlow's.
        wire_dtype: `"bfloat16"` or `"float16"`: float32 and float64 values travel in it, while
            sums are kept in their own dtype; float16 overflows beyond 65,504, which a loss scale
            sees as it sees any overflow. Buckets below 4 KiB, as of metrics, travel as they are.
            None: everything does.

    Raises:
        ConfigurationError: an option is not one of these.

    Sources: Goyal et al. 2017, section 4.1 (cyclic control inputs); Yamazaki et al. 2019 (static
    buckets, half precision).
    """

    def __init__(
        self,
        *,
        algorithm: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        max_buckets_in_flight: int = DEFAULT_BUCKETS_IN_FLIGHT,
        wire_dtype: str | None = None,
        transport: str | None = None,
    ) -> None:
        super().__init__()
        check_choice("algorithm", algorithm, ALGORITHMS)
        check_choice("wire_dtype", wire_dtype, WIRE_DTYPES)
        check_choice("transport", transport, (*TRANSPORTS, None))
        if wire_dtype is not None and algorithm == "tensorflow":
            raise ConfigurationError(
                f"wire_dtype={wire_dtype!r} needs sums in full precision between hops, which "
                "TensorFlow's own collectives cannot keep: use 'auto', 'ring' or "
                "'halving_doubling' instead of 'tensorflow', or wire_dtype=None."
            )
        self.algorithm = algorithm
        self.bucket_bytes = require_count("bucket_bytes", bucket_bytes)
        self.max_buckets_in_flight = require_count("max_buckets_in_flight", max_buckets_in_flight)
        self.wire_dtype = None if wire_dtype is None else tf.as_dtype(wire_dtype)
        self.transport = transport

    def fields(self) -> tuple[Any, ...]:
        """All that makes two of them differ."""
        return (
            self.algorithm,
            self.bucket_bytes,
            self.max_buckets_in_flight,
            self.wire_dtype,
            self.transport,
            self.implementation,
            self.timeout_seconds,
        )

    def merge(self, options: Any) -> Any:
        """These options overridden by a call's: by all of them, if they are of this class.

        Of TensorFlow's `CommunicationOptions`, `bytes_per_pack` is `bucket_bytes`, and an
        `implementation` means TensorFlow's own.
        """
        if isinstance(options, AllReduceOptions):
            return options
        merged = super().merge(options)
        if options is not None and options.bytes_per_pack:
            merged.bucket_bytes = options.bytes_per_pack
        if options is not None and options.implementation != self.implementation:
            merged.algorithm, merged.wire_dtype = "tensorflow", None
        return merged


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises ConfigurationError unless `value` is one of `choices`."""
    if not isinstance(value, str | None) or value not in choices:
        raise ConfigurationError(
            f"{name}={value!r} is not available; use one of {', '.join(map(repr, choices))}."
        )
