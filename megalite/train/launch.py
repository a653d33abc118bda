"""From a command line to `main(config, world)` on each rank, and back to one exit code.

The only module that reads the environment.

    launch.run(main)            in train.py, started by `python` or by any launcher that sets torchrun's variables

1. The launcher's variables say which rank this is (`Place`). With none, it is one process and no process group is made.
2. Hydra composes the configuration; `load` and `check` accept it or refuse it, all before torch is imported.
3. Threads, device, backend and process group are set up as the configuration says (`World`), and main runs.
4. On every way out the process group is destroyed. A refusal is one line, said once: rank 0 says it; another rank that
   has the same to say first waits, since the launcher ends the job when rank 0 is gone. If it does not, rank 0 had
   nothing to say, and the waiting rank speaks.

Exit codes: 0 done, 1 an exception (with its traceback), 2 the configuration, 3 the data, 5 no finite
gradient any more, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megalite.train.check import MOST, check
from megalite.train.compose import compose
from megalite.train.config import Config, load
from megalite.train.finite import NotFiniteError
from megalite.train.strict import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store

FAILED_CODE, CONFIG_CODE, DATA_CODE, NOT_FINITE_CODE, INTERRUPTED_CODE = 1, 2, 3, 5, 130
HOLD_SECONDS = 5.0
"""How long a rank other than 0 keeps a refusal to itself: launchers end a job that lost rank 0 much sooner."""


@dataclass(frozen=True)
class Place:
    """Where the launcher put this process, from the variables that torchrun sets (and others imitate).

    master: host and port of the rendezvous; None without a launcher. agent_store: torchrun keeps the store itself.
    omp_threads: OMP_NUM_THREADS where a person has set it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master: tuple[str, int] | None = None
    agent_store: bool = False
    attempt: int = 0
    omp_threads: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Place:
        """Raises ValueError where the variables contradict each other, or one is no number."""
        rank, size = _whole(environ, "RANK", 0), _whole(environ, "WORLD_SIZE", 1)
        if not 0 <= rank < size:
            raise ValueError(f"RANK={rank} is not below WORLD_SIZE={size}; start with torchrun, which sets both")
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if "WORLD_SIZE" in environ and missing:
            raise ValueError(f"WORLD_SIZE={size} is set and {missing[0]} is not; start with torchrun, which sets both")
        torchrun = "TORCHELASTIC_RUN_ID" in environ
        local_size = _whole(environ, "LOCAL_WORLD_SIZE", 1)
        threads = environ.get("OMP_NUM_THREADS", "")
        # torchrun itself writes 1 for several local ranks, so there a 1 says nothing about what a person wants.
        by_person = threads.isdigit() and not (torchrun and local_size > 1 and threads == "1")
        return cls(
            rank=rank,
            size=size,
            local_rank=_whole(environ, "LOCAL_RANK", 0),
            local_size=local_size,
            master=(environ["MASTER_ADDR"], _whole(environ, "MASTER_PORT", 0, most=65535))
            if "WORLD_SIZE" in environ
            else None,
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_whole(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            omp_threads=_whole(environ, "OMP_NUM_THREADS", 1, most=MOST["threads"]) if by_person else None,
        )


@dataclass(frozen=True)
class World:
    """What main is told about where it runs.

    device: cpu, or cuda:<local rank>. threads: of this rank, on the CPU. cache_dir: for what many runs share.
    local_size: how many ranks share this machine.
    """

    rank: int
    size: int
    device: str
    backend: str
    threads: int
    cache_dir: Path
    local_size: int = 1

    def describe(self) -> str:
        """One line for the run's header."""
        return f"{self.device.split(':')[0]}, {self.backend}, {self.threads} threads each"


def run(main: Callable[[Config, World], None], *, configs: str = "configs", name: str = "train") -> NoReturn:
    """Run `main` under the configuration that the command line asks for, and exit with the code of what happened.

    configs: the folder of Hydra's files, beside the file that main stands in. Does not return.
    """
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # else the streams of many groups queue behind each other
    with_traces = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises to us what it would print on every rank
    try:
        place = Place.read(os.environ)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(CONFIG_CODE)
    launcher = Launcher(place, main)
    folder = Path(main.__code__.co_filename).resolve().parent / configs
    code, said = 0, ""
    try:
        compose(launcher.job, folder=folder, name=name, rank=place.rank)
    except SystemExit as stop:  # of the argument parser, which has had its say
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_CODE)
    except Exception as error:
        code = _code(error)
        if code == FAILED_CODE:
            print(f"rank {place.rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            sys.exit(code)
        said = (traceback.format_exc() if with_traces else "") + f"error: {error}"
    if code and place.rank:
        time.sleep(HOLD_SECONDS)
    if said:
        print(said, file=sys.stderr, flush=True)
    sys.exit(code)


def _code(error: Exception) -> int:
    """What the exit code says of an error: the configuration or the data refused, a run that is lost, or a failure."""
    from megalite.data import DataError  # here, since it brings numpy, which --help does not need

    if isinstance(error, ConfigError):
        return CONFIG_CODE
    if isinstance(error, NotFiniteError):
        return NOT_FINITE_CODE
    return DATA_CODE if isinstance(error, DataError) else FAILED_CODE


@dataclass
class Launcher:
    """Runs `main` for each configuration of a command line, each time in a world of its own."""

    place: Place
    main: Callable[[Config, World], None]
    jobs: int = 0

    def job(self, values: dict[str, Any]) -> None:
        """One configuration as Hydra composed it. Raises ConfigError, before torch is imported, if it cannot run."""
        try:
            config = check(load(values), self.place.size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        world = self.world(config)
        with self.process_group(world, config.cluster.timeout_seconds):
            self.main(config, world)

    def world(self, config: Config) -> World:
        """Threads, device and backend as configured. Raises ConfigError for what this machine does not have."""
        import torch

        from megalite.data import default_cache_dir

        place = self.place
        threads = config.cluster.threads or place.omp_threads or max(1, _cores() // place.local_size)
        torch.set_num_threads(threads)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device, backend = choose_device(config, place, gpus=gpus)
        if device != "cpu":
            torch.cuda.set_device(device)
        cache_dir = default_cache_dir(os.environ, home_or_stand_in())
        return World(place.rank, place.size, device, backend, threads, cache_dir, place.local_size)

    @contextmanager
    def process_group(self, world: World, timeout_seconds: float) -> Iterator[None]:
        """The default process group, if a launcher started this process; destroyed on every way out."""
        if self.place.master is None:
            yield
            return
        import torch.distributed as dist

        timeout = timedelta(seconds=timeout_seconds)
        # A group made twice on one store reads the first one's addresses, and so does one made after a restart.
        prefix = f"attempt{self.place.attempt}/job{self.jobs}"
        self.jobs += 1
        dist.init_process_group(
            world.backend,
            store=dist.PrefixStore(prefix, self.store),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()

    @cached_property
    def store(self) -> Store:
        """The rendezvous, one for all jobs: torchrun's agent keeps it, else rank 0 does."""
        import torch.distributed as dist

        assert self.place.master is not None
        host, port = self.place.master
        serve = self.place.rank == 0 and not self.place.agent_store
        return dist.TCPStore(host, port, is_master=serve, wait_for_workers=False)


def choose_device(config: Config, place: Place, *, gpus: int) -> tuple[str, str]:
    """(device, backend) of a rank on a machine with so many GPUs: NCCL where each local rank has one to itself.

    Several ranks may share a GPU over Gloo. Raises ConfigError for what is asked for and not there.
    """
    cluster = config.cluster
    if cluster.device == "cuda" and not gpus:
        raise ConfigError(f"cluster.device=cuda needs a GPU, and rank {place.rank} sees none; take cluster.device=cpu")
    on_gpu = cluster.device != "cpu" and gpus > 0
    own = on_gpu and place.local_size <= gpus
    if cluster.backend == "nccl" and not own:
        raise ConfigError(
            f"cluster.backend=nccl needs a GPU for each of the {place.local_size} local ranks, and "
            f"cluster.device={cluster.device} gives them {gpus if on_gpu else 0}; take cluster.backend=gloo"
        )
    device = f"cuda:{place.local_rank % gpus}" if on_gpu else "cpu"
    return device, ("nccl" if own else "gloo") if cluster.backend == "auto" else cluster.backend


def home_or_stand_in() -> Path:
    """The home folder or, for a user whom the system does not know (as in containers), one among temporary files."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"home-of-{os.getuid()}"


def _whole(environ: Mapping[str, str], name: str, default: int, *, most: int = 2**31 - 1) -> int:
    """A variable that counts. Raises ValueError with its name and value if it does not."""
    text = environ.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= most:
        raise ValueError(f"{name}={text} must be a whole number from 0 to {most}; start with torchrun, which sets it")
    return value


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
