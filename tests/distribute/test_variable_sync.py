"""Variables of several workers made equal: each worker is a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_largebatch.core.errors import MismatchError
from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute import _variable_sync
from tf_largebatch.distribute._variable_sync import VariableSynchroniser

DTYPES = (
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.int8,
    tf.int32,
    tf.int64,
    tf.bool,
    tf.uint8,
    tf.complex64,
)
ADDRESSES = ("host0:1", "host1:1", "host2:1")


class Network:
    """Gathers and broadcasts between threads, and what each of them sent."""

    def __init__(self, num_workers: int) -> None:
        self.gathered: list[np.ndarray] = []  # the chief's part
        self.broadcast: list[np.ndarray] = []
        self._barrier = threading.Barrier(num_workers, timeout=20)
        self._slots: list[Any] = [None] * num_workers

    def exchange(self, rank: int, kind: str, value: np.ndarray) -> list[np.ndarray]:
        self._slots[rank] = (kind, value)
        self._barrier.wait()
        kinds, values = zip(*self._slots, strict=True)
        self._barrier.wait()
        assert set(kinds) == {kind}, "workers ask for different things"
        assert len({(each.shape, each.dtype) for each in values}) == 1, "of different shapes"
        return list(values)


class Worker:
    """One thread's end of the network."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self._rank = rank

    def gather(self, value: np.ndarray, *, purpose: str, detail: str = "") -> np.ndarray:
        assert value.dtype == np.int64
        if self._rank == 0:
            self._network.gathered.append(value)
        return np.stack(self._network.exchange(self._rank, "gather", value))

    def broadcast(self, value: np.ndarray) -> np.ndarray:
        assert value.dtype == np.int32
        if self._rank == 0:
            self._network.broadcast.append(value)
        return self._network.exchange(self._rank, "broadcast", value)[0]


def synchronised(
    variables: list[list[Any]], *, must_be_equal: bool = False
) -> tuple[Network, list[MismatchError | None]]:
    """Each worker synchronises its variables; returns what was sent, and each one's error."""
    network = Network(len(variables))
    errors: list[Any] = [None] * len(variables)

    def run(rank: int) -> None:
        topology = ClusterTopology(addresses=ADDRESSES[: len(variables)], rank=rank)
        synchroniser = VariableSynchroniser(
            topology, Worker(network, rank), must_be_equal=must_be_equal
        )
        for variable in variables[rank]:
            synchroniser.add(variable)
        try:
            synchroniser.synchronise()
            synchroniser.synchronise()  # nothing is left to be done
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(variables))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a worker waits for ever"
    for error in errors:
        if error is not None and not isinstance(error, MismatchError):
            raise error
    return network, errors


def of(value: Any, dtype: tf.DType = tf.float32, name: str = "v") -> tf.Variable:
    return tf.Variable(tf.cast(value, dtype), name=name)


def bits(variable: Any) -> bytes:
    return np.asarray(variable.numpy()).tobytes()


def test_equal_values_cost_one_gather_and_nothing_else() -> None:
    values = [np.arange(5.0), np.zeros(7), 3.0]
    network, errors = synchronised([[of(value) for value in values] for _ in range(3)])
    assert errors == [None] * 3
    assert [each.shape for each in network.gathered] == [(3,)]
    assert network.broadcast == []


def test_nothing_to_do_costs_nothing() -> None:
    network, errors = synchronised([[], []])
    assert (network.gathered, network.broadcast, errors) == ([], [], [None, None])


def test_only_what_differs_is_sent_and_it_is_the_chiefs() -> None:
    equal, differing = np.arange(1000.0), np.arange(1.0, 4.0)
    variables = [
        [of(equal, name="a"), of(differing + rank, name="b"), of(equal, name="c"), of(rank > 1)]
        for rank in range(3)
    ]
    network, errors = synchronised(variables)
    assert errors == [None] * 3
    for _, b, _, last in variables:
        np.testing.assert_array_equal(b, [1, 2, 3])
        assert last.numpy() == 0
    for a, _, c, _ in variables:
        np.testing.assert_array_equal(a, equal)
        np.testing.assert_array_equal(c, equal)
    assert sum(each.nbytes for each in network.broadcast) == 3 * 4 + 4


