"""Ranks started for a demonstration share one group, and an error of one of them reaches who started them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.comm import start_all_reduce
from megalite.comm.start import Started, start


def _leave_the_sum(started: Started, folder: str) -> None:
    total = start_all_reduce(torch.tensor([2.0**started.world.rank]), started.world).wait()
    Path(folder, str(started.world.rank)).write_text(f"{total.item():g} {torch.get_num_threads()}")


def test_every_rank_is_called_once_with_one_thread_in_a_group_of_all(tmp_path):
    start(_leave_the_sum, str(tmp_path), ranks=3)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"0": "7 1", "1": "7 1", "2": "7 1"}


def _fail_on_rank_one(started: Started) -> None:
    if started.world.rank == 1:
        raise ZeroDivisionError("on rank one")
    start_all_reduce(torch.ones(1), started.world).wait()


def test_what_a_rank_raises_ends_the_others_and_reaches_the_caller_before_what_it_causes():
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 raised:\n(.*\n)*ZeroDivisionError: on rank one"):
        start(_fail_on_rank_one, ranks=2)


def test_a_number_of_ranks_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="0 ranks"):
        start(_leave_the_sum, "", ranks=0)
