"""What a worker says when it ends: to the other workers, and to people."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest
import tensorflow as tf

from tf_largebatch.core.errors import MismatchError
from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute import _last_words
from tf_largebatch.distribute._last_words import explanation, how_it_ended, must_be_told
from tf_largebatch.distribute._progress import in_time

TOPOLOGY = ClusterTopology(addresses=tuple(f"h{number}:1" for number in range(12)), rank=1)


def aborted(reason: str) -> tf.errors.OpError:
    return tf.errors.UnavailableError(None, None, f"Collective ops is aborted by: {reason}")


# --- To people


def explained(
    error: str, *, gone: frozenset[str] = frozenset(), ends: dict[int, str] | None = None
) -> str | None:
    return explanation(
        error,
        TOPOLOGY,
        listens=lambda address: address not in gone,
        end_of=lambda rank: (ends or {}).get(rank, ""),
    )


def test_peers_of_the_error_and_those_gone_are_named_with_address() -> None:
    text = explained(
        "Socket closed ... /job:worker/replica:0/task:11 while", gone=frozenset({"h11:1", "h3:1"})
    )
    assert text is not None
    assert text.splitlines() == [
        "tf_largebatch: worker 1 at h1:1 was ended by the error above. See the logs of",
        "  worker 3 at h3:1 is gone",
        "  worker 11 at h11:1, which the error is about, is gone",
    ]


def test_what_a_peer_said_of_its_end_is_passed_on() -> None:
    text = explained(
        "x", gone=frozenset({"h3:1"}), ends={3: "with ValueError: mine", 4: "without an error"}
    )
    assert text is not None
    assert text.splitlines()[1:] == [
        "  worker 3 at h3:1 is gone; it has ended with ValueError: mine"
    ]


def test_a_peer_that_ended_well_was_not_to_be_waited_for() -> None:
    text = explained("x", gone=frozenset({"h3:1"}), ends={3: "without an error"})
    assert text is not None
    assert "it has ended without an error\nWhat it did not call, call it on all workers: " in text


def test_the_coordination_service_is_the_chief() -> None:
    text = explained("Deadline Exceeded\nRPC: /tensorflow.CoordinationService/Heartbeat")
    assert text is not None
    assert text.splitlines()[1:] == ["  worker 0 at h0:1, which the error is about, still listens"]


def test_an_error_of_this_worker_alone_needs_no_words() -> None:
    assert explained("Matrix size-incompatible [[node /job:worker/task:1/device:CPU:0]]") is None


# --- To the other workers


def test_how_it_ended() -> None:
    assert how_it_ended(None) == "without an error"
    assert how_it_ended(KeyError("x")) == "with KeyError: 'x'"
    assert how_it_ended(KeyboardInterrupt()) == "with KeyboardInterrupt: "
    assert len(how_it_ended(ValueError("x" * 10**6))) < 3000


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, False),
        (ValueError("mine"), True),
        (KeyboardInterrupt(), True),
        (tf.errors.InvalidArgumentError(None, None, "a row of mine"), True),
        (MismatchError("all raise it"), False),
        (aborted("Socket closed"), False),
    ],
)
def test_others_are_told_what_they_do_not_know(error: BaseException | None, told: bool) -> None:
    assert must_be_told(error) == told


class Watch:
    """What `_speak` asks of a `ProgressWatch`."""

    def __init__(self) -> None:
        self.published: list[str] = []

    def publish_end(self, how: str) -> None:
        self.published.append(how)

    def end_of(self, rank: int) -> str:
        return ""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, []),
        (ValueError("mine"), ["worker 1 at h1:1 has ended with ValueError: mine"]),
        (aborted("x"), []),
    ],
)
def test_the_end_is_published_and_told(
    error: BaseException | None, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(_last_words, "listens", lambda address, timeout_seconds: True)
    watch, texts = Watch(), []
    _last_words._speak(TOPOLOGY, watch, texts.append)  # type: ignore[arg-type]
    assert watch.published == [how_it_ended(error)]
    assert texts == told


@pytest.mark.parametrize("hangs", ["publish", "tell"])
def test_a_service_that_hangs_or_fails_does_not_hold_up_the_exit(
    hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("mine"), raising=False)
    monkeypatch.setattr(_last_words, "_TELL_SECONDS", 0.2)
    release = threading.Event()
    watch = Watch()
    if hangs == "publish":
        watch.publish_end = lambda how: in_time(release.wait, 0.2)  # type: ignore[method-assign]
    begin = time.monotonic()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(release.set)
        _last_words._speak(TOPOLOGY, watch, lambda _: release.wait())  # type: ignore[arg-type]
    assert 0.2 <= time.monotonic() - begin < 5.0


def test_in_time_forgives_errors() -> None:
    def fails() -> None:
        raise RuntimeError("no service")

    in_time(fails, 5.0)
