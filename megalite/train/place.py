"""Where a launcher put this process, read from the variables that torchrun sets and others imitate, and its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalite.train.check import MOST
from megalite.train.config import Config
from megalite.train.strict import ConfigError


@dataclass(frozen=True)
class Place:
    """Where the launcher put this process, from the variables that torchrun sets (and others imitate).

    master: host and port of the rendezvous; None without a launcher. agent_store: torchrun keeps the store itself.
    error_file: where torchrun reads what it shows of a rank that failed.
    omp_threads: OMP_NUM_THREADS where a person has set it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master: tuple[str, int] | None = None
    agent_store: bool = False
    attempt: int = 0
    error_file: str | None = None
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
            error_file=environ.get("TORCHELASTIC_ERROR_FILE") or None,
            omp_threads=_whole(environ, "OMP_NUM_THREADS", 1, most=MOST["cluster.threads"]) if by_person else None,
        )


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
