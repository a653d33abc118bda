"""The most that one rank holds within a step, and where: an estimate, moment by moment.

Activations of a pass are at their most when its forward ends, and each layer's backward puts gradients of activations
on top before it gives anything back. So the peak is at one of few moments: the loss, the output layer's backward, the
last norm's, a block's (what it computes again, and the largest of what lies between its products), the embedding's, the
update; in a pipeline also the end of a stage's forward, and W. What Zero holds of weights and gradients at each of them
is exact; activations are those of `megalite.cost.activations`, of other passes in flight those of
`megalite.cost.in_flight`; the temporaries are those of this program's layers on the CPU, the large ones only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megalite.cost.activations import (
    Pass,
    around_blocks,
    block_activations,
    handed_on,
    local_tokens,
    stage_activations,
)
from megalite.cost.deferred import deferred_activations, deferred_of_block
from megalite.cost.in_flight import Load, beside, posted_receives
from megalite.cost.memory import Recipe, Sharing, State
from megalite.cost.temporaries import block_temporaries, embedding_temporaries, head_temporaries, loss_temporaries
from megalite.cost.weights import Cut, padded_vocabulary, units_of, used_units, weights_of
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.part import Part
from megalite.pipeline.schedule import Schedule


class Moment(NamedTuple):
    """Bytes at one moment of a step. weights, gradients: Zero's. activations: what is still kept for backward, with
    messages between stages."""

    name: str
    weights: int
    gradients: int
    activations: int
    temporaries: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.activations + self.temporaries + self.optimizer


@dataclass(frozen=True)
class Training:
    """All that a step's memory depends on. held: as `state` gives it. rank: of the schedule's."""

    model: GPTConfig | MLPConfig
    cut: Cut
    micro: Pass
    sharing: Sharing
    recipe: Recipe
    held: State
    schedule: Schedule
    rank: int = 0

    @cached_property
    def units(self) -> list[int]:
        """Entries of each of Zero's units."""
        return [unit.numel for unit in units_of(self.model, self.cut) for _ in range(unit.count)]

    @cached_property
    def parts(self) -> dict[int, Part]:
        """Stage -> what it has, of this rank's."""
        return dict(zip(self.schedule.stages_of(self.rank), self.cut.stages(self.model), strict=True))

    @cached_property
    def loads(self) -> dict[int, Load]:
        """Stage -> what one of its passes holds."""
        of = self.model, self.cut, self.micro
        return {
            stage: Load(
                stage_activations(*of, part),
                deferred_activations(*of, part),
                0 if part.is_first else handed_on(*of, part.layers.start),
                0 if part.is_last else handed_on(*of, part.layers.stop),
            )
            for stage, part in self.parts.items()
        }


def peak(training: Training) -> Moment:
    """The moment at which most is held."""
    return max(moments(training), key=lambda moment: moment.total)


def moments(training: Training) -> Iterator[Moment]:
    """The moments that can be the highest: of each kind of action in each stage, then the update."""
    posted = posted_receives(training.schedule, training.rank, training.loads)
    used = dict(zip(training.parts, used_units(training.model, training.cut), strict=True))
    for (kind, stage), others in beside(training.schedule, training.rank, training.loads).items():
        yield from _Work(training, kind, stage, used[stage], others + posted).moments()
    yield _update(training)


