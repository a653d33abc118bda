"""What a configuration is expected to need, before it takes anything: memory, bytes sent, operations. No torch.

The arithmetic is megalite.cost's; here stands which of the configuration's values it is done on.
"""

from __future__ import annotations

from pathlib import Path

from megalite.cost.communication import Step, by_axis, traffic
from megalite.cost.flops import flops_per_token
from megalite.cost.memory import Memory, Pass, memory
from megalite.cost.weights import Cut
from megalite.models.config import MLPConfig
from megalite.train.config import Config
from megalite.train.spans import Span, spans_of
from megalite.train.strict import ConfigError

GIB = 2**30

VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def expected_memory(config: Config) -> Memory:
    """Of one rank, in the span of steps whose micro-batch is largest. config: as `check` gives it.

    Weights, masters, gradients and moments are exact; activations an estimate, see `megalite.cost.memory`.
    """
    needs = [_memory(config, span) for span in spans_of(config)]
    return max(needs, key=lambda need: need.total)


def sent_bytes(config: Config, span: Span) -> dict[str, float]:
    """Axis -> bytes that each rank sends in a step of this span. config: as `check` gives it."""
    layout = config.layout
    assert layout.dp is not None, "check() fills it in"
    batch = micro_batch(config, span)
    full = _recomputed_layers(config) if config.recompute == "full" else 0
    mlps = _recomputed_layers(config) if config.recompute == "selective" and "mlp" in config.recompute_ops else 0
    step = Step(
        microbatches=span.global_batch_size // (layout.dp * batch),
        tokens=batch * (span.seq_len if span.has_sequences else 1),
        value_bytes=VALUE_BYTES[config.precision.compute],
        label_smoothing=config.loss.label_smoothing > 0,
        recomputed=full,
        recomputed_mlps=mlps,
    )
    data_ranks = layout.dp * layout.cp
    rows = traffic(config.model, _cut(config), step, data_ranks=data_ranks, world=data_ranks * layout.tp * layout.pp)
    return by_axis(rows)


def operations_per_token(config: Config, span: Span) -> float:
    return flops_per_token(config.model, seq_len=span.seq_len)


def micro_batch(config: Config, span: Span) -> int:
    """Sequences in one pass of one rank, null resolved."""
    assert config.layout.dp is not None, "check() fills it in"
    return config.micro_batch_size or span.global_batch_size // config.layout.dp


def require_memory(config: Config, available: int | None) -> None:
    """Refuse what cannot fit: a run that fills the memory takes the machine with it before it says why.

    available: bytes that a rank can have; None = nobody knows. Only what is certain counts: weights, masters, gradients
    and moments. Raises ConfigError with both numbers, unless cluster.check_memory=false.
    """
    need = expected_memory(config)
    if config.cluster.check_memory and available is not None and need.held > available:
        raise ConfigError(
            f"{config.model.parameter_count():,} parameters need {need.held / GIB:,.1f} GiB a rank (weights, masters, "
            f"gradients, moments), and a rank can have {available / GIB:,.1f} GiB; take a smaller model, a larger "
            "layout.tp, fewer ranks a machine, or cluster.check_memory=false to try"
        )


def available_bytes(device: str, *, local_ranks: int = 1, root: Path = Path("/")) -> int | None:
    """What one of `local_ranks` ranks can have on this machine, as far as it can be told.

    A GPU: its memory that is free. The CPU: what /proc/meminfo calls available, or what this container's limit leaves
    if that is less, divided by the ranks. root: where /proc and /sys stand.
    """
    if device != "cpu":
        import torch  # here, so that who asks of a CPU needs none

        free, _ = torch.cuda.mem_get_info(device)
        ranks_on_it = -(-local_ranks // torch.cuda.device_count())
        return free // ranks_on_it
    limits = [limit for limit in (_available(root / "proc/meminfo"), _container(root / "sys/fs/cgroup")) if limit]
    return min(limits) // local_ranks if limits else None


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # no Linux
        return None
    values = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    found = values.get("MemAvailable")
    return int(found[0]) * 1024 if found else None


def _container(cgroup: Path) -> int | None:
    """What the limit of a control group (version 2, as a container sees its own) leaves; None where there is none."""
    try:
        limit, used, stat = ((cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current", "stat"))
    except OSError:
        return None
    if not limit.isdigit():
        return None
    reclaimable = dict(line.split() for line in stat.splitlines()).get("inactive_file", "0")
    return max(int(limit) - int(used) + int(reclaimable), 1)


def _memory(config: Config, span: Span) -> Memory:
    optim = config.optim
    ops = tuple(config.recompute_ops) or (("attention",) if config.recompute == "selective" else ())
    micro = Pass(
        batch=micro_batch(config, span),
        seq_len=span.seq_len,
        value_bytes=VALUE_BYTES[config.precision.compute],
        recompute=config.recompute,
        ops=ops,
        recomputed_layers=_recomputed_layers(config),
        chunk_tokens=config.loss.chunk_tokens,
    )
    moments = 2 if optim.name == "adamw" else int(optim.betas[0] > 0)
    return memory(config.model, _cut(config), micro, moments=moments)


def _cut(config: Config) -> Cut:
    return Cut(config.layout.tp, bool(config.layout.sequence_parallel))


def _recomputed_layers(config: Config) -> int:
    """Layers 0, every, 2 every, ... of those that there are."""
    if config.recompute == "none" or isinstance(config.model, MLPConfig):
        return 0
    return -(-config.model.num_hidden_layers // config.recompute_every)
