"""What a parameter is does not depend on the layout: its first values, its box, its copies."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.mesh import Axis
from megalite.spec import (
    TILE_COLUMNS,
    TILE_ROWS,
    Init,
    ParallelModule,
    ParamSpec,
    PartOf,
    draw_,
    init_parameters,
    normal,
    ones,
    param_specs,
    uniform,
    zeros,
)
from tests.law import axes


def _drawn(spec: ParamSpec, *, seed: int = 7, name: str = "w", dtype: torch.dtype = torch.float32) -> Tensor:
    target = torch.full(spec.local_shape, math.nan, dtype=dtype)
    draw_(target, spec, seed=seed, name=name)
    return target


def _put_together(shape: tuple[int, ...], init: Init, cuts: dict[str, tuple[int, int]], pad: dict[int, int]) -> Tensor:
    """Every rank's part, drawn apart, in its box of the padded whole. cuts: axis -> (size, dim)."""
    whole = torch.full(ParamSpec(shape, init, pad=pad).padded_shape, math.nan)
    for ranks in itertools.product(*(axes(name, size) for name, (size, _) in cuts.items())):
        spec = ParamSpec(shape, init, cut={axis: cuts[axis.name][1] for axis in ranks}, pad=pad)
        assert whole[spec.box()].isnan().all(), "boxes do not overlap"
        whole[spec.box()] = _drawn(spec)
    return whole


SHAPES = [(130, 2100), (4, 6, 1100), (2, 3, 5, 70), (2100,), (TILE_ROWS, TILE_COLUMNS)]


@pytest.mark.parametrize("init", [normal(0.02), uniform(0.5), ones], ids=lambda init: init.kind)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_is_the_same_to_the_bit_whatever_cuts_it(shape, init):
    whole = _drawn(ParamSpec(shape, init))
    assert not whole.isnan().any()
    for dim, size in enumerate(shape):
        for n in (n for n in (2, 3, 5, 10) if size % n == 0):
            assert torch.equal(_put_together(shape, init, {"tp": (n, dim)}, {}), whole)
    last = len(shape) - 1
    two_axes = {"ep": (2, 0), "tp": (5 if shape[-1] % 5 == 0 else 2, last)}
    assert torch.equal(_put_together(shape, init, two_axes, {}), whole)


def test_several_axes_may_cut_one_dim_outermost_first():
    outer, inner = Axis("ep", 2, 1), Axis("etp", 3, 2)
    assert ParamSpec((12, 5), zeros, cut={outer: 0, inner: 0}).box() == (slice(10, 12), slice(0, 5))
    assert ParamSpec((12, 5), zeros, cut={inner: 0, outer: 0}).box() == (slice(10, 12), slice(0, 5))
    assert ParamSpec((12, 5), zeros, cut={Axis("ep", 2, 1): 0, Axis("etp", 3, 0): 0}).box()[0] == slice(6, 8)
    whole = _drawn(ParamSpec((12, 5), normal(1)))
    assert torch.equal(_put_together((12, 5), normal(1), {"ep": (2, 0), "etp": (3, 0)}, {}), whole)


