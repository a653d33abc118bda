"""Whether a configuration's values fit each other and the ranks that run: all arithmetic before torch.

A pure function of the configuration and the number of ranks, so every rank comes to the same verdict without talking,
before any collective. Each refusal is a ValueError in one line that names the key, the numbers and the way out.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

from megalite.mesh import Layout
from megalite.models.config import MLPConfig, divisors
from megalite.pipeline import lower
from megalite.train.config import Config, LinkConfig, ProfileConfig, ZeroConfig
from megalite.train.placement import placement
from megalite.train.spans import RAMPED, microbatches, spans_of
from megalite.train.strict import flatten

POSITIVE = (
    *("seq_len", "global_batch_size", "micro_batch_size", "steps", "stop_after", "layout.dp", "log.every"),
    *("cluster.threads", "cluster.timeout_seconds", "cluster.peak_tflops", "link.bandwidth_gb_per_sec"),
    *("optim.max_norm", "optim.eps", "optim.newton_schulz_steps", "loss.chunk_tokens", "eval.sequences"),
    *("recompute_every", "pipeline.virtual_stages", "pipeline.group"),
)
NOT_NEGATIVE = (
    *("seed", "eval.every", "loss.z_loss", "data.validation_period", "data.prefetch", "log.ranks_every"),
    *("link.latency_ms", "pipeline.embedding_layers", "pipeline.head_layers"),
    *("zero.prefetch", "optim.lr", "optim.min_lr", "optim.warmup_steps", "optim.decay_steps", "optim.weight_decay"),
)

MOST = {"seed": 2**63 - 1, "cluster.threads": 4096, "cluster.timeout_seconds": 10**6, "data.prefetch": 1024}
"""Keys with a bound of their own: 64 bits are drawn from a seed; no machine has more cores; eleven days; memory."""
MOST_OF_A_WHOLE_NUMBER = 2**31 - 1
RECOMPUTED = ("norm", "attention", "activation", "mlp")
"""What recompute_ops may name: OPS of megalite.layers.recompute, which needs torch."""
MOST_PARAMETERS = 10**15
"""Beyond it a tensor's size no longer fits a machine's word; no computer holds a hundredth of it."""


def check(config: Config, world_size: int) -> Config:
    """The same configuration with layout.dp and layout.sequence_parallel filled in for these ranks.

    Raises ValueError for what is not built yet, for values out of range and for sizes that do not go together.
    """
    _refuse_unbuilt(config)
    _refuse_impossible(config)  # first: what follows looks for divisors, which takes as long as a number is large
    config.model.validate()
    _refuse_giant(config)
    _check_ranges(config)
    layout = config.layout.fit(world_size)
    sequence_parallel = config.layout.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = layout.tp > 1 and not is_mlp(config)
    _check_ramps(config)
    for span in spans_of(config):
        try:
            config.model.validate_cut(layout.tp, sequence_parallel=sequence_parallel, seq_len=span.seq_len)
            _check_batch(span.global_batch_size, config.micro_batch_size, layout)
        except ValueError as error:
            if span.first_step == 1:
                raise
            raise ValueError(f"from step {span.first_step} on {error}") from error
    _check_data(config)
    _check_zero(config, layout)
    _check_precision(config)
    _check_profile(config.profile, layout, steps=config.last_step)
    _check_link(config.link, layout)
    config = replace(config, layout=replace(config.layout, dp=layout.dp, sequence_parallel=sequence_parallel))
    _check_pipeline(config)
    return config


def _refuse_unbuilt(config: Config) -> None:
    built: dict[str, Any] = {f"layout.{axis}": 1 for axis in ("cp", "ep", "etp")}
    built |= {"checkpoint.every": 0}
    for key, legal in built.items():
        group, name = key.split(".")
        value = getattr(getattr(config, group), name)
        if value != legal:
            raise ValueError(f"{key}={value} is not built yet; take {key}={legal}")


def _refuse_impossible(config: Config) -> None:
    """Numbers that no machine could take, which torch would answer with an overflow."""
    for key, value in flatten(asdict(config)):
        most = MOST.get(key, MOST_OF_A_WHOLE_NUMBER if type(value) is int else None)
        if value is not None and most is not None and value > most:
            raise ValueError(f"{key}={value} is more than there can be; take at most {most}")


def _refuse_giant(config: Config) -> None:
    count = config.model.parameter_count()
    if count > MOST_PARAMETERS:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        shape = ", ".join(
            f"model.{name}={getattr(config.model, name)}" for name in sizes if hasattr(config.model, name)
        )
        raise ValueError(f"{shape} make {count} parameters; take sizes that make at most {MOST_PARAMETERS}")


def _check_ranges(config: Config) -> None:
    for key in POSITIVE:
        _in_range(config, key, above=0)
    for key in NOT_NEGATIVE:
        _in_range(config, key, least=0)
    _in_range(config, "loss.label_smoothing", least=0, below=1)
    optim = config.optim
    if optim.lowest_lr > optim.lr:
        raise ValueError(f"optim.min_lr={optim.min_lr} is above optim.lr={optim.lr}; take at most {optim.lr}")
    if not 0 <= optim.momentum < 1:
        raise ValueError(f"optim.momentum={optim.momentum} must be in [0, 1)")
    if not -1 <= optim.beta2_decay < 0:
        raise ValueError(
            f"optim.beta2_decay={optim.beta2_decay} must be in [-1, 0); -1 is the plain mean of all squares"
        )
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ValueError(f"optim.betas={optim.betas} must be two numbers, each in [0, 1)")
    optim.multipliers()
    if optim.decay_steps is not None and optim.schedule != "wsd":
        raise ValueError(
            f"optim.decay_steps={optim.decay_steps} does nothing with optim.schedule={optim.schedule}; take wsd"
        )
    if config.stop_after is not None and config.stop_after > config.steps:
        raise ValueError(f"stop_after={config.stop_after} is beyond steps={config.steps}; take at most {config.steps}")
    for op in config.recompute_ops:
        if op not in RECOMPUTED:
            raise ValueError(f"recompute_ops has {op}, which is unknown; take from {', '.join(RECOMPUTED)}")
    if is_mlp(config):
        _refuse_without_tokens(config)


def _refuse_without_tokens(config: Config) -> None:
    """The deep MLP has vectors where a language model has tokens: what speaks of tokens would be ignored in silence."""
    defaults = Config()
    data = (f"data.{f.name}" for f in fields(config.data) if f.name != "prefetch")
    for key in (*(f"loss.{f.name}" for f in fields(config.loss)), *data, "recompute", "seq_len_ramp"):
        if _at(config, key) != _at(defaults, key):
            raise ValueError(f"{key}={_at(config, key)} does nothing with model=mlp; leave it out")
    if config.layout.sequence_parallel:
        raise ValueError("layout.sequence_parallel=true does nothing with model=mlp; leave it out")


def _check_ramps(config: Config) -> None:
    """A ramp is [[step, value], ...] with steps that rise from 2 on; a phase's from_step likewise."""
    for key in (f"{name}_ramp" for name in RAMPED):
        ramp = _at(config, key)
        for place, entry in enumerate(ramp):
            if len(entry) != 2 or entry[1] < 1:
                raise ValueError(f"{key}[{place}]={entry} must be [step, value] with a value of at least 1")
            if entry[1] > MOST_OF_A_WHOLE_NUMBER:
                raise ValueError(
                    f"{key}[{place}]={entry} is more than there can be; take at most {MOST_OF_A_WHOLE_NUMBER}"
                )
        _check_steps(key, "step", [step for step, _ in ramp], config.steps)
    _check_steps("data.phases", "from_step", [phase.from_step for phase in config.data.phases], config.steps)


