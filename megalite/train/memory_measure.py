"""What a rank really holds, by kind, beside what `megalite.train.expect` says: measured in the first two steps.

    with measured_memory(log, stages, zero): ...the steps...

| what                      | when                                | how                                    |
|---------------------------|-------------------------------------|----------------------------------------|
| activations kept          | at the end of each stage's first    | storages made in it that are alive,    |
|                           | forward                             | and what came from the stage before    |
| gradients                 | as the first update begins          | Zero's own tensors                     |
| weights, masters, moments | between the first step and the next | Zero's and the optimizer's own tensors |
| the highest moment        | in the second step, which has all   | CPU: allocations that torch's profiler |
|                           | moments                             | sees; GPU: its allocator's own count   |

Nothing is measured after that, and no bit of a run changes. Equal to the byte but for the last, which is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.train.expect import memory_of
from megalite.train.header import describe_measured
from megalite.train.memory_timeline import Change, held_storages, read_tree
from megalite.train.recorder import Recorder
from megalite.train.spans import spans_of
from megalite.zero import Zero

if TYPE_CHECKING:
    from megalite.train.log import Log

KINDS = ("weights", "masters", "gradients", "moments")


class Survivors(TorchDispatchMode):
    """Within the block every new storage is noted; `nbytes()` is the sum of those that are still alive.

    Around a forward, and asked for at its end while the loss lives, that is what backward needs: what autograd saved,
    and what layers keep beside it. Inputs and parameters were there before. It changes no bit of what is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in before:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def nbytes(self) -> int:
        return sum(size for reference, size in self._made.values() if not reference.expired())


def _storages(values: Any) -> list[torch.UntypedStorage]:
    if isinstance(values, Tensor):
        return [values.untyped_storage()]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [storage for value in values for storage in _storages(value)]


def live_bytes(zero: Zero, *, offload: bool = False) -> dict[str, int]:
    """What Zero holds on its device at this moment, by kind, and `host`: what `offload` holds in the CPU's memory.

    Counters of the optimizer, of one number each, are left out.
    """
    kinds: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for unit in zero.units:
        for kind, tensors in unit.live().items():
            kinds[kind] += tensors
    states = zero.optimizer.state.values()
    kinds["moments"] += [v for state in states for v in state.values() if isinstance(v, Tensor) and v.ndim]
    found = dict.fromkeys((*KINDS, "host"), 0)
    for kind, tensors in kinds.items():
        for tensor in tensors:
            is_offloaded = offload and kind in ("masters", "moments")
            found["host" if is_offloaded else kind] += tensor.nbytes
    return found


