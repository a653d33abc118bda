"""Starts ranks on this machine, or joins those that torchrun has started: for demonstrations and benchmarks.

Training is launched by megalite/train/launch.py, which also restarts, logs and ends well where a rank fails.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megalite.mesh import Axis


class Started(NamedTuple):
    """A rank of a running group: `world` joins all ranks, `store` is shared by them, `device` is where tensors go."""

    world: Axis
    store: dist.Store
    device: str


def start(fn: Callable[..., None], *args: Any, ranks: int | None = None, backend: str = "gloo") -> None:
    """Calls `fn(started, *args)` once on every rank, with one thread each, and returns when it has returned on all.

    Under torchrun this process is one of the ranks and `ranks` must be None; elsewhere `ranks` (None: 1) are started
    here and fn must be importable. backend: "gloo", or "nccl" with a GPU for each rank. Raises ValueError where ranks
    cannot be, and RuntimeError with the first traceback where a rank raises, which ends the others.
    """
    if dist.is_torchelastic_launched():
        if ranks is not None:
            raise ValueError(f"{ranks} ranks are asked for under torchrun, which has started its own: leave out one")
        store, rank, size = next(dist.rendezvous("env://"))
        _join(store, rank, size, backend, fn, args)
        return
    ranks = 1 if ranks is None else ranks
    if ranks < 1:
        raise ValueError(f"{ranks} ranks cannot be started; take at least 1")
    from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

    # A spawned process imports torch again, for seconds; a fork is safe on Linux, as long as no GPU has been touched.
    method = "fork" if sys.platform == "linux" and backend == "gloo" else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        call = (ranks, folder, backend, fn, args)
        try:
            start_processes(_started_here, call, nprocs=ranks, start_method=method)
        except ProcessRaisedException as error:
            raise RuntimeError(Path(folder, "failure").read_text()) from error


def _started_here(rank: int, size: int, folder: str, backend: str, fn: Callable[..., None], args: Any) -> None:
    try:
        _join(dist.FileStore(str(Path(folder, "rendezvous")), size), rank, size, backend, fn, args)
    except Exception:
        # The cause writes before its connections close, so before the peers fail for want of it: the first is kept.
        with contextlib.suppress(FileExistsError), open(Path(folder, "failure"), "x") as file:
            file.write(f"rank {rank} of {size} raised:\n{traceback.format_exc()}")
        raise


def _join(store: dist.Store, rank: int, size: int, backend: str, fn: Callable[..., None], args: Any) -> None:
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size)
    fn(Started(Axis("world", size, rank, dist.group.WORLD), store, device), *args)
    dist.barrier()  # nobody leaves, and so closes its connections, while another still waits
    dist.destroy_process_group()
