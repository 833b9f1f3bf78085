"""Plans traced into graphs: against core's simulation, bit by bit, and what a graph must keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.collective_plan import (
    AllReducePlan,
    binary_blocks,
    halving_doubling,
    hierarchical,
    ring,
    simulate,
)
from tf_largebatch.distribute._exchange import EXCHANGED_DTYPES, BroadcastExchange
from tf_largebatch.distribute._plan_runner import Segments, run_plan

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
LENGTH = 103
PLANS = {
    "one": ring(1, length=LENGTH),
    "ring 5": ring(5, length=LENGTH, align=4),
    **{
        f"halving_doubling 8, {h}": halving_doubling(8, length=LENGTH, halvings=h, align=4)
        for h in range(4)
    },
    "halving_doubling 6, 1": halving_doubling(6, length=LENGTH, halvings=1),
    "halving_doubling 3, 0": halving_doubling(3, length=LENGTH, halvings=0),
    "binary_blocks 7": binary_blocks(7, length=LENGTH),
    "hierarchical ring": hierarchical(2, members_per_host=3, length=LENGTH, inter="ring"),
    "hierarchical halving_doubling": hierarchical(
        4, members_per_host=2, length=LENGTH, inter="halving_doubling", halvings=1, align=4
    ),
    "single elements": ring(4, length=2),  # most pieces are empty
}


class LocalExchange:
    """Hands pieces over within one graph, by TensorFlow's rendezvous.

    Like the collectives, a receive may be posted first, and runs once its piece was sent.
    """

    def __init__(self, member: int) -> None:
        self._member = member

    def send(self, piece: tf.Tensor, *, peer: int, instance_key: int) -> tf.Operation:
        name = f"{self._member} to {peer} by {instance_key} as {piece.dtype.name}"
        return tf.raw_ops.Send(tensor=piece, tensor_name=name, **_DEVICES)

    def receive(self, length: int, dtype: tf.DType, *, peer: int, instance_key: int) -> tf.Tensor:
        name = f"{peer} to {self._member} by {instance_key} as {dtype.name}"
        piece = tf.raw_ops.Recv(tensor_type=dtype, tensor_name=name, **_DEVICES)
        return tf.ensure_shape(piece, [length])


_DEVICES = {"send_device": DEVICE, "send_device_incarnation": 1, "recv_device": DEVICE}


def all_members(
    plan: AllReducePlan,
    inputs: list[np.ndarray],
    wire_dtypes: tuple[tf.DType | None, ...],
    *,
    may_reorder: bool = False,
) -> list[list[np.ndarray]]:
    """What every member ends with, for each wire dtype, all in one graph."""

    with tf.Graph().as_default() as graph, tf.device(DEVICE):
        graph.control_outputs = []  # as a function's graph has
        sums = [
            [
                run_plan(
                    plan,
                    tf.constant(row),
                    member=member,
                    exchange=LocalExchange(member),
                    first_instance_key=1000 * number,
                    wire_dtype=wire_dtype,
                )
                for member, row in enumerate(inputs)
            ]
            for number, wire_dtype in enumerate(wire_dtypes)
        ]
    config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=20_000)
    if not may_reorder:
        # Graph optimization makes one sum of several that nobody else uses, in its own order.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    # Unlike `tf.function`, this does not order the sends of all members one after the other.
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        results, _ = session.run([sums, graph.control_outputs])
    return results


def rounded_to(wire_dtype: tf.DType | None) -> Callable[[np.ndarray], np.ndarray] | None:
    if wire_dtype is None:
        return None
    return lambda piece: piece.astype(wire_dtype.as_numpy_dtype).astype(piece.dtype)


@pytest.mark.parametrize("name", PLANS)
def test_every_member_ends_with_the_simulated_bits(name: str) -> None:
    plan = PLANS[name]
    generator = np.random.default_rng(plan.num_workers)
    # Sums of such values differ with the order of the additions.
    inputs = [
        (generator.normal(size=plan.length) * 10.0 ** generator.integers(-3, 3, plan.length))
        .astype(np.float32)
        .copy()
        for _ in range(plan.num_workers)
    ]
    wire_dtypes = (None, tf.bfloat16, tf.float16)
    results = all_members(plan, inputs, wire_dtypes)
    for wire_dtype, sums in zip(wire_dtypes, results, strict=True):
        # A member alone sends nothing; it rounds its buffer nevertheless, as others would.
        expected = simulate(plan, inputs, to_wire=rounded_to(wire_dtype))
        if plan.num_steps == 0 and wire_dtype is not None:
            expected = [rounded_to(wire_dtype)(row) for row in inputs]
        for got, want in zip(sums, expected, strict=True):
            assert got.dtype == np.float32
            assert got.tobytes() == want.tobytes(), wire_dtype
            assert got.tobytes() == sums[0].tobytes(), wire_dtype


@pytest.mark.parametrize("name", ["binary_blocks 7", "hierarchical ring"])
def test_members_end_bitwise_equal_also_where_tensorflow_reorders_additions(name: str) -> None:
    plan = PLANS[name]
    inputs = list(np.random.default_rng(3).normal(size=(plan.num_workers, plan.length)))
    for sums in all_members(plan, inputs, (None, tf.bfloat16), may_reorder=True):
        assert {each.tobytes() for each in sums} == {sums[0].tobytes()}
        error = np.abs(sums[0] - np.sum(inputs, axis=0))
        # At most eight roundings to 8 bits of sums that are at most that of the magnitudes.
        assert np.all(error <= ((1 + 2.0**-8) ** 8 - 1) * np.sum(np.abs(inputs), axis=0))


@pytest.mark.parametrize("dtype", EXCHANGED_DTYPES, ids=lambda dtype: dtype.name)
def test_sums_are_formed_in_the_dtype_of_the_buffer(dtype: tf.DType) -> None:
    plan = halving_doubling(3, length=LENGTH, halvings=1, align=4)
    generator = np.random.default_rng(0)
    kind = dtype.as_numpy_dtype
    inputs = [
        (generator.normal(size=LENGTH) * (100 if dtype.is_floating else 2**27)).astype(kind)
        for _ in range(3)
    ]
    (sums,) = all_members(plan, inputs, (None,))
    for got, want in zip(sums, simulate(plan, inputs), strict=True):
        assert got.dtype == kind
        assert got.tobytes() == want.tobytes()


def test_doubles_travel_in_half_precision() -> None:
    plan = ring(3, length=LENGTH)
    inputs = list(np.random.default_rng(1).normal(size=(3, LENGTH)))
    # TensorFlow takes a double to half precision by way of a float.
    for wire_dtype in (tf.bfloat16, tf.float16):
        expected = simulate(
            plan,
            inputs,
            to_wire=lambda piece, kind=wire_dtype.as_numpy_dtype: (
                piece.astype(np.float32).astype(kind).astype(np.float64)
            ),
        )
        (sums,) = all_members(plan, inputs, (wire_dtype,))
        assert [each.tobytes() for each in sums] == [each.tobytes() for each in expected]


class RecordingExchange:
    """Says zeros are received, and notes the pieces sent, once the graph runs.

    Its ops have no effect that TensorFlow knows of, so that nothing else keeps them.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []  # (peer, key)

    def send(self, piece: tf.Tensor, *, peer: int, instance_key: int) -> tf.Operation:
        def note(value: np.ndarray) -> np.ndarray:
            self.sent.append((peer, instance_key))
            return value

        return tf.numpy_function(note, [piece], piece.dtype, stateful=False).op

    def receive(self, length: int, dtype: tf.DType, *, peer: int, instance_key: int) -> tf.Tensor:
        return tf.zeros([length], dtype)


