"""Who is late, who runs another program: pure judgement, and the watch on a board in memory."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute import _progress
from tf_largebatch.distribute._journal import Position
from tf_largebatch.distribute._progress import ProgressWatch, judge, judge_wait

ADDRESSES = ("a:1", "b:2", "c:3")
TIMEOUT_SECONDS = 60.0


def topology_of(rank: int) -> ClusterTopology:
    return ClusterTopology(addresses=ADDRESSES, rank=rank, task_type="worker", task_index=rank)


def at(arrivals: int, program: str = "p") -> Position:
    return Position(arrivals, f"digest of {program}", f"collectives of {program}")


def judged(
    own: Position, peers: dict[int, Position | None], stalled_seconds: float, rank: int = 0
) -> str | None:
    return judge(
        own,
        peers,
        topology_of(rank),
        stalled_seconds=stalled_seconds,
        timeout_seconds=TIMEOUT_SECONDS,
    )


# --- judge


def test_nobody_is_late_before_the_timeout() -> None:
    assert judged(at(5), {1: at(4), 2: None}, TIMEOUT_SECONDS - 0.01) is None


def test_the_late_are_named_with_address_and_place() -> None:
    text = judged(at(5), {1: at(4), 2: None}, TIMEOUT_SECONDS)
    assert text is not None
    assert "worker 0 at a:1 has waited 60 s (timeout_seconds=60) at arrival 5" in text
    assert "collectives of p" in text
    assert "worker 1 at b:2 stands at arrival 4" in text
    assert "worker 2 at c:3 has reached none" in text


def test_only_the_late_are_named() -> None:
    text = judged(at(5), {1: at(5), 2: at(3)}, TIMEOUT_SECONDS)
    assert text is not None and "worker 2" in text and "worker 1" not in text


@pytest.mark.parametrize("peers", [{1: at(5)}, {1: at(6)}, {1: at(6, "q")}, {}])
def test_whoever_is_not_behind_is_not_waited_for(peers: dict[int, Position | None]) -> None:
    assert judged(at(5), peers, 10 * TIMEOUT_SECONDS) is None


def test_equal_arrivals_at_different_programs_show_both_sides_at_once() -> None:
    text = judged(at(5, "p"), {0: at(5, "p"), 2: at(5, "q")}, 0.0, rank=1)
    assert text is not None
    assert "worker 1 at b:2, arrival 5: [digest of p] collectives of p" in text
    assert "worker 2 at c:3, arrival 5: [digest of q] collectives of q" in text
    assert "worker 0" not in text


def test_different_programs_at_different_arrivals_are_not_compared() -> None:
    assert judged(at(5, "p"), {1: at(4, "q")}, 0.0) is None


def test_workers_that_have_reached_nothing_agree() -> None:
    nothing = Position(0, "", "nothing yet")
    assert judged(nothing, {1: nothing, 2: None}, 0.0) is None


def test_a_worker_that_has_ended_is_not_waited_for() -> None:
    ended = dataclasses.replace(at(4), ended="with ValueError: mine")
    text = judged(at(5), {1: ended, 2: at(4)}, 0.0)
    assert text is not None
    assert "worker 0 at a:1 is at arrival 5 (collectives of p)" in text
    assert "worker 1 at b:2, which has ended with ValueError: mine" in text
    assert "worker 2" not in text


@pytest.mark.parametrize("arrivals", [5, 6])
def test_a_worker_that_came_and_ended_is_not_missed(arrivals: int) -> None:
    ended = dataclasses.replace(at(arrivals), ended="without an error")
    assert judged(at(5), {1: ended}, 10 * TIMEOUT_SECONDS) is None


@pytest.mark.parametrize("ended", ["", "with ValueError: mine"])
def test_a_position_survives_json(ended: str) -> None:
    position = Position(2**40, "ab", 'quotes " and \n lines and ü', ended)
    assert Position.from_json(position.to_json()) == position
    assert position.to_json().isascii()


# --- judge_wait


def wait_judged(
    peers: dict[int, Position | None], *gone: str, own: Position | None = None, rank: int = 0
) -> str | None:
    return judge_wait(
        own or at(5),
        peers,
        topology_of(rank),
        waiting_for="a bucket",
        is_gone=lambda address: address in gone,
    )


def test_whoever_lives_is_waited_for_however_far_behind() -> None:
    """Of a bucket no collective tells; so its being late is for `judge` to say."""
    assert wait_judged({1: at(5), 2: at(1)}) is None
    assert wait_judged({1: None, 2: None}) is None
    assert wait_judged({}) is None


def test_a_worker_that_is_gone_is_named() -> None:
    text = wait_judged({1: at(5), 2: at(5)}, "c:3")
    assert text is not None
    assert "worker 0 at a:1 would wait for ever, with a bucket, for worker 2 at c:3" in text
    assert "which is gone: nobody listens there" in text
    assert "worker 1" not in text
    assert "all it on all workers" not in text  # it was killed; that is no advice


def test_one_that_is_gone_before_it_published_anything_is_named() -> None:
    text = wait_judged({1: None}, "b:2")
    assert text is not None and "worker 1 at b:2, which is gone" in text


def test_how_it_ended_says_more_than_that_it_is_gone() -> None:
    ended = dataclasses.replace(at(5), ended="with ValueError: mine")
    text = wait_judged({1: ended, 2: at(4)}, "b:2", "c:3")
    assert text is not None
    assert "worker 1 at b:2, which has ended with ValueError: mine; worker 2 at c:3" in text
    assert text.count("is gone") == 1


@pytest.mark.parametrize("ended", ["", "without an error"])
def test_a_worker_that_came_further_is_not_missed(ended: str) -> None:
    """It has handed in what is waited for here."""
    assert wait_judged({1: dataclasses.replace(at(6), ended=ended)}, "b:2") is None


def test_nobody_is_asked_who_has_handed_in() -> None:
    asked: list[str] = []

    def is_gone(address: str) -> bool:
        asked.append(address)
        return False

    peers = {0: at(6), 2: at(5)}
    judge_wait(at(5), peers, topology_of(1), waiting_for="a bucket", is_gone=is_gone)
    assert asked == ["c:3"]


# --- ProgressWatch


class DictBoard:
    """A board that all workers of a test share."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.reads = 0

    def publish(self, rank: int, text: str) -> None:
        self.texts[rank] = text

    def read(self, rank: int) -> str | None:
        self.reads += 1
        return self.texts.get(rank)


