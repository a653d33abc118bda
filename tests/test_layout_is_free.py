"""The law of the whole project: same config and seed, same numbers, on every cut of the ranks.

A row of the table is a model, a layout, and options that change where and when work is done but not what. For each,
three clipped AdamW steps on the ranks of the layout are compared with the same model on one process with every option
at its plainest: each step's loss, raw gradients and norm, and the weights at the end. In float64, where a wrong term
stands out by ten orders of magnitude. Later parts of the project add their axis and their options to the table.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor, nn

from megalite.comm import start_all_reduce
from megalite.layers.recompute import Recompute
from megalite.mesh import Layout, Mesh
from megalite.models.config import GPTConfig, MLPConfig, RopeScaling
from megalite.models.gpt import GPT, Block, LossOptions
from megalite.models.microbatch import IGNORED, Microbatch, VectorMicrobatch
from megalite.models.mlp import MLP
from megalite.spec import param_specs
from megalite.weight_grad import WeightGradStore
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
    """ZeRO's stage, and over how many data ranks each unit is cut; None: all of them."""

    stage: int
    over: int | None = None

    def __str__(self) -> str:
        return f"zero{self.stage}" + (f" over {self.over}" if self.over else "")


UNSHARDED = Sharded(0)


@dataclass(frozen=True)
class Row:
    """One line of the table. deferred: a WeightGradStore puts weight gradients off until each backward has ended."""

    model: str
    layout: Layout = field(default_factory=Layout)
    sequence_parallel: bool = False
    microbatches: int = 1
    recompute: Recompute = PLAIN
    chunk_tokens: int | None = None
    deferred: bool = False
    loss: LossOptions = MEAN
    zero: Sharded = UNSHARDED

    def __str__(self) -> str:
        cut = " ".join(f"{axis}{size}" for axis, size in self.layout.sizes.items() if size > 1 and axis != "edp")
        more = [
            "sp" * self.sequence_parallel,
            f"m{self.microbatches}",
            self.recompute.mode + "".join(f" {op}" for op in self.recompute.ops) + f" {self.recompute.every}",
            f"chunk{self.chunk_tokens}" * bool(self.chunk_tokens),
            "deferred" * self.deferred,
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


def build(row: Row, mesh: Mesh) -> nn.Module:
    config = MODELS[row.model]
    if isinstance(config, MLPConfig):
        return MLP(config, mesh=mesh, device="meta", dtype=torch.float64)
    return GPT(
        config,
        mesh=mesh,
        sequence_parallel=row.sequence_parallel,
        recompute=row.recompute,
        loss=replace(row.loss, chunk_tokens=row.chunk_tokens),
        seed=SEED,
        device="meta",
        dtype=torch.float64,
    )


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([g | {"weight_decay": DECAY if g["decay"] else 0.0} for g in groups], lr=LR)


def train(row: Row) -> Record:
    """Three steps on one rank of the row's layout."""
    mesh = Mesh.build(row.layout)
    model = build(row, mesh)
    sharded = {"stage": row.zero.stage, "shard_over": row.zero.over}
    zero = Zero(model, mesh, units=(Block,), optimizer=adamw, seed=SEED, **sharded)
    logical = {name: (spec.valid_box(), *spec.logical(name)) for name, spec in param_specs(model).items()}
    places = {name: Place(valid, whole, box) for name, (valid, whole, _, box) in logical.items()}
    record = Record([], [], [], {}, places)
    for step in range(1, STEPS + 1):
        batch = global_batch(row.model, step)
        share = BATCH // (mesh.data().size * row.microbatches)
        total, store = torch.zeros((), dtype=torch.float64), WeightGradStore()
        zero.begin(microbatches=row.microbatches)
        for index in range(row.microbatches):
            start = (index * mesh.data().size + mesh.data().rank) * share
            loss = model(None, part(batch, slice(start, start + share))) / batch.valid()
            total += loss.detach()
            if row.deferred:
                with store.open():
                    loss.backward()
                store.run()
            else:
                loss.backward()
        record.losses.append(start_all_reduce(total, mesh.data()).wait().item())
        record.gradients.append({name: gradient.clone() for name, gradient in zero.raw_gradients().items()})
        record.norms.append(zero.step(max_norm=MAX_NORM).item())
    with zero.gathered():
        record.weights.update({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return record


@functools.lru_cache
def on_one_process(model: str, loss: LossOptions) -> Record:
    """The reference: the same model alone, every option at its plainest. Its own steps are torch's, in tests/zero."""
    (record,) = run(train, 1, Row(model, loss=loss), checked=False)
    return record


def assert_parts(parts: dict[str, Tensor], wholes: dict[str, Tensor], places: dict[str, Place], least: float) -> None:
    """Each of a rank's parts is the logical tensor's, to 1e-10 of that tensor's norm or of `least`; padding is zero."""
    assert {places[name].name for name in parts} == wholes.keys()
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


def assert_replicas_are_alike(records: Sequence[Record]) -> None:
    """What several ranks hold of a weight has the same bits on each: replicas never drift apart."""
    first: dict[tuple[str, str], Tensor] = {}
    for record in records:
        for name, weight in record.weights.items():
            held = first.setdefault((name, str(record.places[name])), weight)
            assert torch.equal(weight, held), f"replicas of {name} have drifted apart"


GPTS = [name for name, config in MODELS.items() if isinstance(config, GPTConfig)]
FACTORS = OrderedDict(
    model=GPTS,
    layout=[
        Layout(dp=2),
        Layout(dp=4),
        Layout(tp=2),
        Layout(tp=4),
        Layout(dp=2, tp=2),
        Layout(dp=2, tp=2, order=("dp", "tp", "cp", "pp")),
    ],
    sequence_parallel=[False, True],
    microbatches=[1, 2],
    recompute=[
        PLAIN,
        Recompute("full"),
        Recompute("full", every=2),
        Recompute("selective", ("attention", "norm", "activation")),
        Recompute("selective", ("mlp",)),
    ],
    chunk_tokens=[None, 5],
    deferred=[False, True],
    loss=[MEAN, LossOptions(z_loss=1e-2, label_smoothing=0.1)],
    zero=[UNSHARDED, Sharded(1), Sharded(2), Sharded(3), Sharded(3, over=2)],
)


def possible(row: dict[str, Any]) -> bool:
    """Sequence parallelism cuts over tp, ZeRO over data ranks. row: the values of some factors."""
    layout, zero = row.get("layout"), row.get("zero", UNSHARDED)
    return layout is None or not (
        (row.get("sequence_parallel") and layout.tp == 1) or (zero.over and layout.dp % zero.over)
    )


def _named(values: Sequence[Any]) -> dict[str, Any]:
    """The first of a row's values, as many as there are, by factor."""
    return dict(zip(FACTORS, values, strict=False))


# Every pair of values of two factors stands in a row: faults of two things together show, without the full product.
TABLE = [Row(**pairs._asdict()) for pairs in AllPairs(FACTORS, filter_func=lambda row: possible(_named(row)))] + [
    Row("mlp", Layout(dp=4), microbatches=2, zero=Sharded(3)),
    Row("mlp", Layout(tp=4), deferred=True),
    Row("mlp", Layout(dp=2, tp=2), microbatches=2, zero=Sharded(2)),
    Row("mlp of three", Layout(dp=2, tp=2), deferred=True, zero=Sharded(3)),
]


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_layout_trains_as_one_process_does(row: Row) -> None:
    one = on_one_process(row.model, row.loss)
    records = run(train, row.layout.world_size, row, checked=False)
    for record in records:
        assert_equal(record, one)
    assert_replicas_are_alike(records)


def test_the_table_has_every_pair_of_values() -> None:
    """The generator is another's: its promise is checked here, on what was made of it."""
    seen = {pair for row in TABLE for pair in combinations(((name, str(getattr(row, name))) for name in FACTORS), 2)}
    values = [[(name, value) for value in FACTORS[name]] for name in FACTORS]
    for one, other in ((a, b) for first, second in combinations(values, 2) for a in first for b in second):
        if possible(dict([one, other])):
            assert ((one[0], str(one[1])), (other[0], str(other[1]))) in seen, (one, other)
    # A norm over heads leaves a summand on each rank always, one over the stream only where tokens are cut.
    cut = {(row.model, row.sequence_parallel) for row in TABLE if row.layout.tp > 1}
    assert cut >= set(product(GPTS, (False, True)))