def run_with(exchange: Any, flat: tf.Tensor, **options: Any) -> tf.Tensor:
    plan = halving_doubling(4, length=8, halvings=1)
    return run_plan(plan, flat, member=1, exchange=exchange, first_instance_key=70, **options)


# Member 1 swaps halves with 0, then the half with 3, then returns the half to 0.
SENT = sorted([(0, 70), (3, 71), (0, 72)])


def test_a_sum_that_nobody_uses_is_exchanged_nevertheless() -> None:
    exchange = RecordingExchange()

    @tf.function(autograph=False)
    def drops_the_sum(flat: tf.Tensor) -> tf.Tensor:
        run_with(exchange, flat)
        return flat + 1

    concrete = drops_the_sum.get_concrete_function(tf.TensorSpec([8]))
    for _ in range(2):
        exchange.sent.clear()
        concrete(tf.ones(8))
        assert sorted(exchange.sent) == SENT
    outputs = concrete.graph.control_outputs
    assert [op.type for op in outputs].count("PyFuncStateless") == len(SENT)
    assert len(outputs) == len(SENT) + 1, "the sum, which needs all that is received"


def test_sends_are_kept_also_in_functions_and_branches_that_others_call() -> None:
    exchange = BroadcastExchange(member=1, group_size=4, device=DEVICE)

    @tf.function(autograph=False)
    def inner(flat: tf.Tensor) -> tf.Tensor:
        return run_with(exchange, flat)

    @tf.function(autograph=False)
    def in_a_function(flat: tf.Tensor) -> tf.Tensor:
        return flat + inner(flat)

    @tf.function(autograph=False)
    def in_a_branch(flat: tf.Tensor) -> tf.Tensor:
        return tf.cond(
            flat[0] > 0, lambda: (run_with(exchange, flat), flat)[1], lambda: tf.zeros(8)
        )

    for caller, call in ((in_a_function, "StatefulPartitionedCall"), (in_a_branch, "If")):
        graph = caller.get_concrete_function(tf.TensorSpec([8])).graph
        assert call in [op.type for op in graph.control_outputs]
        sends = {
            (node.name in function.control_ret.values(), node.name)
            for function in graph.as_graph_def().library.function
            for node in function.node_def
            if node.op == "CollectiveBcastSendV2"
        }
        assert len(sends) == len(SENT)
        assert all(is_kept for is_kept, _ in sends)


