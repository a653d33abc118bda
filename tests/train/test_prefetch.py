"""Batches made ahead: the same ones in the same order, and no wait of either side outlives the other."""

from __future__ import annotations

import threading
import time

import pytest

from megalite.train.prefetch import PATIENCE_SECONDS, Prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    for thread in threads():
        thread.join(2 * PATIENCE_SECONDS)
    assert not threads()


@pytest.mark.parametrize("ahead", [0, 1, 2, 100])
def test_batches_come_in_order_each_made_once(ahead):
    made = []
    prefetch = Prefetch(lambda step: made.append(step) or step * step, ahead=ahead, last=20)
    assert [prefetch.take(step) for step in range(5, 21)] == [step * step for step in range(5, 21)]
    prefetch.close()
    assert made == list(range(5, 21))  # nothing past the last


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_are_made_ahead_than_asked_for(ahead):
    made = []
    prefetch = Prefetch(lambda step: made.append(step) or step, ahead=ahead, last=1000)
    assert prefetch.take(1) == 1
    deadline = time.monotonic() + 10
    while len(made) < 1 + ahead and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)  # the time for one too many
    assert made == list(range(1, 2 + ahead))
    prefetch.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_any_step_may_be_taken_the_next_the_same_one_before_and_past_the_end(ahead):
    prefetch = Prefetch(lambda step: step, ahead=ahead, last=10)
    steps = [1, 2, 2, 7, 8, 1, 10, 11, 11, 500, 3, 4]
    assert [prefetch.take(step) for step in steps] == steps
    prefetch.close()
    assert prefetch.take(5) == 5  # begins again
    prefetch.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_is_raised_at_its_step_after_the_batches_before_it(ahead):
    def make(step: int) -> int:
        if step == 4:
            raise ValueError("step 4 cannot be read")
        return step

    prefetch = Prefetch(make, ahead=ahead, last=10)
    assert [prefetch.take(step) for step in (1, 2, 3)] == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(ValueError, match="step 4 cannot be read"):
            prefetch.take(4)
    assert prefetch.take(5) == 5
    prefetch.close()


def test_closing_ends_a_thread_that_waits_for_room():
    prefetch = Prefetch(lambda step: step, ahead=1, last=10**6)
    prefetch.take(1)
    (thread,) = threads()
    started = time.monotonic()
    prefetch.close()
    prefetch.close()  # twice is once
    assert not thread.is_alive() and time.monotonic() - started < PATIENCE_SECONDS


def test_closing_does_not_wait_for_a_batch_that_never_comes():
    """A file system that hangs; the thread is a daemon, so the process ends too."""
    release = threading.Event()
    prefetch = Prefetch(lambda step: step if step == 1 else release.wait(60), ahead=1, last=10)
    prefetch.take(1)
    assert all(thread.daemon for thread in threads())
    started = time.monotonic()
    prefetch.close()
    assert time.monotonic() - started < PATIENCE_SECONDS + 5
    release.set()


def test_the_wait_for_a_batch_is_known_and_is_none_for_one_that_is_ready():
    prefetch = Prefetch(lambda step: time.sleep(0.2) or step, ahead=1, last=10)
    prefetch.take(1)
    assert prefetch.waited_seconds >= 0.19
    time.sleep(1.0)  # while the loop computes, the next one is made
    prefetch.take(2)
    assert prefetch.waited_seconds < 0.1
    prefetch.close()
