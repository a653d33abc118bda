"""What the law of layouts is stated with: models, rows of options, a training run of a row, and the comparison.

A row is a model, a layout, and options that change where and when work is done but not what. For each, three clipped
AdamW steps on the ranks of the layout are compared with the same model on one process with every option at its
plainest: each step's loss, raw gradients and norm, and the weights at the end. In float64, where a wrong term stands
out by ten orders of magnitude.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.comm import start_all_reduce
from megalite.layers.recompute import Recompute
from megalite.mesh import Layout, Mesh
from megalite.models import Part, stages
from megalite.models.config import GPTConfig, MLPConfig, RopeScaling
from megalite.models.gpt import Block, LossOptions
from megalite.models.microbatch import IGNORED, Microbatch, VectorMicrobatch
from megalite.pipeline.catalogue import make
from megalite.pipeline.execute import Pipeline
from megalite.pipeline.schedule import Schedule
from megalite.pipeline.split import split_layers
from megalite.spec import param_specs
from megalite.zero import Zero
from tests.ranks import run

BATCH, SEQ, SEED = 8, 16, 3
STEPS, LR, DECAY, MAX_NORM = 3, 0.02, 0.1, 0.1

LLAMA = GPTConfig(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    initializer_range=0.2,
)
MODELS: dict[str, GPTConfig | MLPConfig] = {
    "llama": replace(
        LLAMA,
        rope_scaling=RopeScaling("llama3", factor=4.0, original_max_position_embeddings=16),
        num_key_value_heads=2,
    ),
    "gpt2": replace(
        LLAMA,
        norm_type="layernorm",
        position_embedding_type="absolute",
        hidden_act="gelu_new",
        is_gated_act=False,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        residual_init_scaled=True,
        embd_pdrop=0.1,
        resid_pdrop=0.1,
    ),
    "qwen2": replace(
        LLAMA,
        attention_bias=True,
        attention_out_bias=False,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_scaling=RopeScaling("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "qwen3": replace(LLAMA, qk_norm="head", head_dim=16, num_key_value_heads=2, resid_pdrop=0.1),
    "olmo": replace(
        LLAMA, norm_type="layernorm_nonparametric", clip_qkv=0.5, rope_scaling=RopeScaling("linear", factor=2.0)
    ),
    "olmo2": replace(LLAMA, norm_placement="post", qk_norm="full", num_key_value_heads=2),
    "windows": replace(
        LLAMA,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        attn_implementation="eager",
        attention_dropout=0.1,
        vocab_size=5,
    ),
    "mlp": MLPConfig(hidden_size=16, num_hidden_layers=4, initializer_range=0.3),
    "mlp of three": MLPConfig(hidden_size=16, num_hidden_layers=3, initializer_range=0.3),
}
IN_DOCUMENTS = {"qwen2", "windows"}  # their tokens see their own document only
PLAIN, MEAN = Recompute("none"), LossOptions()


class Sharded(NamedTuple):
    """ZeRO's stage, over how many data ranks each unit is cut (None: all of them), what stage 3 releases after."""

    stage: int
    over: int | None = None
    reshard: str = "forward"

    def __str__(self) -> str:
        more = f" over {self.over}" if self.over else ""
        return f"zero{self.stage}{more}" + f" to the {self.reshard}'s end" * (self.reshard != "forward")


class Stages(NamedTuple):
    """A schedule by name, the stages that a rank holds (None: what it implies), and the layers of each (None: even)."""

    schedule: str = "1f1b"
    virtual: int | None = None
    split: tuple[int, ...] | None = None

    def make(self, ranks: int, microbatches: int) -> Schedule:
        return make(self.schedule, ranks=ranks, microbatches=microbatches, virtual_stages=self.virtual)

    def parts(self, layers: int, count: int) -> list[Part]:
        """Of so many stages; where there are more than layers, the embedding and the head are layers too."""
        ends = int(count > layers and self.split is None)
        return Part.each(split_layers(layers, count, sizes=self.split, embedding_layers=ends, head_layers=ends))

    def __str__(self) -> str:
        more = f" v{self.virtual}" if self.virtual else ""
        return self.schedule + more + f" split {self.split}" * bool(self.split)


