"""The configuration of a training run: its schema, the only place for defaults, and `load`, which makes it typed.

No torch here: `--help` and the planner read this module. `megalite.train.check` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from megalite.mesh import Layout
from megalite.models.config import GPTConfig, MLPConfig, one_of
from megalite.train.strict import build


@dataclass
class LayoutConfig:
    """How the ranks are cut. dp: null takes the ranks that the other axes leave.

    order: innermost first; neighbouring ranks share the first axis.
    sequence_parallel: what lies between two tensor-parallel products is cut along the sequence; null = where tp > 1.
    """

    dp: int | None = None
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    order: list[str] = field(default_factory=lambda: ["tp", "cp", "dp", "pp"])
    sequence_parallel: bool | None = None

    def fit(self, world_size: int) -> Layout:
        """These sizes on so many ranks. Raises ValueError with the equation where they do not multiply to it."""
        sizes = {name: getattr(self, name) for name in ("cp", "tp", "pp", "ep", "etp")}
        return Layout.fit(world_size, dp=self.dp, order=tuple(self.order), **sizes)


@dataclass
class ZeroConfig:
    """What data-parallel ranks hold once instead of each.

    stage: 0 nothing, 1 masters and the optimizer's state, 2 gradients too, 3 weights too.
    shard_over: so many neighbouring data ranks share it, and all groups of them hold the same; null = all data ranks.
    prefetch: units gathered ahead of their use at stage 3.
    reshard_after_forward: at stage 3, release a unit after its forward and gather it again for its backward.
    reshard: at stage 3, microbatch releases units within each micro-batch, step keeps them until the update.
    offload: masters and the optimizer's state lie in the CPU's memory, and it updates them.
    """

    stage: int = 0
    shard_over: int | None = None
    prefetch: int = 1
    reshard_after_forward: bool = True
    reshard: str = one_of("microbatch", "step")
    offload: bool = False

    @property
    def released_after(self) -> str:
        """What stage 3 releases a unit after, in the words of `Zero`: forward (and backward), backward, or step."""
        if self.reshard == "step":
            return "step"
        return "forward" if self.reshard_after_forward else "backward"


@dataclass
class PipelineConfig:
    """The order in which pipeline stages work, how many a rank holds, and which layers each has.

    schedule: a name of megalite/pipeline/catalogue.py (`python -m megalite.pipeline --all` shows them), or a file: a
    line for each rank, as in F0@0 BW0@0.
    virtual_stages: stages a rank; null = what the schedule implies: 1, or 2 for looped and V ones.
    group: the least micro-batches that go through a stage before a looped schedule turns to the next; null = pp.
    split: layers of each stage; null = as even as can be, where embedding and head count as embedding_layers and
    head_layers of the first and the last stage.
    """

    schedule: str = "1f1b"
    virtual_stages: int | None = None
    group: int | None = None
    split: list[int] | None = None
    embedding_layers: int = 0
    head_layers: int = 0


@dataclass
class OptimConfig:
    """The optimizer and its learning rate.

    lr is reached after warmup_steps, from min_lr on; then it is kept (constant), or comes down to min_lr at the last
    step: all the way (linear, cosine), or in the last decay_steps alone (wsd: warm-up, stable, decay).
    min_lr: null = a tenth of lr. decay_steps: null = a tenth of steps. decay_shape: of wsd's decay; sqrt is
    1 - sqrt(progress).
    name: muon and adafactor update matrices (not embeddings, positions, head), and adamw the rest under the same lr;
    Adafactor's is relative to the size of the weights.
    betas, eps: AdamW's; betas[0] is SGD's momentum.
    momentum, newton_schulz_steps: Muon's. beta2_decay: Adafactor's: its means take step^beta2_decay of what is new.
    not_matrices: patterns of names that muon and adafactor leave to adamw, as in "*router*".
    weight_decay: on matrices, not on norms and biases.
    max_norm: larger gradients are scaled down to this norm; null never does.
    lr_multipliers: ["pattern=factor", ...]: the learning rate of parameters whose name matches (first match counts),
    as in "*norm*=0.5".
    """

    name: str = one_of("adamw", "sgd", "muon", "adafactor")
    lr: float = 3e-3
    min_lr: float | None = None
    warmup_steps: int = 20
    schedule: str = one_of("cosine", "linear", "constant", "wsd")
    decay_steps: int | None = None
    decay_shape: str = one_of("sqrt", "linear", "cosine")
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    beta2_decay: float = -0.8
    not_matrices: list[str] = field(default_factory=list)
    weight_decay: float = 0.1
    max_norm: float | None = 1.0
    lr_multipliers: list[str] = field(default_factory=list)

    @property
    def lowest_lr(self) -> float:
        """min_lr, null resolved."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    def multipliers(self) -> dict[str, float]:
        """lr_multipliers as pattern -> factor. Raises ValueError for an entry that is no pattern=factor."""
        found: dict[str, float] = {}
        for place, entry in enumerate(self.lr_multipliers):
            pattern, _, factor = entry.rpartition("=")
            try:
                found[pattern] = float(factor)
            except ValueError:
                pattern = ""
            if not pattern or not 0 <= found[pattern] < inf:
                raise ValueError(
                    f"optim.lr_multipliers[{place}]={entry} must be pattern=factor, the factor 0 or more; "
                    'write it as in ["*norm*=0.5"]'
                )
        return found