def operations_behind(op: tf.Operation) -> set[tf.Operation]:
    """All that runs before `op`."""
    seen: set[tf.Operation] = set()
    waiting = [op]
    while waiting:
        for before in (
            *(tensor.op for tensor in waiting[-1].inputs),
            *waiting.pop().control_inputs,
        ):
            if before not in seen:
                seen.add(before)
                waiting.append(before)
    return seen


@tf.function(autograph=False)
def one_member_of_six(flat: tf.Tensor, gate: tf.Tensor, early: tf.Tensor) -> tf.Tensor:
    with tf.device(DEVICE):
        exchange = BroadcastExchange(member=1, group_size=6, device=DEVICE)
        plan = binary_blocks(6, length=24)
        return run_plan(
            plan,
            flat,
            member=1,
            exchange=exchange,
            first_instance_key=70,
            wire_dtype=tf.bfloat16,
            receive_after=[gate, tf.identity(early).op],
        )


def broadcasts(graph: Any, kind: str) -> list[tf.Operation]:
    return [op for op in graph.get_operations() if op.type == f"CollectiveBcast{kind}V2"]


def test_receives_wait_for_nothing_but_what_they_are_told_to() -> None:
    graph = one_member_of_six.get_concrete_function(
        tf.TensorSpec([24]), tf.TensorSpec([]), tf.TensorSpec([])
    ).graph
    flat, gate, early = (tensor.op for tensor in graph.inputs)
    receives = broadcasts(graph, "Recv")
    assert len(receives) == 5  # two halvings, the smaller block's, and two of the gather
    for receive in receives:
        behind = operations_behind(receive)
        assert {gate, early} <= behind and flat not in behind
        assert not any(op.type.startswith("CollectiveBcast") for op in behind)
    for send in broadcasts(graph, "Send"):
        assert flat in operations_behind(send)
    assert set(broadcasts(graph, "Send")) <= set(graph.control_outputs)


def keys_of(op: tf.Operation) -> Iterator[int]:
    """The group's size and key, and the instance key."""
    first = 1 if op.type == "CollectiveBcastSendV2" else 0
    return (int(tf.get_static_value(tensor)) for tensor in list(op.inputs)[first : first + 3])


