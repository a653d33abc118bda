"""Whole jobs without the price of starting them: each rank is a fork of the test's process that runs `launch.run`.

What a launcher would set in its environment is set in the fork, so the road from the command line to the exit code is
the real one. All ranks write standard error to one file, as to one terminal: who spoke first can be seen.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch._dynamo  # noqa: F401  (torch imports it late: here once, instead of in every rank)

from megalite.train import launch
from tests.train.composing import CONFIGS


class Job:
    """Ranks that run `main` under a configuration, started like those of a launcher that is not torchrun."""

    def __init__(
        self,
        main: Callable[[Any, Any], None],
        ranks: int,
        *overrides: str,
        folder: Path,
        before: Callable[[int], None] = lambda rank: None,
    ) -> None:
        """folder: where the command is typed, and out_dir unless the overrides say. before: called on each rank."""
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        base = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        sys.stdout.flush()
        sys.stderr.flush()
        self.pids: list[int] = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                variables = {key: str(value) for key, value in {**base, "RANK": rank, "LOCAL_RANK": rank}.items()}
                self._child(main, rank, variables, overrides, before)
            self.pids.append(pid)

    def _child(
        self,
        main: Callable[[Any, Any], None],
        rank: int,
        variables: Mapping[str, str],
        overrides: tuple[str, ...],
        before: Callable[[int], None],
    ) -> NoReturn:
        code = 70
        try:
            for descriptor, name in ((1, f"out.{rank}"), (2, "err")):
                file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(file, descriptor)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "HYDRA"))]:
                del os.environ[name]
            os.environ.update(variables)
            os.chdir(self.folder)
            sys.argv = ["train.py", *overrides]
            before(rank)
            launch.run(main, configs=str(CONFIGS))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 71
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def signal(self, signum: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.pids)):
            os.kill(self.pids[rank], signum)

    def await_file(self, name: str, seconds: float = 30.0) -> None:
        """Until a rank has left this file in the folder."""
        end = time.monotonic() + seconds
        while not (self.folder / name).exists():
            assert time.monotonic() < end, f"no rank has left {name}: {self.err()}"
            time.sleep(0.02)

    def codes(self, seconds: float = 30.0) -> list[int]:
        """Exit codes by rank, -signal for a killed one, once all have ended. Fails if some have not in time."""
        end, codes = time.monotonic() + seconds, {}
        while len(codes) < len(self.pids) and time.monotonic() < end:
            for rank, pid in enumerate(self.pids):
                if rank not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(found[1])
            time.sleep(0.02)
        late = [rank for rank in range(len(self.pids)) if rank not in codes]
        for rank in late:
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
        assert not late, f"ranks {late} had not ended after {seconds} s:\n{self.err()}"
        return [codes[rank] for rank in range(len(self.pids))]

    def err(self) -> str:
        """What all ranks wrote to standard error."""
        path = self.folder / "err"
        return path.read_text() if path.exists() else ""