def _check_steps(key: str, name: str, found: list[int], steps: int) -> None:
    least = 2
    for place, step in enumerate(found):
        if not least <= step <= steps:
            raise ValueError(f"{key}[{place}]: {name}={step} must lie from {least} to steps={steps}, in rising order")
        least = step + 1


def _check_batch(batch: int, micro: int | None, layout: Layout) -> None:
    if batch % layout.dp:
        raise ValueError(
            f"global_batch_size={batch} cannot be dealt over layout.dp={layout.dp}; "
            f"take a multiple of {layout.dp}, or layout.dp from {divisors(batch)}"
        )
    share = batch // layout.dp
    if micro is not None and share % micro:
        raise ValueError(
            f"global_batch_size={batch} is not a multiple of layout.dp x micro_batch_size = {layout.dp} x {micro} = "
            f"{layout.dp * micro}; take micro_batch_size from {divisors(share)}"
        )


def _check_pipeline(config: Config) -> None:
    """Its stages, and a schedule for every number of micro-batches that a ramp brings."""
    stages = placement(config)
    for span in spans_of(config):
        try:
            lower.check(stages.schedule(microbatches(config, span)))
        except ValueError as error:
            if span.first_step == 1:
                raise
            raise ValueError(f"from step {span.first_step} on {error}") from error


