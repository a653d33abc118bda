"""What a person sees of a run, and what it leaves behind: lines on standard output, config.yaml, metrics.jsonl.

Only rank 0 speaks and writes. A row of metrics.jsonl is one step, in full precision: `step` from 1, then names in slash
groups (train/loss, train/grad_norm, train/lr, perf/tokens_per_sec; val/loss in the steps that evaluate). What is not
finite is null there, since JSON has no word for it, and nan or inf in the line that a person sees.

A run never mixes its rows with another's: files that are already there are renamed, metrics.jsonl to metrics.1.jsonl
and config.yaml to config.1.yaml (the next free number); a run that still writes to one goes on writing there.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from omegaconf import OmegaConf

from megalite.data import Baselines
from megalite.mesh import Layout
from megalite.models.config import GPTConfig
from megalite.train.config import Config
from megalite.train.spans import spans_of

SHOWN_GROUPS = 4  # of ranks along an axis, in the header
SUMMARY_STEPS = 20


class Log:
    """The log of one run on one rank; on ranks other than 0 it does nothing.

    Use it as a context manager: it closes its file on every way out.
    """

    def __init__(self, config: Config, *, rank: int, layout: Layout, where: str) -> None:
        self.config, self.layout, self.where = config, layout, where
        self.spans = spans_of(config)
        self.speaks = rank == 0
        self.file: TextIO | None = None
        self.losses: list[float] = []
        self.validation_loss: float | None = None
        self.baselines: Baselines | None = None
        self.since = self.began = time.perf_counter()

    def __enter__(self) -> Log:
        if self.speaks:
            folder = Path(self.config.out_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open_fresh(folder / "metrics.jsonl")
            with open_fresh(folder / "config.yaml") as file:
                file.write(OmegaConf.to_yaml(OmegaConf.create(asdict(self.config))))
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def header(self, *, data: str, baselines: Callable[[], Baselines | None]) -> None:
        """What is about to run. baselines: computed by the rank that shows them."""
        if not self.speaks:
            return
        self.baselines = baselines()
        lines = {
            "model": describe_model(self.config),
            "layout": "\n".join(describe_layout(self.config, self.layout)),
            "where": self.where,
            "batch": describe_batch(self.config),
            "data": data,
            "to beat": describe_baselines(self.baselines),
            "output": self.config.out_dir,
        }
        for name, text in lines.items():
            for place, line in enumerate(text.splitlines()):
                self._say(f"{name if place == 0 else '':<8} {line}")
        self.since = time.perf_counter()

    def tokens_per_second(self) -> float:
        """Over all ranks, since the last `step` (or the header) ended: to be asked when the step's work is done."""
        return self.spans[0].tokens_per_step / max(time.perf_counter() - self.since, 1e-9)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's line and row."""
        if self.speaks and self.file is not None:
            row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            self.file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
            self.file.flush()
            self.losses.append(metrics["train/loss"])
            self.validation_loss = metrics.get("val/loss", self.validation_loss)
            self._say(describe_step(step, self.config.steps, metrics))
        self.since = time.perf_counter()

    def summary(self, *, skipped: int) -> None:
        """How it ended, against what it had to beat. skipped: steps whose gradient was not finite."""
        if not self.speaks:
            return
        last = self.losses[-SUMMARY_STEPS:]
        parts = [f"train loss {sum(last) / len(last):.4f} over the last {len(last)} steps"]
        if self.validation_loss is not None:
            parts.append(f"validation loss {self.validation_loss:.4f}")
        parts.append(describe_baselines(self.baselines))
        self._say(f"done in {time.perf_counter() - self.began:.1f} s: " + "; ".join(part for part in parts if part))
        if skipped:
            self._say(f"{skipped} steps changed nothing, as their gradient was not finite")

    def _say(self, line: str) -> None:
        print(line, flush=True)


def open_fresh(path: Path) -> TextIO:
    """`path` as a new file. One that is there gets the next free number before its suffix; nothing is overwritten."""
    number = 1
    while True:
        try:
            return open(path, "x", encoding="utf-8")
        except FileExistsError:
            old = path.with_name(f"{path.stem}.{number}{path.suffix}")
            number += 1
        try:
            open(
                old, "x"
            ).close()  # the number is ours now: another run that starts here at the same time takes the next
            os.replace(path, old)
        except FileExistsError:
            continue
        except FileNotFoundError:  # another run has just moved it
            old.unlink()


def describe_model(config: Config) -> str:
    model = config.model
    shape = f"{model.num_hidden_layers} layers, hidden {model.hidden_size}"
    if isinstance(model, GPTConfig):
        shape += f", {model.num_attention_heads} heads, vocabulary {model.vocab_size}"
    return f"{model.model_type}: {shape}; {model.parameter_count():,} parameters in {config.precision.compute}"


def describe_layout(config: Config, layout: Layout) -> list[str]:
    """The sizes, then a line for each axis of several ranks: which ranks sit together on it."""
    sizes = " x ".join(f"{name}={layout.sizes[name]}" for name in ("dp", "cp", "tp", "pp"))
    sequence = ", sequence parallel" if config.layout.sequence_parallel else ""
    lines = [f"{sizes} = {layout.world_size} ranks{sequence}; ZeRO stage {config.zero.stage}"]
    for name in ("tp", "cp", "dp", "pp"):
        if layout.sizes[name] == 1:
            continue
        groups = list(dict.fromkeys(layout.ranks((name,), rank) for rank in range(layout.world_size)))
        shown = " ".join(str(list(group)) for group in groups[:SHOWN_GROUPS])
        more = f" and {len(groups) - SHOWN_GROUPS} more" if len(groups) > SHOWN_GROUPS else ""
        lines.append(f"{name}: ranks {shown}{more}")
    return lines


def describe_batch(config: Config) -> str:
    assert config.layout.dp is not None, "check() fills it in"
    span = spans_of(config)[0]
    micro = config.micro_batch_size or span.global_batch_size // config.layout.dp
    microbatches = span.global_batch_size // (config.layout.dp * micro)
    each = f"{config.layout.dp} data ranks x {microbatches} micro-batches x {micro}"
    if not span.has_sequences:
        return f"{span.global_batch_size} vectors a step: {each}"
    of = f"{span.global_batch_size} sequences x {span.seq_len} = {span.tokens_per_step:,} tokens a step"
    return f"{of}: {each} sequences"


def describe_baselines(baselines: Baselines | None) -> str:
    if baselines is None:
        return ""
    text = f"guessing by the frequencies of tokens: {baselines.unigram_nats:.4f} nats"
    if baselines.bigram_nats is None:
        return text
    return f"{text}, by the token before: {baselines.bigram_nats:.4f}"


def describe_step(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    line = (
        f"step {step:>{len(str(steps))}}/{steps}  loss {metrics['train/loss']:.4f}  "
        f"grad_norm {metrics['train/grad_norm']:.3f}  lr {metrics['train/lr']:.2e}  "
        f"{metrics['perf/tokens_per_sec']:,.0f} tokens/s"
    )
    line += f"  val_loss {metrics['val/loss']:.4f}" if "val/loss" in metrics else ""
    return line + ("" if math.isfinite(metrics["train/grad_norm"]) else "  skipped: its gradient is not finite")
