"""The harness under every distributed test: results come in rank order, and no fault of a rank is silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed, run


def _who_and_sum() -> tuple[int, int, float, torch.Tensor]:
    x = torch.tensor([float(dist.get_rank())], dtype=torch.float64)
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item(), torch.rand(2)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_results_come_in_rank_order_from_ranks_that_share_a_group_and_a_seed(n):
    results = run(_who_and_sum, n)
    assert [r[0] for r in results] == list(range(n))
    assert {r[1] for r in results} == {n}
    assert {r[2] for r in results} == {n * (n - 1) / 2}
    assert all(torch.equal(r[3], results[0][3]) for r in results)


def test_arguments_and_closures_reach_the_ranks_and_tensors_come_back():
    base = torch.arange(3)
    results = run(lambda scale: base * scale + dist.get_rank(), 2, 10)
    assert torch.equal(torch.stack(results), torch.tensor([[0, 10, 20], [1, 11, 21]]))


def _rank_two_raises_while_the_others_wait_for_it() -> None:
    if dist.get_rank() == 2:
        raise ZeroDivisionError("the cause")
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_raises_fails_the_test_with_its_own_traceback_and_no_other():
    began = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run(_rank_two_raises_while_the_others_wait_for_it, 4, timeout=30)
    text = str(failure.value)
    assert text.startswith("rank 2 of 4 raised:\nTraceback")
    assert "_rank_two_raises_while_the_others_wait_for_it" in text and "ZeroDivisionError: the cause" in text
    assert text.count("raised:") == 1 and "ranks [0, 1, 3] were still running" in text
    assert time.monotonic() - began < 15, "the others' waiting must not be waited for"


def test_an_error_on_every_rank_is_printed_whole_only_once():
    with pytest.raises(RanksFailed) as failure:
        run(lambda: (dist.barrier(), int("not a number")), 3, timeout=30)
    assert str(failure.value).count("Traceback") == 1
    assert str(failure.value).count("ended alike: ValueError") == 2


def _rank_one_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_a_killed_rank_is_named_with_its_signal_before_the_errors_it_causes():
    began = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run(_rank_one_is_killed, 3, timeout=30)
    assert str(failure.value).startswith("rank 1 of 3 died of SIGKILL")
    assert time.monotonic() - began < 15


def test_a_rank_that_leaves_by_exit_is_named_with_its_code():
    with pytest.raises(RanksFailed, match="rank 0 of 1 died of exit code 7"):
        run(lambda: os._exit(7), 1)


def _rank_zero_sleeps_for_ever() -> None:
    if dist.get_rank() == 0:
        _asleep_in_a_function_with_this_name()
    dist.all_reduce(torch.ones(1))


def _asleep_in_a_function_with_this_name() -> None:
    time.sleep(3600)


def test_a_hang_ends_at_the_timeout_with_the_stack_of_each_rank_that_had_not_returned():
    began = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run(_rank_zero_sleeps_for_ever, 2, timeout=2)
    text = str(failure.value)
    assert text.startswith("ranks [0, 1] of 2 had not returned after 2 s")
    of_rank_0, of_rank_1 = text.split("rank 0:\n")[1].split("rank 1:\n")
    assert "_asleep_in_a_function_with_this_name" in of_rank_0
    assert "all_reduce" in of_rank_1
    assert 2 <= time.monotonic() - began < 20


def test_no_process_of_a_failed_run_stays_behind():
    """Each rank leaves its pid before one fails; after the failure none of them is alive."""

    def leave_a_pid_and_hang(folder: Path) -> None:
        (folder / str(os.getpid())).touch()
        dist.barrier()
        if dist.get_rank() == 0:
            raise ValueError("enough")
        time.sleep(3600)

    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(RanksFailed, match="enough"):
            run(leave_a_pid_and_hang, 3, Path(folder))
        pids = [int(entry.name) for entry in Path(folder).iterdir()]
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_mismatched_sizes_name_both_shapes_rather_than_abort():
    with pytest.raises(RanksFailed) as failure:
        run(lambda: dist.all_reduce(torch.ones(2 + dist.get_rank())), 2, timeout=30)
    text = str(failure.value)
    assert "raised:" in text and "TensorShape=[2]" in text and "TensorShape=[3]" in text


def test_a_result_that_cannot_be_pickled_is_an_error_and_not_a_hang():
    with pytest.raises(RanksFailed, match="pickle"):
        run(lambda: lambda: None, 1, timeout=30)


def test_runs_at_once_in_several_processes_do_not_meet():
    """Two test sessions on one host share no port and no file: both get their own sums."""
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "from tests.ranks import run\n"
        "from tests.test_ranks import _who_and_sum\n"
        "assert [r[2] for _ in range(3) for r in run(_who_and_sum, 2)] == [1.0] * 6\n"
    )
    root = Path(__file__).parents[1]
    both = [subprocess.Popen([sys.executable, "-c", program], cwd=root) for _ in range(2)]
    assert [process.wait(timeout=100) for process in both] == [0, 0]


def test_a_parent_with_many_threads_is_refused_since_its_fork_could_hang():
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="2 threads"):
            run(_who_and_sum, 1)
    finally:
        torch.set_num_threads(1)
