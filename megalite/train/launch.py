"""From a command line to `main(config, world)` on each rank, and back to one exit code.

The only module that reads the environment.

    launch.run(main)            in train.py, started by `python` or by any launcher that sets torchrun's variables

1. The launcher's variables say which rank this is (`Place`). With none, it is one process and no process group is made.
2. Hydra composes the configuration; `load` and `check` accept it or refuse it, all before torch is imported.
3. Threads, device, backend and process group are set up as the configuration says (`World`), and main runs, watched
   (`Watch`): no rank waits for another longer than cluster.timeout_seconds.
4. On every way out the process group is destroyed, all ranks end, and the cause is said once (`conclude`). Before
   there is a group, rank 0 says a refusal; another rank that has the same to say first waits, since the launcher ends
   the job when rank 0 is gone. If it does not, rank 0 had nothing to say, and the waiting rank speaks.

The exit codes stand in megalite/train/failure.py.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megalite.train.check import check
from megalite.train.compose import compose
from megalite.train.config import Config, LinkConfig, load
from megalite.train.expect import available_bytes, require_memory
from megalite.train.failure import CONFIG_CODE, REFUSALS, Board, code_of, trace_of
from megalite.train.guard import UNWIND_SECONDS, Ended, Guard, Stopped, within
from megalite.train.place import Place, choose_device
from megalite.train.streams import open_missing
from megalite.train.strict import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store

    from megalite.train.progress import Mark, Progress
    from megalite.train.watchdog import Watch

HOLD_SECONDS = 5.0
"""How long a rank other than 0 keeps a refusal to itself: launchers end a job that lost rank 0 much sooner."""
GROUP_EXTRA_SECONDS = 60.0
"""How much longer than the watch the process group itself would wait: the watch has more to say."""
DESTROY_SECONDS = 10.0


@dataclass(frozen=True)
class World:
    """What main is told about where it runs.

    device: cpu, or cuda:<local rank>. threads: of this rank, on the CPU. cache_dir: for what many runs share.
    local_size: how many ranks share this machine. progress: what a watch says of this rank, None where there is none.
    """

    rank: int
    size: int
    device: str
    backend: str
    threads: int
    cache_dir: Path
    local_size: int = 1
    progress: Progress | None = None

    def describe(self) -> str:
        """One line for the run's header."""
        return f"{self.device.split(':')[0]}, {self.backend}, {self.threads} threads each"

    def at(self, step: int) -> None:
        """This rank begins a step: what is said of it, should it hang or fail."""
        if self.progress is not None:
            self.progress.step = step


def run(main: Callable[[Config, World], None], *, configs: str = "configs", name: str = "train") -> NoReturn:
    """Run `main` under the configuration that the command line asks for, and exit with the code of what happened.

    configs: the folder of Hydra's files, beside the file that main stands in. Does not return.
    """
    open_missing()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # else the streams of many groups queue behind each other
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")  # the flight record: a hang's report is read together with it
    with_traces = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises to us what it would print on every rank
    try:
        place = Place.read(os.environ)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(CONFIG_CODE)
    folder = Path(main.__code__.co_filename).resolve().parent / configs
    code, said = 0, ""
    try:
        with Guard() as guard:
            launcher = Launcher(place, main, guard, with_traces)
            compose(launcher.job, folder=folder, name=name, rank=place.rank)
    except Ended as ended:
        sys.exit(ended.code)
    except KeyboardInterrupt as stop:  # before or after a job
        if place.rank == 0:
            print(f"stopped by {stop}" if isinstance(stop, Stopped) else "stopped", file=sys.stderr)
        sys.exit(code_of(stop))
    except SystemExit as stop:  # of the argument parser, which has had its say
        code = code_of(stop)
    except Exception as error:
        code = code_of(error)
        if code not in REFUSALS:
            print(f"rank {place.rank} failed:\n{trace_of(error)}", file=sys.stderr, flush=True)
            sys.exit(code)
        said = (trace_of(error) if with_traces else "") + f"error: {error}"
    if code and place.rank:
        time.sleep(HOLD_SECONDS)
    if said:
        print(said, file=sys.stderr, flush=True)
    sys.exit(code)


