"""What a configuration is expected to need, before it takes anything: memory, bytes sent, operations. No torch.

The arithmetic is megalite.cost's; here stands which of the configuration's values it is done on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.cost.activations import Pass, kept_activations
from megalite.cost.communication import Step, by_axis, traffic
from megalite.cost.flops import flops_per_token
from megalite.cost.in_flight import most_in_flight
from megalite.cost.memory import GIB, Recipe, Sharing, State, state
from megalite.cost.peak import Moment, Training, peak
from megalite.cost.published import layer_activations
from megalite.cost.weights import Cut
from megalite.models.config import MLPConfig
from megalite.train.config import Config
from megalite.train.placement import placement
from megalite.train.spans import Span, micro_batch, microbatches, spans_of
from megalite.train.strict import ConfigError

VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: held from step to step; kept by a forward for its backward, of one micro-batch in each of its
    stages; at the highest moment of a step.

    published: what the paper's formula (arXiv:2205.05198) gives for its layers' activations. in_flight: the most that
    is held of all micro-batches; deferred: of that, the most that waits from B to W where a backward is split.
    """

    state: State
    kept: int
    peak: Moment
    published: float
    in_flight: int
    deferred: int

    @property
    def total(self) -> int:
        """On the device."""
        return self.peak.total


def expected_memory(config: Config, *, on_cpu: bool = True, shard_rank: int = 0, pp_rank: int = 0) -> Memory:
    """Of one rank, in the span of steps that needs most. config: as `check` gives it.

    shard_rank: which of the ranks that share it is; the first has most. pp_rank: its place on pp. What is exact and
    what an estimate is said in `megalite.cost.memory`, `activations` and `peak`.
    """
    how: dict[str, Any] = {"on_cpu": on_cpu, "shard_rank": shard_rank, "pp_rank": pp_rank}
    return max((memory_of(config, span, **how) for span in spans_of(config)), key=lambda need: need.total)


def expected_of_all(config: Config, *, on_cpu: bool = True) -> list[Memory]:
    """`expected_memory` of each rank of pp."""
    return [expected_memory(config, on_cpu=on_cpu, pp_rank=rank) for rank in range(config.layout.pp)]


def training_of(config: Config, span: Span, *, on_cpu: bool = True, shard_rank: int = 0, pp_rank: int = 0) -> Training:
    """All that the memory of a step depends on."""
    assert config.layout.dp is not None, "check() fills it in"
    optim, cut, recipe = config.optim, cut_of(config, pp_rank), recipe_of(config)
    sharing = sharing_of(config, rank=shard_rank)
    # Of muon and adafactor a bound: they keep less of matrices.
    moments = int(optim.betas[0] > 0) if optim.name == "sgd" else 2
    held = state(config.model, cut, sharing, recipe, moments=moments)
    schedule = placement(config).schedule(microbatches(config, span))
    return Training(config.model, cut, pass_of(config, span, on_cpu=on_cpu), sharing, recipe, held, schedule, pp_rank)


def recipe_of(config: Config) -> Recipe:
    precision = config.precision
    weights = VALUE_BYTES[precision.compute]
    wide = max(weights, 4)
    gradients, moments = (VALUE_BYTES[name] if name else wide for name in (precision.gradients, precision.moments))
    return Recipe(weights, gradients, moments)


def sharing_of(config: Config, *, rank: int = 0) -> Sharing:
    zero = config.zero
    assert config.layout.dp is not None, "check() fills it in"
    return Sharing(
        stage=zero.stage,
        data_ranks=config.layout.dp * config.layout.cp,
        over=zero.shard_over,
        rank=rank,
        prefetch=zero.prefetch,
        reshard=zero.released_after,
        offload=zero.offload,
    )


def sent_bytes(config: Config, span: Span, *, shard_rank: int = 0, pp_rank: int = 0) -> dict[str, float]:
    """Axis -> bytes that a rank sends in a step of this span. The arguments are those of `expected_memory`."""
    layout, cut = config.layout, cut_of(config, pp_rank)
    batch = micro_batch(config, span.global_batch_size)
    again = _recomputed_layers(config, cut)
    full = again if config.recompute == "full" else 0
    mlps = again if config.recompute == "selective" and "mlp" in config.recompute_ops else 0
    step = Step(
        row=placement(config).schedule(microbatches(config, span)).rows[pp_rank],
        tokens=batch * (span.seq_len if span.has_sequences else 1),
        value_bytes=VALUE_BYTES[config.precision.compute],
        gradient_bytes=recipe_of(config).gradients,
        label_smoothing=config.loss.label_smoothing > 0,
        recomputed=full,
        recomputed_mlps=mlps,
    )
    sharing = sharing_of(config, rank=shard_rank)
    world = sharing.data_ranks * layout.tp * layout.pp
    rows = traffic(config.model, cut, step, sharing=sharing, world=world, pp=layout.pp)
    return by_axis(rows)