@dataclasses.dataclass
class World:
    """Two workers' positions, their watches, and a clock that only the test moves."""

    now: float = 1000.0

    def __post_init__(self) -> None:
        self.board = DictBoard()
        self.waits = (0.0, "")  # of both, for a bucket
        self.gone: set[str] = set()
        self.positions = [at(0), at(0)]
        self.complaints: list[str] = []
        self.watches = [
            ProgressWatch(
                ClusterTopology(addresses=ADDRESSES[:2], rank=rank),
                position=lambda rank=rank: self.positions[rank],  # type: ignore[misc]
                board=self.board,
                abort=self.complaints.append,
                timeout_seconds=TIMEOUT_SECONDS,
                waiting=lambda: self.waits,
                is_gone=lambda address: address in self.gone,
            )
            for rank in range(2)
        ]

    def look(self, rank: int, *, after: float = 0.0) -> str | None:
        self.now += after
        return self.watches[rank].look()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(_progress.time, "monotonic", lambda: world.now)
    return world


def test_a_new_position_is_published_and_nobody_is_read(world: World) -> None:
    for arrivals in range(1, 50):
        world.positions[0] = at(arrivals)
        assert world.look(0, after=100.0) is None
        assert Position.from_json(world.board.texts[0]) == at(arrivals)
    assert world.board.reads == 0


def test_a_peer_that_hangs_is_named_after_the_timeout_and_not_before(world: World) -> None:
    world.positions = [at(5), at(4)]
    assert world.look(0) is None and world.look(1) is None
    for _ in range(59):
        assert world.look(0, after=1.0) is None
    text = world.look(0, after=1.0)
    assert text is not None and "worker 1 at b:2 stands at arrival 4" in text


def test_a_peer_that_never_published_is_named(world: World) -> None:
    world.positions[0] = at(1)
    world.look(0)
    world.look(0, after=TIMEOUT_SECONDS)
    text = world.look(0, after=1.0)
    assert text is not None and "worker 1 at b:2 has reached none" in text


def test_a_slow_peer_that_moves_on_in_time_is_not_complained_about(world: World) -> None:
    for step in range(1, 6):
        world.positions = [at(step), at(step - 1)]
        world.look(0), world.look(1)
        for _ in range(50):
            assert world.look(0, after=1.0) is None
        world.positions[1] = at(step)
        world.look(1)
        assert world.look(0, after=1.0) is None


def test_a_peer_between_two_looks_is_not_compared(world: World) -> None:
    """It was at another collective a moment ago, and may be past the one that is published."""
    world.positions = [at(5, "p"), at(4)]
    world.look(0), world.look(1)
    assert world.look(0, after=10.0) is None
    world.positions[1] = at(5, "q")
    world.look(1)
    assert world.look(0, after=1.0) is None
    text = world.look(0, after=1.0)  # it stands still
    assert text is not None and "digest of q" in text


def test_different_programs_are_found_in_seconds(world: World) -> None:
    world.positions = [at(5, "p"), at(5, "q")]
    world.look(0), world.look(1)
    seconds = 0
    while world.look(0, after=1.0) is None:
        seconds += 1
        assert seconds < 8
    assert world.look(1) is None  # its first comparison
    assert "different programs" in str(world.look(1, after=1.0))


def seconds_until(world: World, rank: int = 0) -> tuple[float, str | None]:
    """When a worker complains, looking once a second, and what of."""
    begin = world.now
    for _ in range(50):
        world.waits = (world.now - begin, "a bucket")
        if (text := world.look(rank, after=1.0)) is not None:
            return world.now - begin, text
    return world.now - begin, None