@dataclass
class LossConfig:
    """The loss of a language model: the mean over the tokens of the global batch of -log p(next token).

    z_loss: this times log(Z)^2 is added, which keeps logits small. label_smoothing: this much of the target is spread
    over the whole vocabulary. chunk_tokens: logits of so many tokens live at once; null = all of a micro-batch.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    chunk_tokens: int | None = None


@dataclass
class PrecisionConfig:
    """In what numbers are kept and computed with; a recipe in configs/precision/ is a choice of all of it.

    compute: weights, activations and the gradients of one pass; in half precision master weights in fp32 stand behind
    them. gradients: their sums over passes and ranks; null = as the masters. moments: the optimizer's; null = as the
    masters. stochastic_rounding: of moments in bf16: up or down with the odds that keep the mean.
    """

    compute: str = one_of("fp32", "bf16", "fp16", "fp64")
    gradients: str | None = None
    moments: str | None = None
    stochastic_rounding: bool = False


@dataclass
class PhaseConfig:
    """What is read from a step on, in place of what was read before: data that changes or grows during training.

    paths, weights: as data.paths and data.weights. A source that was read before goes on where it stood.
    """

    from_step: int
    paths: list[str]
    weights: list[float] | None = None


@dataclass
class DataConfig:
    """What is read.

    paths: token files (PREFIX.bin beside PREFIX.idx, Megatron's format; `python -m megalite.data` writes them; either
    name, or PREFIX alone) and text files, read as bytes; empty = the source of Python's own standard library.
    weights: one a path, on any scale: how much of each is read, 0 for none; null = in proportion to their sizes.
    phases: later data; each phase holds from its from_step until the next.
    validation_paths: read whole for evaluation, and all of `paths` for training; empty = every validation_period-th
    chunk of each source is kept for evaluation.
    documents: join lets attention see across the ends of documents in a sequence; separate does not, and takes the
    first token of each document, which nothing before it could tell, out of the loss.
    fingerprints: of the sources in the order in which they are named, as the header prints and config.yaml keeps them;
    a source that has another one is refused. null = whatever is there.
    prefetch: batches that are read ahead in a background thread; 0 reads in the training loop.
    """

    paths: list[str] = field(default_factory=list)
    weights: list[float] | None = None
    phases: list[PhaseConfig] = field(default_factory=list)
    validation_paths: list[str] = field(default_factory=list)
    validation_period: int = 20
    documents: str = one_of("join", "separate")
    fingerprints: list[str] | None = None
    prefetch: int = 2


@dataclass
class CheckpointConfig:
    """every: steps from one checkpoint to the next; 0 = never."""

    every: int = 0


@dataclass
class EvalConfig:
    """every: steps from one evaluation to the next, the last step included; 0 = never. sequences: how many are read."""

    every: int = 0
    sequences: int = 256


@dataclass
class LogConfig:
    """What is shown and written; rank 0 does both.

    every: steps from one line to the next (metrics.jsonl and metrics.csv have every step).
    display: rich draws a progress bar and a live line, plain prints lines; auto = rich on a terminal.
    ranks_every: steps from one look at every rank's step and wait times to the next; 0 = never.
    tensorboard: also write event files into out_dir/tensorboard (extra tb). wandb: also send to Weights & Biases
    (extra wandb), under wandb_project.
    """

    every: int = 1
    display: str = one_of("auto", "rich", "plain")
    ranks_every: int = 20
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "megalite"


@dataclass
class ProfileConfig:
    """steps: [first, last] are recorded, [] none: a Chrome trace for each of `ranks`, into out_dir/profile.

    memory: also what is held when, by kind, drawn as PNG (extra plot).
    """

    steps: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=lambda: [0])
    memory: bool = True


@dataclass
class ClusterConfig:
    """The machines.

    device, backend: auto = a GPU where there is one, and NCCL where each local rank has one to itself.
    threads: of each rank on the CPU; null = its share of the cores.
    timeout_seconds: how long a rank waits in a collective for the others before the job ends as hung.
    peak_tflops: of one rank's device at the precision in use, for mfu; null = what is known of the GPU.
    check_memory: refuse a model that cannot fit into the memory that this machine has left.
    """

    device: str = one_of("auto", "cpu", "cuda")
    backend: str = one_of("auto", "gloo", "nccl")
    threads: int | None = None
    timeout_seconds: float = 600.0
    peak_tflops: float | None = None
    check_memory: bool = True


@dataclass
class LinkConfig:
    """A slower network than there is, on the CPU, to see what it does to a layout.

    axis: what crosses it (dp, tp, ...) takes at least latency_ms, plus the bytes that a rank sends by a ring over
    bandwidth_gb_per_sec (10^9 bytes), one collective after the other; null = the network as it is.
    """

    axis: str | None = None
    bandwidth_gb_per_sec: float = 1.0
    latency_ms: float = 0.0


@dataclass
class Config:
    """A whole run.

    seq_len: tokens in a sequence. global_batch_size: sequences in a step, over all ranks.
    seq_len_ramp, global_batch_size_ramp: [[step, value], ...]: from that step on this value, until the next.
    micro_batch_size: sequences in one pass of one rank; null = as many as the batch gives it, or, with layout.pp > 1,
    as leave the pipeline 4 x layout.pp micro-batches or the next number that divides its batch.
    steps: length of the learning-rate schedule. stop_after: end after so many of them; null = after all.
    recompute: none keeps all activations; full keeps a layer's input alone and computes the rest again in backward;
    selective does so for recompute_ops only, [] being the core of attention. In every recompute_every-th layer.
    out_dir: where all ranks of the run write.
    verify: check in the first step that gradients agree where the layout says they must.
    """

    model: GPTConfig | MLPConfig = field(default_factory=GPTConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    link: LinkConfig = field(default_factory=LinkConfig)

    seq_len: int = 128
    seq_len_ramp: list[list[int]] = field(default_factory=list)
    global_batch_size: int = 16
    global_batch_size_ramp: list[list[int]] = field(default_factory=list)
    micro_batch_size: int | None = None
    steps: int = 200
    stop_after: int | None = None
    seed: int = 0
    recompute: str = one_of("none", "selective", "full")
    recompute_ops: list[str] = field(default_factory=list)
    recompute_every: int = 1
    out_dir: str = "runs/default"
    verify: bool = True

    @property
    def dtype(self) -> str:
        """The name that torch has for the precision."""
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}[self.precision.compute]

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return self.steps if self.stop_after is None else self.stop_after

    def evaluates(self, step: int) -> bool:
        """Whether the validation loss is taken after this step."""
        every = self.eval.every
        return every > 0 and (step % every == 0 or step == self.last_step)


def schema() -> dict[str, Any]:
    """Every key with its default, as plain values for Hydra; `model` is empty, since a preset brings its own kind."""
    return asdict(Config()) | {"model": {}}


def load(values: Mapping[str, Any]) -> Config:
    """What Hydra composed (a DictConfig, or plain values) as a Config.

    Raises ValueError, in one line with the key, for unknown or missing keys and for values of another type.
    """
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values
    return build(Config, plain)