def random_value(generator: np.random.Generator, shape: tuple[int, ...], dtype: tf.DType) -> Any:
    value = generator.normal(size=shape) * 50
    if dtype.is_complex:
        value = value + 1j * generator.normal(size=shape)
    return np.asarray(value > 0 if dtype == tf.bool else abs(value) if dtype.is_unsigned else value)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_dtype_and_shape(dtype: tf.DType) -> None:
    shapes = [(), (0,), (1,), (3,), (2, 0, 3), (5, 7), (1000, 11)]
    variables = []
    for rank in range(2):
        generator = np.random.default_rng(rank)
        variables.append(
            [of(random_value(generator, shape, dtype), dtype) for shape in (*shapes, (1,), (1,))]
        )
        # A byte that differs, the last of an odd number, and a value next to zero.
        variables[rank].append(of(np.arange(7) == (6 if rank else 9), dtype))
    expected = [bits(variable) for variable in variables[0]]
    assert [bits(variable) for variable in variables[1]] != expected
    _, errors = synchronised(variables)
    assert errors == [None, None]
    for made in variables:
        assert [bits(variable) for variable in made] == expected
        assert {variable.dtype for variable in made} == {dtype}


def test_many_dtypes_share_a_broadcast() -> None:
    variables = [[of(np.arange(3) == rank, dtype) for dtype in DTYPES] for rank in range(2)]
    network, errors = synchronised(variables)
    assert errors == [None, None]
    assert len(network.broadcast) == 1
    for chief, other in zip(*variables, strict=True):
        assert bits(chief) == bits(other)


def test_much_is_sent_in_several_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_variable_sync, "_PACK_BYTES", 800)
    variables = [[of(np.arange(60.0) + rank) for _ in range(10)] for rank in range(2)]
    network, _ = synchronised(variables)
    sizes = [each.nbytes for each in network.broadcast]
    assert sum(sizes) == 10 * 240
    assert len(sizes) >= 3 and max(sizes) <= 800
    for chief, other in zip(*variables, strict=True):
        assert bits(chief) == bits(other)


class Mirrored:
    """A variable of several local replicas, as the strategy makes them."""

    def __init__(self, *values: float) -> None:
        self.values = tuple(of(value) for value in values)
        self.name, self.dtype, self.shape = "m", tf.float32, self.values[0].shape


def test_all_replicas_of_a_worker_get_the_chiefs_value() -> None:
    variables = [[Mirrored(rank + 1.0, rank + 1.0)] for rank in range(2)]
    synchronised(variables)
    for (mirrored,) in variables:
        assert [component.numpy() for component in mirrored.values] == [1.0, 1.0]


def test_what_must_be_equal_and_is() -> None:
    network, errors = synchronised([[of([1.0, 2.0])] for _ in range(3)], must_be_equal=True)
    assert errors == [None] * 3 and len(network.gathered) == 1


def test_what_must_be_equal_and_is_not_is_named() -> None:
    variables = [
        [of(1.0, name="a"), of([2.0] * 3, name="kernel"), of(rank, name="c"), of(0.0, name="d")]
        for rank in (0, 0, 1)
    ]
    variables[2][1].assign([2.0, 2.0, 2.5])
    network, errors = synchronised(variables, must_be_equal=True)
    texts = [str(error) for error in errors]
    assert texts[0] == texts[1] == texts[2]
    for part in (
        "parallel_initialization=True needs equal values on all workers, but 2 of 4 variables",
        "The first is kernel float32(3,), number 1, which worker 2 at host2:1 has otherwise than "
        "worker 0 at host0:1.",
        "keras.utils.set_random_seed(seed)",
    ):
        assert part in texts[0]
    assert network.broadcast == []
    assert variables[2][1].numpy().tolist() == [2.0, 2.0, 2.5]


