"""`Profile`: what some steps of some ranks spent their time on and held in memory, as files to look at.

    with Profile(config, world.rank, zero=zero, stages=stages) as profile:
        for step in ...:
            profile.at(step)
            with profile.range("F0@0"): ...
            with profile.range("BW0@0"): ...

out_dir/profile/rank<N>.json.gz is the Chrome trace (chrome://tracing and ui.perfetto.dev open it as it is),
rank<N>-memory.png and rank<N>-memory.json the memory by kind; files of an earlier run are replaced. docs/profiling.md
says how to read them. Outside of the recorded steps, and on other ranks, nothing is wrapped, hooked or measured.
"""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function

from megalite.comm import Call, Observer, observe
from megalite.spec import ParallelModule
from megalite.train.config import Config
from megalite.train.memory_timeline import Held, Mark, Timeline, held_storages, read_tree, timeline
from megalite.train.recorder import Recorder
from megalite.train.strict import ConfigError
from megalite.zero import Zero


class Profile:
    """Records the steps of config.profile.steps, both included, on the ranks of config.profile.ranks.

    The files are written when the last of them is over, or when the block ends, however it does. The numbers of the
    run stay the same bits. Raises ConfigError, on all ranks, if the memory is to be drawn and nothing can draw.
    """

    def __init__(self, config: Config, rank: int, *, zero: Zero, stages: Mapping[int, nn.Module]) -> None:
        wanted = config.profile
        if wanted.steps and wanted.memory and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "profile.memory=true draws with matplotlib, which is not installed; "
                "pip install 'megalite[plot]', or take profile.memory=false"
            )
        self.steps = tuple(wanted.steps) if rank in wanted.ranks else ()
        self.memory = wanted.memory
        self.stem = Path(config.out_dir, "profile", f"rank{rank}")
        self.zero, self.stages = zero, list(stages.values())
        self.recording: Recording | None = None

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._end()
        except Exception as failure:
            if error is None:
                raise
            warnings.warn(f"the profile could not be written: {failure}", stacklevel=2)  # the run's own error matters

    def at(self, step: int) -> None:
        """`step`, from 1, is about to begin."""
        if not self.steps:
            return
        first, last = self.steps
        if self.recording is not None and step > last:
            self._end()
        if first <= step <= last:
            if self.recording is None:
                self.recording = Recording(self.zero, self.stages, memory=self.memory)
            self.recording.at(step)

    def range(self, name: str) -> AbstractContextManager[Any]:
        """What happens in the block is shown under this name; of no effect outside of the recorded steps."""
        return nullcontext() if self.recording is None else self.recording.action(name)

    def _end(self) -> None:
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.end()
            recording.write(self.stem)