UNSHARDED, STRAIGHT = Sharded(0), Stages()


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    model: str
    layout: Layout = field(default_factory=Layout)
    sequence_parallel: bool = False
    microbatches: int = 1
    recompute: Recompute = PLAIN
    chunk_tokens: int | None = None
    stages: Stages = STRAIGHT
    loss: LossOptions = MEAN
    zero: Sharded = UNSHARDED

    def __str__(self) -> str:
        cut = " ".join(f"{axis}{size}" for axis, size in self.layout.sizes.items() if size > 1 and axis != "edp")
        more = [
            "sp" * self.sequence_parallel,
            f"m{self.microbatches}",
            self.recompute.mode + "".join(f" {op}" for op in self.recompute.ops) + f" {self.recompute.every}",
            f"chunk{self.chunk_tokens}" * bool(self.chunk_tokens),
            str(self.stages),
            "dp innermost" * (self.layout.order[0] == "dp"),
            "smoothed" * bool(self.loss.z_loss),
            str(self.zero),
        ]
        return " ".join([self.model, cut, *filter(None, more)])


class Place(NamedTuple):
    """Where one rank's part of a parameter lies: the local part that is no padding, and its logical tensor and box."""

    valid: tuple[slice, ...]
    name: str
    box: tuple[slice, ...]


class Record(NamedTuple):
    """What one rank saw, by parameter."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    places: dict[str, Place]


def global_batch(model: str, step: int) -> Microbatch | VectorMicrobatch:
    """The step's whole batch, a pure function of the step. Labels are left out unevenly, all of some sequences'."""
    config = MODELS[model]
    generator = torch.Generator().manual_seed(step)
    ids = torch.arange(BATCH) + step * BATCH
    if isinstance(config, MLPConfig):
        inputs, targets = torch.randn(2, BATCH, config.hidden_size, dtype=torch.float64, generator=generator)
        return VectorMicrobatch(inputs, targets, ids, step)
    tokens, labels = torch.randint(config.vocab_size, (2, BATCH, SEQ), generator=generator)
    labels[torch.rand(BATCH, SEQ, generator=generator) < 0.3] = IGNORED
    labels[BATCH // 2 : BATCH // 2 + 2] = IGNORED  # all that one rank has at dp=4
    ends = torch.rand(BATCH, SEQ, generator=generator) < 0.2
    documents = ends.cumsum(dim=1) if model in IN_DOCUMENTS else None
    return Microbatch(tokens, labels, torch.arange(SEQ), ids, step, documents)


def part(batch: Any, index: slice) -> Any:
    """Some of a batch's samples."""
    kept = ("positions", "step")
    cut = {name: value[index] for name, value in vars(batch).items() if name not in kept and value is not None}
    return replace(batch, **cut)


def build(row: Row, mesh: Mesh, rank_of: Sequence[int]) -> dict[int, nn.Module]:
    """This rank's stages, by number."""
    config = MODELS[row.model]
    parts = row.stages.parts(config.num_hidden_layers, len(rank_of))
    mine = {stage: part for stage, part in enumerate(parts) if rank_of[stage] == mesh.pp.rank}
    how: dict[str, Any] = {"device": "meta", "dtype": torch.float64}
    if isinstance(config, GPTConfig):
        how |= {"sequence_parallel": row.sequence_parallel, "recompute": row.recompute, "seed": SEED}
        how |= {"loss": replace(row.loss, chunk_tokens=row.chunk_tokens)}
    return dict(stages(config, mine, mesh=mesh, rank_of=rank_of, **how))


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([g | {"weight_decay": DECAY if g["decay"] else 0.0} for g in groups], lr=LR)


