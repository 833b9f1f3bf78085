"""What an all-reduce may be told."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tensorflow as tf

import tf_largebatch as tlb
from tf_largebatch.core.errors import ConfigurationError

Implementation = tf.distribute.experimental.CommunicationImplementation


def test_defaults() -> None:
    options = tlb.AllReduceOptions()
    assert options.algorithm == "auto"
    assert options.bucket_bytes == 8 * 1024 * 1024
    assert options.max_buckets_in_flight == 4
    assert options.wire_dtype is None
    assert options.transport is None, "which is the strategy's"


@pytest.mark.parametrize("name", ["tensorflow", "mpi", None])
def test_a_transport_is_kept(name: str | None) -> None:
    options = tlb.AllReduceOptions(transport=name, algorithm="ring", wire_dtype="bfloat16")
    assert options.transport == name


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_wire_dtype_is_a_tensorflow_dtype(name: str) -> None:
    assert tlb.AllReduceOptions(wire_dtype=name).wire_dtype is getattr(tf, name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"algorithm": "tree"},
            "algorithm='tree' is not available; use one of 'auto', 'ring', 'halving_doubling', "
            "'tensorflow'.",
        ),
        ({"algorithm": None}, "algorithm=None is not available"),
        ({"algorithm": "RING"}, "algorithm='RING' is not available"),
        (
            {"wire_dtype": "float32"},
            "wire_dtype='float32' is not available; use one of None, 'bfloat16', 'float16'.",
        ),
        ({"wire_dtype": 16}, "wire_dtype=16 is not available"),
        ({"wire_dtype": tf.bfloat16}, "is not available; use one of None, 'bfloat16'"),
        (
            {"transport": "gloo"},
            "transport='gloo' is not available; use one of 'tensorflow', 'mpi', None.",
        ),
        ({"transport": "MPI"}, "transport='MPI' is not available"),
        ({"transport": ""}, "transport='' is not available"),
        ({"bucket_bytes": 0}, "bucket_bytes=0: must be an integer, 1 or more."),
        ({"bucket_bytes": -1}, "bucket_bytes=-1: must"),
        ({"bucket_bytes": 1e6}, "bucket_bytes=1000000.0: must be"),
        ({"bucket_bytes": "8MiB"}, "bucket_bytes='8MiB': must"),
        ({"bucket_bytes": None}, "bucket_bytes=None: must"),
        ({"max_buckets_in_flight": 0}, "max_buckets_in_flight=0: must be"),
        ({"max_buckets_in_flight": True}, "max_buckets_in_flight=True: must"),
        (
            {"algorithm": "tensorflow", "wire_dtype": "bfloat16"},
            "wire_dtype='bfloat16' needs sums in full precision between hops, which TensorFlow's "
            "own collectives cannot keep: use 'auto', 'ring' or 'halving_doubling' instead of "
            "'tensorflow', or wire_dtype=None.",
        ),
    ],
)
def test_other_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        tlb.AllReduceOptions(**given)


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        tlb.AllReduceOptions("ring")  # type: ignore[misc]


@pytest.mark.parametrize("algorithm", ["auto", "ring", "halving_doubling"])
def test_all_other_algorithms_take_a_wire_dtype(algorithm: str) -> None:
    options = tlb.AllReduceOptions(algorithm=algorithm, wire_dtype="float16", bucket_bytes=1)
    assert (options.algorithm, options.wire_dtype) == (algorithm, tf.float16)


def test_fields_tell_any_two_apart() -> None:
    different = [
        tlb.AllReduceOptions(),
        tlb.AllReduceOptions(algorithm="ring"),
        tlb.AllReduceOptions(bucket_bytes=1),
        tlb.AllReduceOptions(max_buckets_in_flight=1),
        tlb.AllReduceOptions(wire_dtype="bfloat16"),
        tlb.AllReduceOptions(wire_dtype="float16"),
        tlb.AllReduceOptions(transport="mpi"),
        tlb.AllReduceOptions(transport="tensorflow"),
        tlb.AllReduceOptions().merge(
            tf.distribute.experimental.CommunicationOptions(implementation=Implementation.RING)
        ),
    ]
    assert len({options.fields() for options in different}) == len(different)
    assert tlb.AllReduceOptions(algorithm="ring").fields() == different[1].fields()


def test_a_call_without_options_has_the_strategys() -> None:
    own = tlb.AllReduceOptions(algorithm="ring", bucket_bytes=5, wire_dtype="float16")
    merged = own.merge(None)
    assert isinstance(merged, tlb.AllReduceOptions)
    assert merged.fields() == own.fields()


def test_a_call_with_tensorflows_options_keeps_the_transport() -> None:
    own = tlb.AllReduceOptions(transport="mpi")
    merged = own.merge(tf.distribute.experimental.CommunicationOptions(bytes_per_pack=500))
    assert isinstance(merged, tlb.AllReduceOptions)
    assert (merged.transport, merged.bucket_bytes) == ("mpi", 500)


def test_a_calls_own_options_replace_all_of_the_strategys() -> None:
    own = tlb.AllReduceOptions(algorithm="ring", bucket_bytes=5, wire_dtype="float16")
    call = tlb.AllReduceOptions(max_buckets_in_flight=3)
    assert own.merge(call).fields() == call.fields()
    assert own.algorithm == "ring", "the strategy's options stay as they are"


def test_tensorflows_options_add_to_the_strategys() -> None:
    own = tlb.AllReduceOptions(algorithm="halving_doubling", wire_dtype="bfloat16")
    call = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=7.0, implementation=Implementation.RING, bytes_per_pack=500
    )
    merged = own.merge(call)
    assert isinstance(merged, tlb.AllReduceOptions)
    assert (merged.algorithm, merged.wire_dtype) == ("tensorflow", None)  # which has that ring
    assert merged.bucket_bytes == 500
    assert (merged.timeout_seconds, merged.implementation) == (7.0, Implementation.RING)
    assert (own.timeout_seconds, own.implementation) == (None, Implementation.AUTO)