def test_a_wait_for_a_bucket_of_a_worker_that_is_gone_ends_in_seconds(world: World) -> None:
    world.positions = [at(5), at(5)]
    world.look(0), world.look(1)
    world.gone = {"b:2"}
    seconds, text = seconds_until(world)
    assert 3.0 <= seconds < 10.0
    assert text is not None and "with a bucket, for worker 1 at b:2, which is gone" in text


def test_a_wait_for_a_bucket_of_a_worker_that_lives_goes_on(world: World) -> None:
    world.positions = [at(5), at(5)]
    world.look(0), world.look(1)
    assert seconds_until(world) == (50.0, None)


def test_a_worker_without_buckets_asks_for_nobody(world: World) -> None:
    """Who is gone is then TensorFlow's to find out."""
    world.positions = [at(5), at(5)]
    world.look(0), world.look(1)
    world.gone = {"b:2"}
    for _ in range(50):
        assert world.look(0, after=1.0) is None


def test_a_bucket_is_not_missed_before_it_is_late(world: World) -> None:
    world.positions = [at(5), at(5)]
    world.look(0), world.look(1)
    world.gone = {"b:2"}
    for _ in range(50):
        world.waits = (0.5, "always another one")
        assert world.look(0, after=1.0) is None


def test_a_chief_that_is_gone_with_the_board_is_named(world: World) -> None:
    """Who has a bucket under way then need not wait for the timeout."""
    world.positions = [at(5), at(5)]
    world.look(1)
    world.now += 4.0
    error = RuntimeError("no service")
    world.waits = (4.0, "a bucket")
    assert world.watches[1].without_board(error) is None, "it only does not answer"
    world.gone = {"a:1"}
    text = world.watches[1].without_board(error)
    assert text is not None and "for worker 0 at a:1, which is gone" in text
    world.waits = (0.5, "a bucket")
    assert world.watches[1].without_board(error) is None


def test_the_thread_ends_the_wait_and_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    board, aborted = DictBoard(), threading.Event()
    complaints: list[str] = []

    def abort(text: str) -> None:
        complaints.append(text)
        aborted.set()

    watch = ProgressWatch(
        topology_of(0), position=lambda: at(1), board=board, abort=abort, timeout_seconds=1.0
    )
    watch.start()
    begin = time.monotonic()
    assert aborted.wait(10.0)
    assert 0.9 < time.monotonic() - begin < 5.0
    watch._thread.join(5.0)
    assert not watch._thread.is_alive()
    assert len(complaints) == 1 and "worker 1 at b:2" in complaints[0]


def test_a_wait_ends_even_where_the_board_is_gone() -> None:
    class GoneBoard(DictBoard):
        def publish(self, rank: int, text: str) -> None:
            raise RuntimeError("no service")

    complaints: list[str] = []
    watch = ProgressWatch(
        topology_of(0),
        position=lambda: at(1),
        board=GoneBoard(),
        abort=complaints.append,
        timeout_seconds=1.0,
    )
    begin = time.monotonic()
    watch.start()
    watch._thread.join(5.0)
    assert not watch._thread.is_alive()
    assert time.monotonic() - begin > 0.9
    assert "no service" in complaints[0] and "worker 0 at a:1" in complaints[0]


def test_a_stopped_watch_ends() -> None:
    watch = ProgressWatch(
        topology_of(0), position=lambda: at(1), board=DictBoard(), abort=print, timeout_seconds=60.0
    )
    watch.start()
    watch.stop()
    watch._thread.join(5.0)
    assert not watch._thread.is_alive()


# --- The end of a worker


def watch_of(rank: int, board: DictBoard) -> ProgressWatch:
    return ProgressWatch(
        topology_of(rank),
        position=lambda: at(3),
        board=board,
        abort=print,
        timeout_seconds=60.0,
    )


def test_an_end_is_published_and_can_be_asked_for() -> None:
    board = DictBoard()
    watch, other = watch_of(0, board), watch_of(1, board)
    assert other.end_of(0) == ""
    watch.start()
    watch.publish_end("without an error")
    assert not watch._thread.is_alive()
    assert Position.from_json(board.texts[0]) == dataclasses.replace(
        at(3), ended="without an error"
    )
    assert other.end_of(0) == "without an error"


def test_a_board_that_hangs_or_is_gone_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "_LAST_WORD_SECONDS", 0.2)
    release = threading.Event()

    class HangingBoard(DictBoard):
        def publish(self, rank: int, text: str) -> None:
            release.wait()

        def read(self, rank: int) -> str | None:
            raise RuntimeError("no service")

    begin = time.monotonic()
    watch = watch_of(0, HangingBoard())
    try:
        watch.publish_end("without an error")
        assert watch.end_of(1) == ""
    finally:
        release.set()
    assert time.monotonic() - begin < 5.0