@dataclass(frozen=True)
class _Work:
    """An action of a kind on a stage. used: places of the units that it enters; others: held beside its own pass."""

    training: Training
    kind: str
    stage: int
    used: list[int]
    others: int

    @property
    def part(self) -> Part:
        return self.training.parts[self.stage]

    @property
    def units(self) -> list[int]:
        """Entries of each unit of the stage, a tied one only where forward meets it first."""
        model = self.training.model
        tied = isinstance(model, GPTConfig) and model.tie_word_embeddings and self.part.is_last
        return [self.training.units[place] for place in (self.used[:-1] if tied else self.used)]

    def moments(self) -> Iterator[Moment]:
        model = self.training.model
        if self.kind == "W":
            yield self._weight_gradients()
        elif isinstance(model, MLPConfig):
            yield from self._of_mlp(model)
        else:
            yield from self._forward(model) if self.kind == "F" else self._backward(model)

    @property
    def splits(self) -> bool:
        return self.kind == "B"

    def _of_mlp(self, model: MLPConfig) -> Iterator[Moment]:
        training, load = self.training, self.training.loads[self.stage]
        if self.kind == "F":
            yield self._moment(-1, f"forward of stage {self.stage}", load.kept, load.gives, begun=False)
            return
        wide = training.micro.batch * model.hidden_size * training.micro.value_bytes
        weight = 0 if self.splits else max(self.units, default=0) * training.recipe.weights
        deferred = load.deferred if self.splits else 0
        yield self._moment(-1, "backward", load.kept + deferred, 3 * wide + weight, begun=not self.splits)

    def _forward(self, model: GPTConfig) -> Iterator[Moment]:
        cut, micro, load = self.training.cut, self.training.micro, self.training.loads[self.stage]
        if self.part.is_last:
            yield self._moment(-1, "loss", load.kept, loss_temporaries(model, cut, micro), begun=False)
        else:
            yield self._moment(-1, f"forward of stage {self.stage}", load.kept, load.gives, begun=False)

    def _backward(self, model: GPTConfig) -> Iterator[Moment]:
        cut, micro, part, splits = self.training.cut, self.training.micro, self.part, self.splits
        around = around_blocks(model, cut, micro, part)
        by_layer = [block_activations(model, cut, micro, layer) for layer in part.layers]
        load, e, w = self.training.loads[self.stage], micro.value_bytes, micro.wide_bytes
        message, wide = (local_tokens(cut, micro) * model.hidden_size * each for each in (e, w))
        table = padded_vocabulary(model, cut.tp) // cut.tp * model.hidden_size * e
        tied = table if self._head_waits(model) else 0
        later = 0  # deferred by what was before in backward
        if part.is_last:
            yield self._moment(-1, "output layer", load.kept, head_temporaries(model, cut, micro, splits=splits))
            if splits:
                later = deferred_activations(model, cut, micro, Part(range(0), is_first=False))
            copies = 4 if e < 4 else 3  # of the input, its gradient and their product; the result
            kept = around + sum(by_layer) + message + later
            yield self._moment(-1, "last norm", kept, message + (copies - 1) * wide + message + tied)
        before = 1 + (model.position_embedding_type == "absolute") if part.is_first else 0  # units
        came = 0 if part.is_last or splits else message  # the gradient, which the executor holds to the end
        for index in reversed(range(len(part.layers))):
            layer = part.layers[index]
            kept = around + sum(by_layer[: index + 1]) + later
            temporary = block_temporaries(model, cut, micro, layer, splits=splits) + tied
            temporary += came if index < len(part.layers) - 1 else 0
            yield self._moment(before + index, f"block {layer}", kept, temporary, begun=not splits)
            later += deferred_of_block(model, cut, micro) if splits else 0
        if part.is_first:
            temporary = embedding_temporaries(model, cut, micro, splits=splits) + came
            yield self._moment(0, "embedding", around + later, temporary + tied)

    def _weight_gradients(self) -> Moment:
        """W: the largest of its products, and what is gathered for one and the next."""
        model, cut, micro = self.training.model, self.training.cut, self.training.micro
        sizes = {weight.name: weight.numel for weight in weights_of(model, cut)}
        product = max(*sizes.values(), sizes.get("q", 0) + sizes.get("k and v", 0)) * micro.value_bytes
        if isinstance(model, GPTConfig):
            whole = micro.tokens * model.hidden_size * micro.value_bytes
            product += 2 * whole if cut.sequence_parallel and cut.tp > 1 else 0
            if self.part.is_first:
                product = max(product, embedding_temporaries(model, cut, micro))
        deferred = self.training.loads[self.stage].deferred
        return self._moment(0, f"weight gradients of stage {self.stage}", deferred, product)

    def _head_waits(self, model: GPTConfig) -> bool:
        """Whether the head's gradient is held until the embedding's is there: in autograd, or in Zero."""
        goes = self.training.sharing.stage < 2 and not (self.part.is_first and self.part.is_last)
        return model.tie_word_embeddings and not goes

    def _moment(self, at: int, name: str, activations: int, temporaries: int, *, begun: bool = True) -> Moment:
        """With what Zero holds when work is at the at-th unit of the stage: its gradients if they have begun, and the
        reduction that was started last, of the unit before or of the last one of a micro-batch before."""
        training, held = self.training, self.training.held
        sharing, recipe = training.sharing, training.recipe
        units, activations = self.units or [0], activations + self.others
        padded, share = ([size(numel) for numel in units] for size in (sharing.padded, sharing.share))
        at, weights, gradients = at % len(units), held.weights, held.gradients
        if sharing.spreads_weights:
            whole = padded[max(at - sharing.prefetch, 0) : at + 1]
            whole += [max(padded)] * (1 + sharing.prefetch - len(whole))  # for the pass that follows
            weights += sum(whole if sharing.reshard == "forward" else padded) * recipe.weights
        again = training.schedule.microbatches > 1
        moving = None if self.splits or at + 1 == len(units) else at + 1
        if moving is None and again and sharing.stage >= 2:
            moving = 0
        if sharing.stage >= 2:
            summed = sum(map(sharing.share, training.units)) if again else sum(share[at + 2 :])
            gradients = (summed + (0 if moving is None else padded[moving])) * recipe.gradients
            gradients += begun * units[at] * recipe.weights  # as backward left them, until they are all there
        if sharing.stage >= 1 and sharing.shards > 1 and moving is not None:
            # With Gloo the parts of all other ranks, in one of which the sum is made; with NCCL the sum alone.
            parts = sharing.shards - 1 if training.micro.on_cpu else 1
            temporaries += parts * share[moving] * recipe.gradients
        return Moment(name, weights, gradients, activations, temporaries, held.masters + held.moments)


