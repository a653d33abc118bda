"""How a run can end: its code by the error, and what ranks read of each other's end on the board."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megalite.data import DataError
from megalite.train.failure import Board, BoardGone, Card, Ending, code_of, one_line, write_error_file
from megalite.train.finite import NotFiniteError
from megalite.train.guard import Stopped
from megalite.train.strict import ConfigError


def test_the_codes_by_error():
    class OutOfMemoryError(RuntimeError):
        """As torch's: known by its name."""

    expected = [
        (RuntimeError("x"), 1),
        (ConfigError("x"), 2),
        (DataError("x"), 3),
        (NotFiniteError("x"), 5),
        (OutOfMemoryError("x"), 6),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 6),
        (KeyboardInterrupt(), 130),
        (Stopped(signal.SIGTERM), 143),
        (SystemExit(4), 4),
        (SystemExit("words"), 1),
        (SystemExit(), 0),
    ]
    assert [code_of(error) for error, _ in expected] == [code for _, code in expected]
    assert one_line(ValueError("first\nsecond")) == "ValueError: first" and one_line(KeyError()) == "KeyError"


def board(rank: int = 0, store=None, **keywords) -> Board:
    return Board(dist.HashStore() if store is None else store, rank=rank, size=2, **keywords)


def test_on_the_board_the_first_ending_stands_and_one_rank_has_the_word():
    store = dist.HashStore()
    boards = [board(rank, store) for rank in range(2)]
    first, second = Ending("failed", 3, 1, "bad"), Ending("stopped", 143, 0, "SIGTERM")
    assert boards[0].ending() is None
    assert boards[1].claim(first) and not boards[0].claim(second)
    assert not boards[1].claim(first)  # another thread of the same rank
    assert boards[0].ending() == boards[1].ending() == first
    assert boards[0].told(0.0) == (None, [])
    boards[1].tell(first, {1})
    assert boards[0].told(0.0) == (first, [1])
    boards[0].write("state", "here")
    assert boards[1].read("state") == {0: "here"} and boards[1].read("state", ranks=[1]) == {}


def test_a_board_whose_store_has_failed_once_is_not_asked_again():
    class Gone:
        calls = 0

        def check(self, keys):
            self.calls += 1
            raise dist.DistNetworkError("gone")

    store = Gone()
    lost = board(store=store)
    for _ in range(3):
        with pytest.raises(BoardGone):
            lost.ending()
    assert store.calls == 1 and lost.gone


def test_the_keeper_of_the_store_waits_for_the_others_but_not_for_ever():
    store = dist.HashStore()
    began = time.monotonic()
    board(0, store, keeper=True).leave(0.2)
    assert time.monotonic() - began >= 0.2
    board(1, store).leave(30.0)
    board(0, store, keeper=True).leave(30.0)
    assert time.monotonic() - began < 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_card_tells_whether_its_process_runs_is_stopped_or_is_gone():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    here = Card.mine()
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    card = Card(here.machine, pid, started)
    try:
        assert here.state() == card.state() == "running"
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert card.state() == "stopped"
        assert Card("another machine", pid, started).state() == ""
        assert Card(here.machine, pid, started + 1).state() == "gone"  # the number is another process's by now
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert card.state() == "gone"


def test_torchrun_finds_the_first_failure_in_the_error_file(tmp_path):
    path = str(tmp_path / "error.json")
    write_error_file(None, "nobody looks")
    write_error_file(path, "RuntimeError: x", "Traceback ...")
    write_error_file(path, "a consequence", consequence=True)
    message = json.loads(Path(path).read_text())["message"]
    assert message["message"] == "RuntimeError: x" and message["extraInfo"]["py_callstack"] == "Traceback ..."
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 10
