"""Models that use their modules in every odd way that plain torch allows, and odd orders of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zero.training import WIDTH, global_batch, one_by_one

Losses = list[Callable[[], Tensor]]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class OddSizes(nn.Module):
    """Parameters of 0, 1 and 3 entries, each in a module, so in a unit, of its own, and one of none in all."""

    class Holder(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(*shape, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + x * self.weight.sum()

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([linear(), *(self.Holder(n, 1) for n in (1, 0, 3)), self.Holder(3), linear()])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


class Checkpointed(nn.Module):
    """Four layers of which the user recomputes some: one, two at once, and a half of one."""

    class Half(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant
            self.first, self.second = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.first(x))
            return self.second(checkpoint(lambda y: torch.tanh(self.second(y)), y, use_reentrant=self.reentrant)) + x

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()
        self.partly, self.e = self.Half(reentrant), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = checkpoint(self.b, x, use_reentrant=self.reentrant)
        x = checkpoint(lambda x: torch.tanh(self.d(torch.tanh(self.c(x)))), x, use_reentrant=self.reentrant)
        return self.partly(self.e(x))


class Outer(nn.Module):
    """Two layers with one weight between them."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.one, self.two = linear(), linear()
        self.two.weight = self.one.weight
        if weight is not None:
            self.two.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class TiedInside(nn.Module):
    """Two `Outer`: tied each inside, and the second's last weight tied to the first's too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Outer()
        self.second = Outer(self.first.one.weight)
        self.last = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


@dataclass
class Result:
    main: Tensor
    label: Tensor
    more: dict[str, Tensor]


class Containers(nn.Module):
    """Modules that take keywords alone and give tuples, dicts, dataclasses, integers, and their own input."""

    class Step(nn.Module):
        def __init__(self, form: str) -> None:
            super().__init__()
            self.form, self.layer, self.scale = form, linear(), nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, *, inputs: dict[str, Tensor] | Result) -> object:
            x = inputs.main if isinstance(inputs, Result) else inputs["main"]
            y = torch.tanh(self.layer(x))
            own = self.scale.square().sum() + self.layer.weight.pow(3).sum()  # reaches no input
            if self.form == "tuple":
                return x, y, own
            if self.form == "dict":
                return {"main": y, "own": own, "label": y.argmax(-1)}
            return Result(y, y.argmax(-1), {"own": own, "detached": y.detach()})

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.last = *(self.Step(form) for form in ("tuple", "dict", "dataclass")), linear()

    def forward(self, x: Tensor) -> Tensor:
        same, y, own = self.a(inputs={"main": x})
        found = self.b(inputs={"main": y + same})
        result = self.c(inputs=Result(found["main"], found["label"], {}))
        everything = own + found["own"] + result.more["own"]
        return self.last(result.main) + 1e-2 * everything + self.a(inputs={"main": same})[1]


class Rooted(nn.Module):
    """The stage's own parameters are used by itself and handed to its modules, at every place."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.tanh(self.layer(x)) * scale

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.parts = nn.ModuleList(self.Part() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x * self.scale, self.scale) + self.shift
        return x * self.scale


class Wandering(nn.Module):
    """Modules that come again, in another order in each step, and without gradients in between."""

    def __init__(self, microbatches: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(4))
        self.microbatches, self.calls = microbatches, 0

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        step = self.calls // self.microbatches
        self.calls += 1
        with torch.no_grad():
            teacher = c(x)
        x = torch.tanh(b(a(x)).relu_()) + torch.tanh(a(x)) + 0.1 * teacher
        order = (c, d) if step % 2 else (d, c, b)
        for layer in order:
            x = layer(torch.tanh(x))
        return x


class Aside(nn.Module):
    """What a module leaves on itself, as a router leaves its auxiliary loss, joins the loss."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()
            self.aside = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            self.aside = self.layer(hidden).square().mean(-1, keepdim=True)
            return x + torch.tanh(hidden)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x + 1e-2 * sum(part.aside for part in self.parts)


class Nudged(nn.Module):
    """Whose forward raises, halfway, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        if self.raises:
            raise ArithmeticError
        return self.c(x)


class PartlyUsed(nn.Module):
    """Every unit is entered everywhere, but where a sample's first entry is small, half of one unit isn't used."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = linear(), linear()

        def forward(self, x: Tensor, used: bool) -> Tensor:
            x = torch.tanh(self.one(x))
            return torch.tanh(self.two(x)) if used else x

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = self.Part(), self.Part(), linear()

    def forward(self, x: Tensor) -> Tensor:
        used = bool(x[0, 0, 0] > 0.3)
        return self.last(self.b(self.a(x, used), not used))


class Frozen(nn.Module):
    """The first unit, one in the middle and half of another are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(5))
        for frozen in (self.layers[0], self.layers[2], self.layers[3].bias):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def forwards_first(model: nn.Module, losses: Losses) -> None:
    """As a pipeline may: all forwards, then the backwards in the same order."""
    for loss in [loss() for loss in losses]:
        loss.backward()


def last_in_first_out(model: nn.Module, losses: Losses) -> None:
    for loss in [loss() for loss in losses][::-1]:
        loss.backward()


def with_looks(model: nn.Module, losses: Losses) -> None:
    """Evaluation before and between micro-batches, and forwards whose graph is dropped."""
    for loss in losses:
        with torch.no_grad():
            evaluate(model)
        loss()
        loss().backward()
    evaluate(model)


def evaluate(model: nn.Module) -> Tensor:
    model.eval()
    value = global_batch(99).part(0, 4).loss(model)
    model.train()
    return value


def backward_twice(model: nn.Module, losses: Losses) -> None:
    """Half of each gradient comes from each of two backwards through one graph."""
    for loss in losses:
        value = loss() / 2
        value.backward(retain_graph=True)
        value.backward()


def after_an_error(model: nn.Module, losses: Losses) -> None:
    """A forward that raises halfway is caught and made good."""
    assert isinstance(model, Nudged)
    for loss in losses:
        model.raises = True
        try:
            loss()
        except ArithmeticError:
            model.raises = False
            one_by_one(model, [loss])