def most_sent(config: Config, span: Span) -> dict[str, float]:
    """Axis -> the most that a rank of any place on pp sends over it."""
    most: dict[str, float] = {}
    for rank in range(config.layout.pp):
        for axis, size in sent_bytes(config, span, pp_rank=rank).items():
            most[axis] = max(most.get(axis, 0.0), size)
    return most


def operations_per_token(config: Config, span: Span) -> float:
    return flops_per_token(config.model, seq_len=span.seq_len)


def require_memory(config: Config, available: int | None) -> None:
    """Refuse what cannot fit: a run that fills the memory takes the machine with it before it says why.

    available: bytes that a rank can have; None = nobody knows. Only what is certain counts: weights, masters, gradients
    and moments. Raises ConfigError with both numbers, unless cluster.check_memory=false.
    """
    needed = max(need.state.between for need in expected_of_all(config))
    if config.cluster.check_memory and available is not None and needed > available:
        raise ConfigError(
            f"{config.model.parameter_count():,} parameters need {needed / GIB:,.1f} GiB a rank (weights, masters, "
            f"gradients, moments), and a rank can have {available / GIB:,.1f} GiB; take zero.stage=3 over more data "
            "ranks, a larger layout.tp or layout.pp, a smaller model, fewer ranks a machine, or "
            "cluster.check_memory=false to try"
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


def memory_of(config: Config, span: Span, *, on_cpu: bool = True, shard_rank: int = 0, pp_rank: int = 0) -> Memory:
    """As `expected_memory`, in one span of steps."""
    training = training_of(config, span, on_cpu=on_cpu, shard_rank=shard_rank, pp_rank=pp_rank)
    work = training.schedule, pp_rank
    return Memory(
        training.held,
        kept_activations(training.model, training.cut, training.micro),
        peak(training),
        published_activations(training),
        most_in_flight(*work, training.loads),
        most_in_flight(*work, {stage: load._replace(kept=0) for stage, load in training.loads.items()}),
    )


def published_activations(training: Training) -> float:
    """Of a rank's layers, by the formulas of arXiv:2205.05198; 0 for the deep MLP, which they are not about."""
    model, cut, micro = training.model, training.cut, training.micro
    if isinstance(model, MLPConfig):
        return 0.0
    how: dict[str, Any] = {
        "batch": micro.batch,
        "seq": micro.seq_len,
        "hidden": model.hidden_size,
        "heads": model.num_attention_heads,
        "tp": cut.tp,
        "sequence_parallel": cut.sequence_parallel,
        "value_bytes": micro.value_bytes,
        "fused_attention": model.attn_implementation == "sdpa",
    }
    again = layer_activations(**how, recompute=micro.recompute, ops=tuple(micro.ops) or ("attention",))
    layers = cut.layers(model)
    times = 0 if micro.recompute == "none" else sum(layer % micro.every == 0 for layer in layers)
    return times * again + (len(layers) - times) * layer_activations(**how)


def pass_of(config: Config, span: Span, *, on_cpu: bool = True) -> Pass:
    """One micro-batch of a span of steps."""
    return Pass(
        batch=micro_batch(config, span.global_batch_size),
        seq_len=span.seq_len,
        value_bytes=VALUE_BYTES[config.precision.compute],
        recompute=config.recompute,
        ops=tuple(config.recompute_ops),
        every=config.recompute_every,
        chunk_tokens=config.loss.chunk_tokens,
        separate_documents=config.data.documents == "separate",
        on_cpu=on_cpu,
    )


def cut_of(config: Config, pp_rank: int = 0) -> Cut:
    """What a rank of pp has of the model, and how it is cut."""
    parts = tuple(placement(config).parts_of(pp_rank).values())
    return Cut(config.layout.tp, bool(config.layout.sequence_parallel), parts)


def _recomputed_layers(config: Config, cut: Cut) -> int:
    """Of those of a rank; layers 0, every, 2 every, ... are."""
    if config.recompute == "none" or isinstance(config.model, MLPConfig):
        return 0
    return sum(layer % config.recompute_every == 0 for layer in cut.layers(config.model))