@pytest.mark.parametrize(("size", "n"), [(101, 2), (101, 4), (5, 4), (1, 4)])
def test_padding_is_zero_and_changes_nothing_else(size, n):
    padded = -(-size // n) * n
    whole = _put_together((size, 40), normal(1), {"tp": (n, 0)}, {0: padded})
    assert whole.shape == (padded, 40)
    assert torch.equal(whole[:size], _drawn(ParamSpec((size, 40), normal(1))))
    assert torch.equal(whole[size:], torch.zeros(padded - size, 40))
    valid = [ParamSpec((size, 40), ones, cut={axis: 0}, pad={0: padded}).valid_box()[0] for axis in axes("tp", n)]
    assert sum(part.stop - part.start for part in valid) == size
    assert ParamSpec((size, 40), ones, pad={0: padded}).numel == size * 40, "padding is no parameter"


def test_every_precision_starts_from_the_same_float32_numbers():
    spec = ParamSpec((70, 30), normal(0.02))
    single = _drawn(spec)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(_drawn(spec, dtype=dtype), single.to(dtype))


def test_no_two_streams_are_alike():
    """Two tiles, names or seeds that shared a stream would start with equal rows; so would seeds cut to 32 bits."""
    spec = ParamSpec((3 * TILE_ROWS, 3 * TILE_COLUMNS), normal(1))
    values = _drawn(spec)
    tiles = [t for band in values.split(TILE_ROWS) for t in band.split(TILE_COLUMNS, 1)]
    tiles += [_drawn(ParamSpec((TILE_ROWS, TILE_COLUMNS), normal(1)), seed=seed) for seed in (8, 7 + 2**32, 7 + 2**64)]
    tiles += [_drawn(ParamSpec((TILE_ROWS, TILE_COLUMNS), normal(1)), name=name) for name in ("v", "w0")]
    tiles = [tile.double().flatten() for tile in tiles]
    for a, b in itertools.combinations(tiles, 2):
        correlation = torch.dot(a, b) / a.numel()
        assert abs(correlation) < 6 / math.sqrt(a.numel()), "more than six standard deviations from independent"
    rows = values[:, :8].unique(dim=0)
    assert len(rows) == len(values), "no row comes twice"


def test_the_deviation_is_that_of_the_logical_shape_on_every_tp():
    """A fan that is counted on the cut weight makes the deviation grow with the square root of tp."""
    for make, dim in ((ColumnParallelLinear, 0), (RowParallelLinear, 1)):
        whole = {}
        for n in (1, 4):
            torch.manual_seed(3)
            seeds = torch.get_rng_state()
            parts = []
            for axis in axes("tp", n):
                torch.set_rng_state(seeds)
                parts.append(make(256, 512, tp=axis).weight.detach())
            whole[n] = torch.cat(parts, dim)
        assert torch.equal(whole[1], whole[4])
        expected = 1 / math.sqrt(256) / math.sqrt(3)  # of a uniform distribution of that bound
        assert abs(whole[4].std() / expected - 1) < 0.03, "131072 values: the deviation is known to about 0.1 %"


def _model() -> nn.Module:
    tp = Axis("tp")
    return nn.Sequential(ColumnParallelLinear(6, 8, tp=tp, init=normal(0.1)), RowParallelLinear(8, 6, tp=tp))


def test_initial_values_are_pinned():
    """They are a promise to whoever repeats a run: a parameter renamed, or another way to draw, is noticed here."""
    model = _model()
    init_parameters(model, seed=1234)
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    big = _drawn(ParamSpec((TILE_ROWS + 1, TILE_COLUMNS + 1), normal(0.02)), seed=0, name="big")
    digest.update(big.numpy().tobytes())
    assert digest.hexdigest()[:16] == "95e5aff0eced861a"


def test_parameters_are_drawn_by_seed_and_name():
    first, again, other = _model(), _model(), _model()
    init_parameters(first, seed=1)
    init_parameters(again, seed=1)
    init_parameters(other, seed=2)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0].weight, other[0].weight)
    renamed = nn.Sequential(nn.Identity(), *_model())
    init_parameters(renamed, seed=1)
    assert not torch.equal(renamed[1].weight, first[0].weight)


class _Tied(ParallelModule):
    """One Parameter under four names: twice here, and once in each of two children."""

    def __init__(self) -> None:
        super().__init__()
        spec = ParamSpec((6, 4), normal(1))
        self.table = self.declare("table", spec, device="meta")
        self.alias = self.table
        self.children_of_it = nn.ModuleList(ColumnParallelLinear(4, 6, tp=Axis("tp"), device="meta") for _ in range(2))
        for child in self.children_of_it:
            child.weight = self.table


def test_off_the_meta_device_tied_parameters_are_still_one():
    model = _Tied()
    assert all(parameter.is_meta for parameter in model.parameters())
    init_parameters(model, seed=5)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.table is model.alias is model.children_of_it[0].weight is model.children_of_it[1].weight
    assert torch.equal(model.table, _drawn(ParamSpec((6, 4), normal(1)), seed=5, name="table"))
    assert model.children_of_it[0].bias is not model.children_of_it[1].bias
    assert list(param_specs(model)) == ["table", "children_of_it.0.bias", "children_of_it.1.bias"], "each once"


def test_a_parameter_made_from_meta_keeps_its_dtype_and_whether_it_is_trained():
    model = ColumnParallelLinear(4, 6, tp=Axis("tp"), device="meta", dtype=torch.float64)
    model.bias.requires_grad_(False)
    init_parameters(model, seed=5)
    assert model.weight.dtype == torch.float64
    assert (model.weight.requires_grad, model.bias.requires_grad) == (True, False)