def train(row: Row) -> Record:
    """Three steps on one rank of the row's layout."""
    mesh = Mesh.build(row.layout)
    schedule = row.stages.make(mesh.pp.size, row.microbatches)
    built = build(row, mesh, schedule.rank_of)
    pipeline = Pipeline(built, schedule, pp=mesh.pp)
    sharded = {"stage": row.zero.stage, "shard_over": row.zero.over, "reshard": row.zero.reshard}
    zero = Zero(list(built.values()), mesh, units=(Block,), optimizer=adamw, seed=SEED, **sharded)
    specs = {name: spec for stage in built.values() for name, spec in param_specs(stage).items()}
    logical = {name: (spec.valid_box(), *spec.logical(name)) for name, spec in specs.items()}
    places = {name: Place(valid, whole, box) for name, (valid, whole, _, box) in logical.items()}
    record = Record([], [], [], {}, places)
    for step in range(1, STEPS + 1):
        batch = global_batch(row.model, step)
        share = BATCH // (mesh.data().size * row.microbatches)
        starts = [(index * mesh.data().size + mesh.data().rank) * share for index in range(row.microbatches)]
        mine = [part(batch, slice(start, start + share)) for start in starts]
        zero.begin(microbatches=row.microbatches, in_turns=True)
        told = {"last_backward": zero.last_backward, "announce": zero.announce}
        loss = pipeline.step(mine, denominator=batch.valid(), **told)
        record.losses.append(start_all_reduce(loss, mesh.data()).wait().item())
        record.gradients.append({name: gradient.clone() for name, gradient in zero.raw_gradients().items()})
        record.norms.append(zero.step(max_norm=MAX_NORM).item())
    with zero.gathered():
        for stage in built.values():
            record.weights.update({name: parameter.detach().clone() for name, parameter in stage.named_parameters()})
    return record


@functools.lru_cache
def on_one_process(model: str, loss: LossOptions) -> Record:
    """The reference: the same model alone, every option at its plainest. Its own steps are torch's, in tests/zero."""
    (record,) = run(train, 1, Row(model, loss=loss), checked=False)
    return record


def assert_parts(parts: dict[str, Tensor], wholes: dict[str, Tensor], places: dict[str, Place], least: float) -> None:
    """Each of a rank's parts is the logical tensor's, to 1e-10 of that tensor's norm or of `least`; padding is zero."""
    for name, local in parts.items():
        whole, value = wholes[places[name].name], local[places[name].valid]
        expected = whole[places[name].box]
        assert value.shape == expected.shape, name
        error = (value - expected).norm().item()
        assert error <= 1e-10 * max(whole.norm().item(), least), f"{name}: off by {error:.3g}"
        assert local.count_nonzero() == value.count_nonzero(), f"{name}: padding is not zero"


def assert_equal(record: Record, one: Record) -> None:
    """A gradient that is zero but for rounding, as a key bias's is, has its rounding from the others: each is held
    against a thousandth of the global norm at least."""
    for step, norm in enumerate(one.norms):
        assert abs(record.losses[step] - one.losses[step]) <= 1e-10 * abs(one.losses[step]), f"loss of step {step + 1}"
        assert_parts(record.gradients[step], one.gradients[step], record.places, 1e-3 * norm)
        assert abs(record.norms[step] - norm) <= 1e-10 * norm, f"norm of step {step + 1}"
    assert_parts(record.weights, one.weights, record.places, 1e-3)


def assert_law(row: Row) -> None:
    """The row trains as one process does: every rank, all that it holds; together they hold everything."""
    one = on_one_process(row.model, row.loss)
    records = run(train, row.layout.world_size, row, checked=False)
    for record in records:
        assert_equal(record, one)
    held = {record.places[name].name for record in records for name in record.weights}
    assert held == one.weights.keys()
    assert_replicas_are_alike(records)


def assert_replicas_are_alike(records: Sequence[Record]) -> None:
    """What several ranks hold of a weight has the same bits on each: replicas never drift apart."""
    first: dict[tuple[str, str], Tensor] = {}
    for record in records:
        for name, weight in record.weights.items():
            held = first.setdefault((name, str(record.places[name])), weight)
            assert torch.equal(weight, held), f"replicas of {name} have drifted apart"
