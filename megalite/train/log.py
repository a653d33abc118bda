"""What a person sees of a run, and what it leaves behind: a header, a line a step, a summary; rows of metrics.

Only rank 0 speaks and writes. A row is one step, in full precision: `step` from 1, then names in slash groups, which
docs/metrics.md explains. `megalite.train.sinks` says where rows go and how runs are kept apart,
`megalite.train.display` how lines look, `megalite.train.meter` how times are taken.

    log = Log(config, world=world, mesh=mesh)
    log.header(...)                                 before memory is taken, so that one is warned in time
    with log:
        for step in ...:
            batch = log.read(batches.training, step)                the step begins
            ...
            metrics = {"train/loss": ...} | log.measured(step)      the step's work is done; on every rank
            log.step(step, metrics)
        log.summary(...)
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from omegaconf import OmegaConf

from megalite.comm import observe
from megalite.cost.flops import mfu
from megalite.data import Baselines
from megalite.mesh import Mesh
from megalite.train.config import Config
from megalite.train.display import Display, PlainDisplay, duration, open_display, step_fields, validation_line
from megalite.train.expect import available_bytes, operations_per_token
from megalite.train.header import describe_baselines, header_lines, peak_of
from megalite.train.meter import Look, Meter
from megalite.train.metrics import looks_at_ranks, occurring
from megalite.train.sinks import Sink, open_fresh, open_sinks, require_extras
from megalite.train.spans import span_at, spans_of

if TYPE_CHECKING:
    from megalite.train.launch import World

T = TypeVar("T")
SUMMARY_STEPS = 20
RECENT_STEPS = 50
"""How many steps the time left is judged by, and the speed in the summary."""


class Log:
    """The log of one run on one rank; on ranks other than 0 it measures and is silent.

    Raises ConfigError, on every rank, if the configuration asks for an extra that is not installed.
    """

    def __init__(self, config: Config, *, world: World, mesh: Mesh) -> None:
        require_extras(config.log)
        self.config, self.world, self.mesh = config, world, mesh
        self.speaks = world.rank == 0
        self.spans = spans_of(config)
        self.peak = peak_of(config, world.device)
        self.meter = Meter(device=world.device)
        self.looks = looks_at_ranks(config, world.size)
        self.look: Look | None = None  # of the present step
        self.slowest: Counter[int] = Counter()
        self.display: Display = PlainDisplay()
        self.sinks: list[Sink] = []
        self.baselines: Baselines | None = None
        self.losses: deque[float] = deque(maxlen=SUMMARY_STEPS)
        self.recent: deque[Mapping[str, float]] = deque(maxlen=RECENT_STEPS)
        self.token_seconds: deque[float] = deque(maxlen=RECENT_STEPS)  # from the end of a step to the next, a token
        self.validation: dict[str, float] = {}
        self.ended = self.began = time.perf_counter()
        self.stack = ExitStack()

    def __enter__(self) -> Log:
        with ExitStack() as stack:
            stack.enter_context(observe(self.meter))
            if self.speaks:
                names = occurring(
                    self.config,
                    device=self.world.device,
                    world_size=self.world.size,
                    peak_known=self.peak.tflops is not None,
                )
                for sink in open_sinks(self.config, names):
                    self.sinks.append(sink)
                    stack.callback(sink.close)
                with open_fresh(Path(self.config.out_dir) / "config.yaml") as file:
                    file.write(OmegaConf.to_yaml(OmegaConf.create(asdict(self.config))))
                self.display = open_display(self.config.log.display, steps=self.config.last_step)
                stack.callback(self.display.close)
            self.stack = stack.pop_all()
        self.ended = self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def header(self, *, data: str, baselines: Callable[[], Baselines | None]) -> None:
        """What is about to run. baselines: computed by the rank that shows them."""
        if not self.speaks:
            return
        self.baselines = baselines()
        for line in header_lines(
            self.config,
            self.mesh.layout,
            where=self.world.describe(),
            data=data,
            baselines=self.baselines,
            peak=self.peak,
            available=available_bytes(self.world.device, local_ranks=self.world.local_size),
            device=self.world.device,
        ):
            self.display.line(line)

    def read(self, training: Callable[[int], T], step: int) -> T:
        """A step begins: its data, training(step), whose time is taken."""
        with self.meter.reading():
            return training(step)

    def measured(self, step: int) -> dict[str, float]:
        """The work of a step is done: its numbers of tokens and samples, its times and memory. Every rank calls it."""
        times = self.meter.end()
        span = span_at(self.spans, step)
        rate = span.tokens_per_step / max(times.step_seconds, 1e-9)
        row: dict[str, float] = {
            "train/tokens": self._tokens(step),
            "train/samples": span.samples_consumed(step + 1),
            "perf/tokens_per_sec": rate,
            "perf/tokens_per_sec_per_rank": rate / self.world.size,
            **{f"perf/{name}": seconds for name, seconds in times._asdict().items()},
        }
        if self.peak.tflops is not None:
            row["perf/mfu"] = mfu(
                flops_per_token=operations_per_token(self.config, span),
                tokens_per_second_per_rank=rate / self.world.size,
                peak_tflops=self.peak.tflops,
            )
        self.look = None
        if self.looks and step % self.config.log.ranks_every == 0:
            self.look = self.meter.look(self.mesh.world)
            row |= self.look.metrics()
            self.slowest[self.look.slowest] += 1
        return row | self.meter.memory()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's line and row. metrics: the script's and what `measured` gave."""
        if not self.speaks:
            return
        now = time.perf_counter()
        self.token_seconds.append((now - self.ended) / span_at(self.spans, step).tokens_per_step)
        self.ended = now
        self.losses.append(metrics["train/loss"])
        self.recent.append(metrics)
        for sink in self.sinks:
            sink.write(step, metrics)
        fields = step_fields(step, metrics, steps=self.config.last_step, eta_seconds=self._seconds_left(step))
        skipped = fields[-1].startswith("skipped")
        validation = validation_line(step, metrics)
        due = step % self.config.log.every == 0 or step in (1, self.config.last_step) or skipped or bool(validation)
        self.display.step(step, fields, due=due)
        if validation:
            self.validation = {name: value for name, value in metrics.items() if name.startswith("val/")}
            self.display.line(validation)
        if self.look is not None:
            self.display.line(self.look.describe())

    def summary(self, *, skipped: int) -> None:
        """How it ended, against what it had to beat. skipped: steps whose gradient was not finite."""
        if not self.speaks:
            return
        self.display.close()
        parts = []
        if self.losses:
            mean = sum(self.losses) / len(self.losses)
            parts.append(f"train loss {mean:.4f} over the last {len(self.losses)} steps")
        if "val/loss" in self.validation:
            parts.append(f"validation loss {self.validation['val/loss']:.4f}")
        parts.append(describe_baselines(self.baselines))
        done = f"done in {duration(time.perf_counter() - self.began)}: "
        self.display.line(done + "; ".join(part for part in parts if part))
        if self.recent:
            self.display.line(self._speed())
        if skipped:
            self.display.line(f"{skipped} steps changed nothing, as their gradient was not finite")

    def _speed(self) -> str:
        middle = {
            name: statistics.median(row[name] for row in self.recent) for name in self.recent[-1] if name in MEDIANS
        }
        memory = max(value for name, value in self.recent[-1].items() if name.startswith("memory/"))
        parts = [
            f"median of the last {len(self.recent)} steps {middle['perf/step_seconds']:.3g} s: "
            f"{middle['perf/tokens_per_sec']:,.0f} tokens/s ({middle['perf/tokens_per_sec_per_rank']:,.0f} a rank)"
        ]
        if "perf/mfu" in middle:
            parts.append(f"mfu {middle['perf/mfu']:.1%}")
        parts.append(f"memory {memory:.2f} GiB at most")
        if self.slowest:
            rank, times = self.slowest.most_common(1)[0]
            parts.append(f"slowest in {times} of {self.slowest.total()} looks: rank {rank}")
        return "; ".join(parts)

    def _tokens(self, step: int) -> int:
        """All tokens of the steps up to this one; for a model without sequences, samples."""
        return sum(
            span.tokens_per_step * (min(step, span.last_step) - span.first_step + 1)
            for span in self.spans
            if span.first_step <= step
        )

    def _seconds_left(self, step: int) -> float:
        """By the median of recent steps' times, in proportion to tokens, of which a ramp changes the number."""
        left = self._tokens(self.config.last_step) - self._tokens(step)
        return left * statistics.median(self.token_seconds)


MEDIANS = ("perf/step_seconds", "perf/tokens_per_sec", "perf/tokens_per_sec_per_rank", "perf/mfu")
"""What the summary gives the median of."""
