"""A process that is asked to end does, by itself if it can and by force if it cannot."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from megalite.train import guard
from megalite.train.guard import Guard, Stopped, within


def ended(fn: Callable[[], None], *signals: int, apart_seconds: float = 0.3) -> tuple[int, float]:
    """Exit code of a fork that runs fn() until it is told to end, and how long it took from the first signal on."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"x")
        try:
            fn()
            os._exit(50)
        except BaseException:
            os._exit(51)
    os.read(read, 1)
    time.sleep(0.2)  # until it stands where it is to be interrupted
    began = time.monotonic()
    for signum in signals:
        os.kill(pid, signum)
        time.sleep(apart_seconds)
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() - began > 20:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for descriptor in (read, write):
        os.close(descriptor)
    return os.waitstatus_to_exitcode(found[1]), time.monotonic() - began


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(guard, "UNWIND_SECONDS", 0.6)
    monkeypatch.setattr(guard, "SAME_SIGNAL_SECONDS", 0.1)


def blocked_in_c() -> None:
    """As in a collective whose peer does not come: no Python handler can run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    store.get("what nobody sets")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_unwinds_and_later_ones_are_ignored_from_then_on(signum, code):
    def run() -> None:
        try:
            with Guard():
                time.sleep(30)
        except Stopped as stop:
            assert stop.signum == signum
            os.kill(os.getpid(), signal.SIGTERM)  # the launcher's, while this process is already on its way out
            os._exit(128 + stop.signum)

    assert ended(run, signum)[0] == code


def test_a_process_blocked_in_c_ends_by_force(hasty):
    def run() -> None:
        with Guard():
            blocked_in_c()

    code, seconds = ended(run, signal.SIGTERM)
    assert code == 143 and seconds >= 0.5


def ignoring() -> None:
    with Guard():
        while True:
            with contextlib.suppress(Stopped):
                time.sleep(30)


def test_a_second_signal_ends_a_process_at_once_but_not_one_that_a_launcher_merely_passes_on(monkeypatch, hasty):
    monkeypatch.setattr(guard, "UNWIND_SECONDS", 60.0)
    code, seconds = ended(ignoring, signal.SIGINT, signal.SIGINT, apart_seconds=0.3)
    assert code == 130 and seconds < 10
    monkeypatch.setattr(guard, "UNWIND_SECONDS", 2.0)
    monkeypatch.setattr(guard, "SAME_SIGNAL_SECONDS", 60.0)
    code, seconds = ended(ignoring, signal.SIGINT, signal.SIGTERM, apart_seconds=0.05)
    assert code == 130 and seconds >= 1.9


def test_of_several_deadlines_the_soonest_ends_a_process_with_the_latest_code(tmp_path):
    def run() -> None:
        with Guard() as mine:
            mine.on_exit.append((tmp_path / "told").touch)
            mine.end_within(0.2, 3)
            mine.end_within(60.0, 4)
            blocked_in_c()

    assert ended(run)[0] == 4
    assert (tmp_path / "told").exists()


def test_what_may_hang_is_limited_and_what_does_not_is_let_go():
    def hanging() -> None:
        with Guard() as mine, mine.limit(0.2, 9):
            blocked_in_c()

    def quick() -> None:
        with Guard() as mine:
            with mine.limit(0.1, 9):
                pass
            time.sleep(0.5)
            os._exit(0)

    assert ended(hanging)[0] == 9 and ended(quick)[0] == 0


def test_a_guard_that_saw_no_end_leaves_the_signals_as_they_were():
    before = [signal.getsignal(signum) for signum in guard.SIGNALS]
    with Guard() as mine:
        assert [signal.getsignal(signum) for signum in guard.SIGNALS] != before
        ticks: list[int] = []
        mine.on_tick.append(lambda: ticks.append(1))
        while not ticks:
            time.sleep(0.01)
    assert [signal.getsignal(signum) for signum in guard.SIGNALS] == before


def test_a_call_that_raises_or_takes_too_long_has_no_result():
    assert within(10.0, lambda: 3) == 3
    assert within(10.0, lambda: 1 // 0) is None
    assert within(0.05, lambda: time.sleep(1) or 3) is None