@dataclass
class Launcher:
    """Runs `main` for each configuration of a command line, each time in a world of its own."""

    place: Place
    main: Callable[[Config, World], None]
    guard: Guard
    with_traces: bool = False
    jobs: int = 0

    def job(self, values: dict[str, Any]) -> None:
        """One configuration as Hydra composed it. Raises ConfigError, before torch is imported, if it cannot run.

        What main raises is said here, and then raised on as `Ended` with the exit code.
        """
        try:
            config = check(load(values), self.place.size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        world = self.world(config)
        require_memory(config, available_bytes(world.device, local_ranks=world.local_size))
        # A group made twice on one store reads the first one's addresses, and so does one made after a restart.
        prefix = f"attempt{self.place.attempt}/job{self.jobs}"
        self.jobs += 1
        with self.watch(config, world, prefix) as watch:
            try:
                self._watched(config, world, watch, prefix)
            except Ended as ended:
                self.guard.end_within(2 * UNWIND_SECONDS, ended.code)
                self._leave(watch, UNWIND_SECONDS)
                raise

    def _watched(self, config: Config, world: World, watch: Watch, prefix: str) -> None:
        from megalite.train.conclude import conclude

        try:
            with self.process_group(world, config.cluster.timeout_seconds, prefix), network(config.link, world.device):
                try:
                    self.main(config, world)
                except BaseException as error:
                    # Before the group is destroyed, so that the word is there when the peers' collectives fail.
                    code = conclude(error, watch, with_traces=self.with_traces)
                    _forget_frames(error)
                    raise Ended(code) from error
            self._leave(watch, config.cluster.timeout_seconds)
            # Who has waited for the others may have seen one of them fail.
            ending = within(UNWIND_SECONDS, watch.board.ending) if self.keeps_store else None
            if ending is not None:
                self.guard.unwinding = True
                raise Ended(ending.code)
        except Ended:
            raise
        except BaseException as error:  # of the group itself, or of a peer that has not come to its end
            raise Ended(conclude(error, watch, with_traces=self.with_traces)) from error

    def _leave(self, watch: Watch, seconds: float) -> None:
        """This rank has ended its job; the one that keeps the store waits so long for the others to end theirs."""
        within(seconds + 1.0, lambda: watch.board.leave(seconds))

    def world(self, config: Config) -> World:
        """Threads, device and backend as configured. Raises ConfigError for what this machine does not have."""
        import torch

        from megalite.data import default_cache_dir
        from megalite.train.progress import Progress

        place = self.place
        threads = config.cluster.threads or place.omp_threads or max(1, _cores() // place.local_size)
        torch.set_num_threads(threads)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device, backend = choose_device(config, place, gpus=gpus)
        if device != "cpu":
            torch.cuda.set_device(device)
        progress = Progress(None if device == "cpu" else _mark_on_gpu)
        cache_dir = default_cache_dir(os.environ, home_or_stand_in())
        return World(place.rank, place.size, device, backend, threads, cache_dir, place.local_size, progress)

    @contextmanager
    def watch(self, config: Config, world: World, prefix: str) -> Iterator[Watch]:
        """This rank watched, over a board of all ranks; the rank that keeps the store leaves last."""
        import torch.distributed as dist

        from megalite.train.watchdog import Watch

        assert world.progress is not None
        if self.place.master is None:
            store: Store = dist.HashStore()
        else:
            _ = self.store  # first, since one of the ranks may keep it
            store = self._connect()  # of its own: what waits in a client blocks every other thread that asks it
        store = dist.PrefixStore(f"{prefix}/board", store)
        board = Board(store, rank=world.rank, size=world.size, keeper=self.keeps_store)
        watch = Watch(
            board,
            world.progress,
            self.guard,
            timeout_seconds=config.cluster.timeout_seconds,
            folder=Path(config.out_dir) / "hang",
            record=_flight_record,
            error_file=self.place.error_file,
        )
        with watch:
            yield watch

    @contextmanager
    def process_group(self, world: World, timeout_seconds: float, prefix: str) -> Iterator[None]:
        """The default process group, if a launcher started this process; destroyed on every way out."""
        if self.place.master is None:
            yield
            return
        import torch.distributed as dist

        dist.init_process_group(
            world.backend,
            store=dist.PrefixStore(prefix, self.store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_seconds + GROUP_EXTRA_SECONDS),
        )
        code = 0
        try:
            yield
        except Ended as ended:
            code = ended.code
            raise
        finally:
            with self.guard.limit(DESTROY_SECONDS, code):
                dist.destroy_process_group()

    @property
    def keeps_store(self) -> bool:
        return self.place.master is not None and self.place.rank == 0 and not self.place.agent_store

    @cached_property
    def store(self) -> Store:
        """The rendezvous, one for all jobs: torchrun's agent keeps it, else rank 0 does."""
        return self._connect(serve=self.keeps_store)

    def _connect(self, *, serve: bool = False) -> Store:
        import torch.distributed as dist

        assert self.place.master is not None
        host, port = self.place.master
        return dist.TCPStore(host, port, is_master=serve, wait_for_workers=False)


def network(link: LinkConfig, device: str) -> AbstractContextManager[None]:
    """Collectives in the block are as slow as `link` says. Raises ConfigError on a GPU, which would not wait."""
    if link.axis is None:
        return nullcontext()
    if device != "cpu":
        raise ConfigError(
            f"link.axis={link.axis} slows ranks on the CPU, and this is {device}; take cluster.device=cpu"
        )
    from megalite.comm import observe
    from megalite.comm.link import Link, Wire

    return observe(Link({link.axis: Wire(1e9 * link.bandwidth_gb_per_sec, link.latency_ms / 1e3)}))


def home_or_stand_in() -> Path:
    """The home folder or, for a user whom the system does not know (as in containers), one among temporary files."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"home-of-{os.getuid()}"


def _mark_on_gpu() -> Mark:
    """An event in this thread's stream: once the GPU has come past it, so has the collective that was waited for."""
    import torch

    event = torch.cuda.Event()
    event.record()
    return event


def _flight_record() -> str:
    """torch's own list of the last collectives of every group, as JSON."""
    import torch

    c10d = torch._C._distributed_c10d
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    return "\n".join(dump().decode() for dump in dumps if dump is not None)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold: a mesh's groups, whose connections close with their last holder."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