@pytest.mark.parametrize("must_be_equal", [False, True])
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lambda rank: [of(1.0, name="a"), of([2.0] * 2, name="b")][:: -1 if rank == 2 else 1],
            (
                "worker 0 at host0:1 made 2 variables, number 0 of them: a float32()",
                "worker 2 at host2:1 made 2 variables, number 0 of them: b float32(2,)",
            ),
        ),
        (
            lambda rank: [of(1.0, name="a")] + [of(2.0, name="b")] * (rank == 1),
            (
                "worker 0 at host0:1 made 1 variables, number 1 of them: none",
                "worker 1 at host1:1 made 2 variables, number 1 of them: b float32()",
            ),
        ),
        (
            lambda rank: [of(np.zeros(3 + rank))],
            (
                "made 1 variables, number 0 of them: v float32(3,)",
                "worker 1 at host1:1 made 1 variables, number 0 of them: v float32(4,)",
            ),
        ),
        (
            lambda rank: [of(0, tf.int32 if rank == 2 else tf.float32)],
            ("worker 2 at host2:1 made 1 variables, number 0 of them: v int32()",),
        ),
    ],
    ids=["order", "counts", "shapes", "dtypes"],
)
def test_workers_that_made_different_variables_see_both_sides(
    make: Callable[[int], list[Any]], parts: tuple[str, ...], must_be_equal: bool
) -> None:
    network, errors = synchronised([make(rank) for rank in range(3)], must_be_equal=must_be_equal)
    texts = {str(error) for error in errors}
    assert len(texts) == 1 and network.broadcast == []
    text = texts.pop()
    assert text.startswith("Workers must make the same variables in the same order, but\n")
    for part in parts:
        assert part in text


@pytest.mark.parametrize("other", [np.nan, -np.nan, np.inf, 2.0**-149])
def test_values_are_compared_bit_by_bit(other: float) -> None:
    for chief, rest in ((0.0, other), (other, 0.0)):
        variables = [[of(np.float32([1.0, chief]))], [of(np.float32([1.0, rest]))]]
        synchronised(variables)
        assert bits(variables[0][0]) == bits(variables[1][0])
        assert bits(variables[0][0]) == np.float32([1.0, chief]).tobytes()
    network, _ = synchronised([[of(np.float32([other]))] for _ in range(2)])
    assert len(network.gathered) == 1, "NaN and NaN have equal bits"


def test_zeros_beside_other_values_keep_their_sign() -> None:
    variables = [[of(np.float32([1.0, zero]))] for zero in (-0.0, 0.0)]
    synchronised(variables)
    assert bits(variables[1][0]) == np.float32([1.0, -0.0]).tobytes()


def test_a_variable_of_zeros_alone_takes_their_sign_too() -> None:
    variables = [[of(np.float32([zero, 0.0]))] for zero in (-0.0, 0.0)]
    synchronised(variables)
    assert bits(variables[1][0]) == np.float32([-0.0, 0.0]).tobytes()


def test_names_may_differ() -> None:
    # Keras counts names up in each process; a worker may have made a model before.
    variables = [[of(rank + 1.0, name=f"kernel_{rank}")] for rank in range(2)]
    _, errors = synchronised(variables)
    assert errors == [None, None]
    assert [made[0].numpy() for made in variables] == [1.0, 1.0]


def test_what_is_added_later_is_compared_by_itself() -> None:
    network = Network(1)
    synchroniser = VariableSynchroniser(
        ClusterTopology(addresses=ADDRESSES[:1]), Worker(network, 0), must_be_equal=False
    )
    for count in (2, 1):
        for _ in range(count):
            synchroniser.add(of(1.0))
        synchroniser.synchronise()
    assert [each[0] for each in network.gathered] == [2, 1]


def test_variables_made_while_a_function_is_traced_are_read_eagerly() -> None:
    variables = [[of(1.0)], [of(2.0)]]
    networks = []

    @tf.function
    def traced() -> tf.Tensor:
        with tf.init_scope():
            pass
        networks.append(synchronised(variables))
        return tf.constant(0)

    traced()
    assert variables[1][0].numpy() == 1.0