def test_a_plain_parameter_counts_as_replicated_and_keeps_its_values():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), _model())
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not name.startswith("2")}
    init_parameters(model, seed=1)
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value)
    specs = param_specs(model)
    assert specs["0.weight"] == ParamSpec((4, 3), None, decay=True)
    assert {name for name, spec in specs.items() if spec.decay} == {"0.weight", "2.0.weight", "2.1.weight"}
    assert set(specs) == {name for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=r"parameter 0\.weight is on the meta device and declares no ParamSpec"):
        init_parameters(nn.Sequential(nn.Linear(3, 4, device="meta")), seed=1)


def test_specs_outlive_deepcopy_and_assignment_and_to_empty():
    model = _model()
    specs = param_specs(model)
    assert param_specs(copy.deepcopy(model)) == specs
    other = _model()
    other.load_state_dict(model.state_dict(), assign=True)
    assert param_specs(other) == specs
    assert param_specs(other.to("meta").to_empty(device="cpu")) == specs
    assert specs["0.bias"].cut == {Axis("tp"): 0}
    assert specs["0.bias"].decay is False


class _Partial(ParallelModule):
    def __init__(self, tp: Axis) -> None:
        super().__init__()
        self.weight = self.declare("weight", ParamSpec((8,), ones, partial=(tp,)))


def test_a_partial_parameter_is_whole_on_each_rank():
    for axis in axes("tp", 4):
        model = _Partial(axis)
        assert torch.equal(model.weight, torch.ones(8))
        assert param_specs(model)["weight"].partial == (axis,)


def test_copies_are_what_the_axes_that_do_not_cut_leave():
    dp, cp, tp = Axis("dp", 4), Axis("cp", 3), Axis("tp", 2)
    view = (dp, cp, tp)
    assert ParamSpec((8,), ones).copies(view) == 24
    assert ParamSpec((8,), ones, cut={tp: 0}).copies(view) == 12
    assert ParamSpec((8,), ones, partial=(tp,)).copies(view) == 24, "in view and partial, tp counts once"
    assert ParamSpec((8,), ones, partial=(Axis("tie", 2),)).copies(view) == 48
    wide = Axis("tp", 8)
    outer, inner = Axis("tp_outer2", 2, ranks=(0, 4), parent=wide), Axis("tp_inner4", 4, parent=wide)
    assert ParamSpec((8,), ones, cut={outer: 0}, partial=(inner,)).copies((dp, cp, wide)) == 4 * 3 * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ParamSpec((10, 4), ones, cut={Axis("tp", 4): 0}).local_shape,
            r"shape \(10, 4\): dim 0 of 10 cannot be cut over axis tp of size 4; take a size that divides 10",
        ),
        (
            lambda: ParamSpec((10, 4), ones, cut={Axis("ep", 2): 0, Axis("tp", 2): 0}).box(),
            r"dim 0 of 5 cannot be cut over axis tp of size 2",
        ),
        (
            lambda: _Declares(ParamSpec((9,), ones, cut={Axis("tp", 2): 0})),
            r"dim 0 of 9 cannot be cut over axis tp of size 2",
        ),
        (lambda: Init("gaussian"), "init kind 'gaussian' is none of normal, uniform, constant"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_both_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class _Declares(ParallelModule):
    def __init__(self, spec: ParamSpec) -> None:
        super().__init__()
        self.declare("weight", spec)


def test_a_region_of_a_logical_tensor_is_drawn_as_that_tensor_is():
    """Name, shape and box are the whole's, so first values are too, and two regions make it up."""
    whole = _drawn(ParamSpec((4, 5, 70), normal(1.0)), name="block.weight")
    for start, count in ((0, 3), (3, 2)):
        part_of = PartOf("weight", (4, 5, 70), (0, start, 0))
        for axis in axes("tp", 2):
            spec = ParamSpec((4, count, 70), normal(1.0), cut={axis: 0}, part_of=part_of)
            name, shape, box = spec.logical("block.region")
            assert (name, shape, spec.numel) == ("block.weight", (4, 5, 70), 4 * count * 70)
            assert torch.equal(_drawn(spec, name="block.region"), whole[box])