def _update(training: Training) -> Moment:
    """Gradients and moments that are kept narrow are widened for one slice, of one unit at most, at a time."""
    sharing, recipe, held = training.sharing, training.recipe, training.held
    slice_ = max(map(sharing.share, training.units), default=0)
    narrow = (recipe.gradients < recipe.wide) + (2 if recipe.moments < recipe.wide else 0)
    temporaries = 0 if sharing.offload else narrow * slice_ * recipe.wide
    return Moment("update", held.weights, held.gradients, 0, temporaries, held.masters + held.moments)


def most_weights(training: Training) -> int:
    """A bound of the weights that are there at once: the shards, 1 + prefetch whole units, and a tied one."""
    sharing, held = training.sharing, training.held
    if not sharing.spreads_weights:
        return held.weights
    units = list(map(sharing.padded, training.units))
    ahead = 1 + sharing.prefetch if sharing.reshard == "forward" else len(units)
    window = max(sum(units[start : start + ahead]) for start in range(len(units)))
    tied = units[0] if isinstance(training.model, GPTConfig) and training.model.tie_word_embeddings else 0
    return held.weights + (window + tied) * training.recipe.weights


def most_gradients(training: Training) -> int:
    """A bound of Zero's own gradients: what is kept of all units, and of one either both what backward has left and the
    buffer in which it is summed, or the latter while the next unit's come."""
    sharing, held, recipe = training.sharing, training.held, training.recipe
    if sharing.stage < 2:
        return held.gradients
    units = list(map(sharing.padded, training.units))
    alone = max(units) * (recipe.weights + recipe.gradients)
    pairs = [now * recipe.weights + before * recipe.gradients for now, before in itertools.pairwise(units)]
    two = max(alone, *pairs) if pairs else alone
    return held.gradients + two