@pytest.mark.parametrize("name", ["ring 5", "binary_blocks 7", "hierarchical halving_doubling"])
def test_each_broadcast_has_one_sender_and_one_receiver_of_equal_dtype_and_length(
    name: str,
) -> None:
    plan = PLANS[name]
    ends: dict[str, Counter[Any]] = {}
    pairs: dict[int, set[int]] = {}  # by group key, which members take part
    for member in range(plan.num_workers):
        with tf.Graph().as_default() as graph:
            graph.control_outputs = []
            run_plan(
                plan,
                tf.zeros([plan.length]),
                member=member,
                exchange=BroadcastExchange(
                    member=member, group_size=plan.num_workers, device=DEVICE
                ),
                first_instance_key=70,
                wire_dtype=tf.bfloat16,
            )
        for kind in ("Send", "Recv"):
            for op in broadcasts(graph, kind):
                size, group_key, instance_key = keys_of(op)
                assert size == 2 and op.device == DEVICE
                assert 70 <= instance_key < 70 + plan.num_steps
                shape = op.inputs[0].shape if kind == "Send" else op.outputs[0].shape
                # bfloat16 travels as the bits of float16.
                assert op.get_attr("T") == tf.float16
                key = (group_key, instance_key, shape[0])
                ends.setdefault(kind, Counter())[key] += 1
                pairs.setdefault(group_key, set()).add(member)
    assert ends["Send"] == ends["Recv"]
    assert len({key[:2] for key in ends["Send"]}) == ends["Send"].total(), "keys collide"
    assert all(len(members) == 2 for members in pairs.values())
    assert all(2**28 <= key < 2**29 for key in pairs), "TensorFlow's own keys, or broadcasts'"
    there_and_back = Counter(frozenset(members) for members in pairs.values())
    assert set(there_and_back.values()) <= {1, 2}, "more groups of a pair than it has directions"


@pytest.mark.parametrize("dtype", EXCHANGED_DTYPES, ids=lambda dtype: dtype.name)
def test_what_a_broadcast_carries(dtype: tf.DType) -> None:
    with tf.Graph().as_default() as graph:
        exchange = BroadcastExchange(member=2, group_size=4, device=DEVICE)
        sent = exchange.send(tf.zeros([5], dtype), peer=3, instance_key=9)
        received = exchange.receive(5, dtype, peer=3, instance_key=9)
    (receive,) = broadcasts(graph, "Recv")
    assert sent.type == "CollectiveBcastSendV2"
    assert (received.dtype, received.shape) == (dtype, [5])
    carried = tf.float16 if dtype == tf.bfloat16 else dtype
    for op in (sent, receive):
        assert op.get_attr("T") == carried
        assert op.device == DEVICE
    # Member 2 to 3 and 3 to 2, of four.
    assert list(keys_of(sent)) == [2, 2**28 + 2 * 4 + 3, 9]
    assert list(keys_of(receive)) == [2, 2**28 + 3 * 4 + 2, 9]


RANGES = st.tuples(st.integers(0, 19), st.integers(1, 20)).filter(lambda ends: ends[0] < ends[1])


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(RANGES, RANGES), max_size=5))
def test_segments_are_an_array_whose_parts_are_replaced(
    steps: list[tuple[tuple[int, int], tuple[int, int]]],
) -> None:
    array = np.arange(20)
    segments = Segments(tf.range(20), length=20)
    for number, ((begin, end), (first, last)) in enumerate(steps, start=1):
        new = 100 * number + np.arange(end - begin, dtype=np.int32)
        array[begin:end] = new
        segments.put(begin, end, tf.constant(new))
        np.testing.assert_array_equal(segments.take(first, last, tf.int64), array[first:last])
    np.testing.assert_array_equal(segments.take(0, 20, tf.int64), array)


def test_segments_taken_are_as_they_were_then() -> None:
    segments = Segments(tf.range(4), length=4)
    before = segments.take(1, 3, tf.int64)
    segments.put(0, 4, tf.zeros([4], tf.int32))
    assert before.numpy().tolist() == [1, 2]