def _check_data(config: Config) -> None:
    data = config.data
    for place, phase in enumerate(data.phases):
        if not phase.paths:
            raise ValueError(f"data.phases[{place}].paths=[] names no source; take at least one")
    if data.validation_period == 1:
        raise ValueError("data.validation_period=1 keeps everything for evaluation; take 2 or more, or 0 for nothing")
    if config.eval.every and not data.validation_period and not data.validation_paths and not is_mlp(config):
        raise ValueError(
            f"eval.every={config.eval.every} has nothing to read with data.validation_period=0; "
            "take a period of 2 or more, or give data.validation_paths"
        )


def _check_zero(config: Config, layout: Layout) -> None:
    zero, data_ranks = config.zero, layout.dp * layout.cp
    if not 0 <= zero.stage <= 3:
        raise ValueError(f"zero.stage={zero.stage} is unknown; take one of 0, 1, 2, 3")
    if zero.shard_over is not None and (zero.shard_over < 1 or data_ranks % zero.shard_over):
        raise ValueError(
            f"zero.shard_over={zero.shard_over} does not divide layout.dp x cp = {layout.dp} x {layout.cp} = "
            f"{data_ranks}; take one of {divisors(data_ranks)}"
        )
    defaults = ZeroConfig()
    needs = {"shard_over": 1, "prefetch": 3, "reshard_after_forward": 3, "reshard": 3}
    for name, stage in needs.items():
        value = getattr(zero, name)
        if value != getattr(defaults, name) and zero.stage < stage:
            raise ValueError(f"zero.{name}={value} does nothing at zero.stage={zero.stage}; take stage {stage}")
    if zero.reshard == "step" and not zero.reshard_after_forward:
        raise ValueError("zero.reshard_after_forward=false says nothing beside zero.reshard=step; leave it out")


def _check_precision(config: Config) -> None:
    precision, optim = config.precision, config.optim
    for name in ("gradients", "moments"):
        value = getattr(precision, name)
        if value is not None and (value != "bf16" or precision.compute != "bf16"):
            raise ValueError(
                f"precision.{name}={value} does not go with precision.compute={precision.compute}; take null (as the "
                "master weights), or bf16 with compute=bf16"
            )
    if precision.stochastic_rounding and precision.moments is None:
        raise ValueError("precision.stochastic_rounding=true rounds nothing; take precision.moments=bf16 with it")
    if precision.moments and not precision.stochastic_rounding and optim.name != "sgd" and optim.betas[1] > 0.99:
        raise ValueError(
            f"optim.betas[1]={optim.betas[1]} is above 0.99, and a second moment in bf16 (precision.moments) would "
            "never come down again; take at most 0.99, or precision.stochastic_rounding=true"
        )


def _check_profile(profile: ProfileConfig, layout: Layout, *, steps: int) -> None:
    if profile.steps and not (len(profile.steps) == 2 and 1 <= profile.steps[0] <= profile.steps[1] <= steps):
        raise ValueError(f"profile.steps={profile.steps} must be [first, last], within 1 to {steps}")
    for rank in profile.ranks if profile.steps else []:
        if not 0 <= rank < layout.world_size:
            raise ValueError(f"profile.ranks={profile.ranks}: rank {rank} is none of 0 to {layout.world_size - 1}")


def _check_link(link: LinkConfig, layout: Layout) -> None:
    if link.axis is None:
        return
    sizes = {name: size for name, size in layout.sizes.items() if name != "edp"}  # not a key of layout
    if link.axis not in sizes:
        raise ValueError(f"link.axis={link.axis} is unknown; take one of {', '.join(sizes)}")
    if sizes[link.axis] == 1:
        cut = [name for name, size in sizes.items() if size > 1]
        ways = f"take one of {', '.join(cut)}" if cut else "start more ranks"
        raise ValueError(f"link.axis={link.axis} has 1 rank, so nothing crosses it; {ways}")


def is_mlp(config: Config) -> bool:
    return isinstance(config.model, MLPConfig)


def _at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _in_range(
    config: Config, key: str, *, above: float | None = None, least: float | None = None, below: float | None = None
) -> None:
    value = _at(config, key)
    if value is None:
        return
    if above is not None and not value > above:
        raise ValueError(f"{key}={value} must be above {above}")
    if least is not None and not value >= least:
        raise ValueError(f"{key}={value} must be at least {least}")
    if below is not None and not value < below:
        raise ValueError(f"{key}={value} must be below {below}")