class Recording:
    """The profiler at work, from construction until `end`; then `write`, and `timeline` where memory is recorded.

    Ranges: `step 10`; actions; modules by their path, in forward and where backward computes them again; collectives as
    `issue all_reduce over tp: 1,024 bytes` and `wait ...`; and, in backward, an instant `gradient of <parameter>`.
    """

    def __init__(self, zero: Zero, stages: Sequence[nn.Module], *, memory: bool) -> None:
        self.zero, self.stages, self.memory = zero, stages, memory
        self.names: set[str] = set()
        self.arrivals: list[tuple[str, int]] = []  # (name of the instant, place of the gradient)
        self.kept: list[tuple[str, dict[int, Held]]] = []  # at the end of each step
        self.before = held_storages(zero, stages) if memory else {}
        on_cuda = zero.device.type == "cuda"
        self.before_bytes = torch.cuda.memory_allocated(zero.device) if on_cuda else None
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        self.profiler = Recorder(activities=activities, profile_memory=memory)
        self.step = ExitStack()
        self.within = ExitStack()
        self.within.callback(self.profiler.stop)
        self._land()
        self.profiler.start()
        for stage in stages:
            self.within.enter_context(module_ranges(stage))
            self.within.enter_context(gradient_instants(stage, self._arrived))
        self.within.enter_context(observe(CollectiveRanges()))

    def _land(self) -> None:
        """Weights that are being gathered arrive: see `Recorder`."""
        for unit in self.zero.units:
            unit.wait()

    def at(self, step: int) -> None:
        self.step.close()
        name = f"step {step}"
        self.names.add(name)
        self.step.enter_context(record_function(name))
        if self.memory:
            self.step.callback(lambda: self.kept.append((name, held_storages(self.zero, self.stages))))

    def action(self, name: str) -> AbstractContextManager[Any]:
        self.names.add(name)
        return record_function(name)

    def end(self) -> None:
        """Everything that was put on the model is gone, whatever fails."""
        self._land()
        with self.within:
            self.step.close()

    def write(self, stem: Path) -> None:
        """stem: of the files' names."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        trace = stem.with_name(f"{stem.name}.json.gz")
        part = trace.with_name(f"part-{trace.name}")  # a reader never sees half a file
        self.profiler.export_chrome_trace(str(part))
        os.replace(part, trace)
        if self.memory:
            from megalite.train.memory_plot import draw

            found = self.timeline()
            stem.with_name(f"{stem.name}-memory.json").write_text(json.dumps(found.as_json()))
            draw(found, stem.with_name(f"{stem.name}-memory.png"))

    def timeline(self) -> Timeline:
        results: Any = self.profiler.profiler.kineto_results  # type: ignore[union-attr]
        instants = {name for name, _ in self.arrivals}
        changes, found = read_tree(
            results.experimental_event_tree(), device=self.zero.device, names=self.names | instants
        )
        ranges = [one for one in found if one.name in self.names]
        ends = {one.name: one.end_ns for one in ranges}
        seen = [one for one in found if one.name in instants]
        assert [one.name for one in seen] == [name for name, _ in self.arrivals], "an instant was lost"
        marks = [Mark(one.end_ns, place, "gradients") for one, (_, place) in zip(seen, self.arrivals, strict=True)]
        for name, storages in self.kept:
            marks += [Mark(ends[name], place, held.kind) for place, held in storages.items()]
        return timeline(
            changes,
            device=str(self.zero.device),
            ranges=ranges,
            marks=marks,
            before=self.before,
            before_bytes=self.before_bytes,
        )

    def _arrived(self, name: str, gradient: Tensor) -> None:
        self.arrivals.append((name, gradient.untyped_storage().data_ptr()))


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """In the block, calls of parallel layers, and of modules that hold some, are ranges named by their path.

    Their `forward` is wrapped rather than hooked: recomputation leaves a module by an exception, past its hooks.
    """

    def ranged(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(name):
                return forward(*args, **kwargs)

        return run

    with ExitStack() as undo:
        for name, module in model.named_modules():
            if name and any(isinstance(inner, ParallelModule) for inner in module.modules()):
                module.forward = ranged(name, module.forward)  # type: ignore[method-assign]
                undo.callback(delattr, module, "forward")
        yield


@contextmanager
def gradient_instants(model: nn.Module, arrived: Callable[[str, Tensor], None]) -> Iterator[None]:
    """In the block, `arrived(name, gradient)` hears of each gradient of a parameter, at an instant of that name.

    Hooks of leaves: they see what autograd is about to store, and neither change nor keep it.
    """

    def hook(name: str) -> Callable[[Tensor], None]:
        def see(gradient: Tensor | None) -> None:
            if gradient is None:  # it was put off, and comes with W
                return
            with record_function(name):
                arrived(name, gradient)

        return see

    with ExitStack() as undo:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                undo.callback(parameter.register_hook(hook(f"gradient of {name}")).remove)
        yield


class CollectiveRanges(Observer):
    """Each collective as two ranges: handing it over, and waiting for it."""

    def __init__(self) -> None:
        self.open: dict[Call, record_function] = {}

    def issuing(self, call: Call) -> None:
        self._begin("issue", call)

    def waiting(self, call: Call) -> None:
        self._begin("wait", call)

    def issued(self, call: Call) -> None:
        self.open.pop(call).__exit__(None, None, None)

    waited = issued

    def _begin(self, verb: str, call: Call) -> None:
        self.open[call] = record_function(f"{verb} {call}: {call.payload_bytes:,} bytes")
        self.open[call].__enter__()