class MemoryCheck:
    """Looks at one rank's memory as its first steps go by, and calls `done` with what it found, once.

    found: bytes by KINDS and host, `kept` (of one micro-batch in each of the rank's stages), and `peak` if it was asked
    for. Between `__enter__` and the end of the second step stages and optimizer carry hooks.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        zero: Zero,
        *,
        peak: bool,
        done: Callable[[dict[str, int]], None],
        offload: bool = False,
    ) -> None:
        self.stages, self.zero, self.peak, self.done, self.offload = list(stages.values()), zero, peak, done, offload
        self.found: dict[str, int] = {}
        self.kept: dict[nn.Module, int] = {}
        self.survivors: Survivors | None = None
        self.recording: PeakRecording | None = None
        self.updates = 0  # steps that were made so far
        self.hooks = ExitStack()

    def __enter__(self) -> MemoryCheck:
        removable = [
            *(stage.register_forward_pre_hook(self._begins) for stage in self.stages),
            *(stage.register_forward_hook(self._ends, always_call=True) for stage in self.stages),
            self.zero.optimizer.register_step_pre_hook(self._updates),
        ]
        for hook in removable:
            self.hooks.callback(hook.remove)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.updates and kind is None:
            self._see_state()
            self._finish()
        self.hooks.close()
        if self.recording is not None:
            self.recording.stop()

    def _begins(self, stage: nn.Module, args: Any) -> None:
        if self.updates:
            self._see_state()  # before anything else, an evaluation for one, gathers weights
        if not stage.training or not torch.is_grad_enabled():
            return
        if not self.updates and stage not in self.kept:
            self.survivors = Survivors()
            self.survivors.__enter__()
        elif self.updates == 2 or (self.updates and not self.peak):
            self._finish()
        elif self.updates and self.recording is None and self.zero.device.type == "cpu":
            self.recording = PeakRecording(self.stages, self.zero)

    def _ends(self, stage: nn.Module, args: Any, output: Tensor | None) -> None:
        if self.survivors is not None:
            survivors, self.survivors = self.survivors, None
            survivors.__exit__(None, None, None)
            if output is not None:  # as where forward has failed
                came = sum(storage.nbytes() for storage in _storages(args[:1]))
                self.kept[stage] = came + survivors.nbytes() - (0 if _is_saved(output) else output.nbytes)
            if len(self.kept) == len(self.stages):
                self.found["kept"] = sum(self.kept.values())

    def _updates(self, *_: Any) -> None:
        if "gradients" not in self.found:
            self.found["gradients"] = live_bytes(self.zero)["gradients"]
        self.updates = 1 if "weights" not in self.found else 2
        if self.updates == 2 and self.recording is not None and _replaces_moments(self.zero):
            self.found["peak"], self.recording = self.recording.stop(), None

    def _see_state(self) -> None:
        if "weights" not in self.found:
            live = live_bytes(self.zero, offload=self.offload)
            self.found |= {kind: live[kind] for kind in live if kind != "gradients"}

    def _finish(self) -> None:
        if self.recording is not None:
            peak, self.recording = self.recording.stop(), None
            self.found |= {"peak": peak} if self.updates == 2 else {}
        elif self.peak and self.updates == 2 and self.zero.device.type == "cuda":
            self.found["peak"] = torch.cuda.max_memory_allocated(self.zero.device)
        self.hooks.close()
        done, self.done = self.done, lambda found: None
        done(self.found)


def _is_saved(output: Tensor) -> bool:
    """Whether what made a tensor reads it in backward, so that it stays."""
    function, mine = output.grad_fn, output.untyped_storage().data_ptr()
    saved = [getattr(function, name) for name in dir(function) if name.startswith("_saved_")]
    return any(storage.data_ptr() == mine for storage in _storages(saved))


def _replaces_moments(zero: Zero) -> bool:
    """Whether an update puts new moments in the place of old ones, whose end the CPU's allocator does not report."""
    states = zero.optimizer.state.items()
    return any(v.dtype != p.dtype for p, state in states for v in state.values() if isinstance(v, Tensor) and v.ndim)


class PeakRecording:
    """From construction to `stop`: the most that the CPU has allocated, on top of what Zero held when it began."""

    def __init__(self, stages: Sequence[nn.Module], zero: Zero) -> None:
        self.before = sum(held.nbytes for held in held_storages(zero, stages).values())
        self.profiler = Recorder(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profiler.start()

    def stop(self) -> int:
        self.profiler.stop()
        results: Any = self.profiler.profiler.kineto_results  # type: ignore[union-attr]
        changes, _ = read_tree(results.experimental_event_tree(), device=torch.device("cpu"), names=set())
        return self.before + highest(changes)


def highest(changes: Iterable[Change]) -> int:
    """The most that is held at once of what these changes allocate.

    The profiler misses ends on other threads, as Gloo's: a place that is allocated again has been freed before.
    """
    held: dict[int, int] = {}
    level = most = 0
    for change in changes:
        level -= held.pop(change.place, 0)
        if change.nbytes > 0:
            held[change.place] = change.nbytes
            level += change.nbytes
        most = max(most, level)
    return most


@contextmanager
def measured_memory(
    log: Log, stages: Mapping[int, nn.Module], zero: Zero, *, peak: bool | None = None
) -> Iterator[None]:
    """Rank 0 measures its memory in the first two steps, and says it with what was expected.

    peak: also the highest moment; None = on a GPU, where the allocator counts. On the CPU torch's profiler records the
    second step for it, unless profile.steps has it record that step already.
    """
    if not log.speaks:
        yield
        return
    on_cpu, records = log.world.device == "cpu", log.config.profile.steps
    expected = memory_of(log.config, spans_of(log.config)[0], on_cpu=on_cpu)
    peak = not on_cpu if peak is None else peak
    if on_cpu and records and records[0] <= 3:
        peak = False

    def say(found: dict[str, int]) -> None:
        for line in describe_measured(expected, found):
            log.display.line(line)

    with MemoryCheck(stages, zero, peak=peak, done=say, offload=log.config.zero.offload):
        yield
