"""Instance keys of collectives, and where a worker stands."""

from __future__ import annotations

import threading

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.distribute import _journal
from tf_largebatch.distribute._journal import CollectiveJournal, Position

RECORDS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=6)


def keys_of(records: list[str], journal: CollectiveJournal | None = None) -> list[int]:
    """The keys of a graph that exchanges `records`, one after the other."""
    journal = journal or CollectiveJournal()
    plan = journal.new_plan()
    keys = []
    for record in records:
        plan.records.append(record)
        keys.append(journal.key_of(plan))
    return keys


@settings(deadline=None, max_examples=30)
@given(RECORDS)
def test_equal_programs_have_equal_keys_however_often_they_are_traced(records: list[str]) -> None:
    journal = CollectiveJournal()
    keys = keys_of(records, journal)
    assert keys_of(records, journal) == keys
    assert keys_of(records) == keys
    assert len(set(keys)) == len(keys)
    assert all(2**30 <= key < 2**31 for key in keys)  # an int32, far above TensorFlow's own


@settings(deadline=None, max_examples=30)
@given(RECORDS, RECORDS)
def test_keys_are_equal_as_far_as_programs_are(first: list[str], second: list[str]) -> None:
    journal = CollectiveJournal()
    is_same_so_far = [first[: n + 1] == second[: n + 1] for n in range(len(first))]
    keys = keys_of(second, journal)
    for n, key in enumerate(keys_of(first, journal)):
        assert (key in keys) == (is_same_so_far[n] and n < len(second))


def test_texts_of_one_hash_take_the_next_free_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_journal, "_FIRST_HASHED_KEY", 64)  # also the size of the key space
    texts = [str(number) for number in range(40)]
    journals = [CollectiveJournal() for _ in range(2)]
    first, second = ([keys_of([text], journal)[0] for text in texts] for journal in journals)
    assert first == second
    assert len(set(first)) == len(texts)
    assert all(64 <= key < 128 for key in first)
    hashes = [keys_of([text])[0] for text in texts]
    assert hashes != first, "no two texts collided: the test shows nothing"
    assert [keys_of([text], journals[0])[0] for text in texts] == first


def test_a_worker_that_has_reached_nothing() -> None:
    assert CollectiveJournal().position() == Position(0, "", "nothing yet")


def test_an_eager_arrival() -> None:
    journal, other = CollectiveJournal(), CollectiveJournal()
    for name in ("a", "b", "a"):
        journal.arrive(name)
    assert journal.position().arrivals == 3
    assert journal.position().description == "a"
    other.arrive("a")
    assert other.position().digest == journal.position().digest
    other.arrive("b")
    assert other.position().digest != journal.position().digest


def test_a_graph_arrives_each_time_that_it_runs_also_in_a_loop() -> None:
    journal = CollectiveJournal()
    plan = journal.new_plan()

    @tf.function
    def steps(count: tf.Tensor) -> None:
        for _ in tf.range(count):
            journal.arrive_in_graph(plan, tf.constant(0.0))

    plan.records += ["first", "second"]
    steps(tf.constant(3))
    assert journal.position() == Position(3, plan.digest(), "first, second")
    journal.arrive("another")
    steps(tf.constant(2))
    assert journal.position() == Position(6, plan.digest(), "first, second")


def test_the_position_is_read_from_another_thread_while_a_graph_runs() -> None:
    journal = CollectiveJournal()
    plan = journal.new_plan()
    plan.records.append("all")
    seen: list[int] = []
    done = threading.Event()

    @tf.function
    def step() -> None:
        journal.arrive_in_graph(plan, tf.constant(0.0))

    def read() -> None:
        while not done.is_set():
            seen.append(journal.position().arrivals)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(200):
        step()
    done.set()
    thread.join(10.0)
    assert seen == sorted(seen)
    assert journal.position().arrivals == 200


def test_a_long_description_is_cut_and_its_digest_is_not() -> None:
    journal = CollectiveJournal()
    plans = [journal.new_plan() for _ in range(2)]
    for plan, last in zip(plans, ("x", "y"), strict=True):
        plan.records += [f"r{number}" for number in range(19)] + [last]
    assert plans[0].describe() == plans[1].describe()
    assert plans[0].describe().startswith("r0, r1, ")
    assert plans[0].describe().endswith("r11, and 8 more")
    assert plans[0].digest() != plans[1].digest()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**62), st.text(), st.text())
def test_a_position_survives_json(arrivals: int, digest: str, description: str) -> None:
    position = Position(arrivals, digest, description)
    assert Position.from_json(position.to_json()) == position


# --- Collectives that run eagerly


def test_an_eager_collective_has_one_key_that_is_no_graphs() -> None:
    journals = [CollectiveJournal() for _ in range(2)]
    keys = [[journal.eager_key(record) for record in "aba"] for journal in journals]
    assert keys[0] == keys[1]
    assert keys[0][0] == keys[0][2] != keys[0][1]
    assert keys_of(["a"], journals[0])[0] not in keys[0]
    in_function = journals[0].new_plan(("a",))
    in_function.records.append("a")
    assert journals[0].key_of(in_function) not in keys[0]


def test_details_are_for_people_only() -> None:
    positions = []
    for name in ("dense", "dense_1"):
        journal = CollectiveJournal()
        journal.arrive("sum of variable 1", f"reads {name}")
        positions.append(journal.position())
    assert positions[0].digest == positions[1].digest
    assert positions[1].description == "sum of variable 1 (reads dense_1)"


def test_progress_is_runs_and_collectives_in_graphs() -> None:
    journal = CollectiveJournal()
    seen = [journal.progress()]
    plan = journal.new_plan()
    plan.records.append("a")

    @tf.function
    def step() -> None:
        journal.note_run()
        journal.arrive_in_graph(plan, tf.constant(1.0))

    for act in (step, step, journal.note_run, lambda: journal.arrive("b")):
        act()
        seen.append(journal.progress())
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 2), (3, 2)]
    assert journal.position().arrivals == 3
