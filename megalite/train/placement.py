"""How a configuration cuts its model into pipeline stages: which layers each has, where it lies, who works when.

Plain arithmetic and no torch: what is refused here is refused before any rank has begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megalite.models.part import Part
from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.lower import check
from megalite.pipeline.schedule import Schedule, parse
from megalite.pipeline.split import split_layers
from megalite.train.config import Config


@dataclass(frozen=True)
class Placement:
    """The stages of a run. parts: what each has, in forward order; rank_of: stage -> rank of pp."""

    config: Config
    parts: tuple[Part, ...]
    rank_of: tuple[int, ...]

    def schedule(self, microbatches: int) -> Schedule:
        """The schedule of a step of so many micro-batches. Raises ValueError, by the config key, if there is none."""
        return _schedule(self.config, microbatches)

    def parts_of(self, rank: int) -> dict[int, Part]:
        """Stage -> what it has, of those of one rank of pp."""
        return {stage: part for stage, part in enumerate(self.parts) if self.rank_of[stage] == rank}


def placement(config: Config) -> Placement:
    """Raises ValueError for stages that cannot be, with the config keys and the legal values."""
    pipeline, layout = config.pipeline, config.layout
    if pipeline.schedule in SCHEDULES:
        make(pipeline.schedule, ranks=layout.pp, microbatches=1, **_asked(config))  # whether its keys go together
        rank_of = SCHEDULES[pipeline.schedule].placement(layout.pp, pipeline.virtual_stages)
    else:
        rank_of = _read(config).rank_of
    split = split_layers(
        config.model.num_hidden_layers,
        len(rank_of),
        sizes=pipeline.split,
        embedding_layers=pipeline.embedding_layers,
        head_layers=pipeline.head_layers,
    )
    return Placement(config, tuple(Part.each(split)), rank_of)


def _schedule(config: Config, microbatches: int) -> Schedule:
    if config.pipeline.schedule in SCHEDULES:
        return make(config.pipeline.schedule, ranks=config.layout.pp, microbatches=microbatches, **_asked(config))
    schedule = _read(config)
    if schedule.microbatches != microbatches:
        raise ValueError(
            f"pipeline.schedule={config.pipeline.schedule} is for {schedule.microbatches} micro-batches a step, and "
            f"global_batch_size / (layout.dp x micro_batch_size) = {microbatches}; take sizes that give "
            f"{schedule.microbatches}"
        )
    return schedule


def _asked(config: Config) -> dict[str, int | None]:
    return {"virtual_stages": config.pipeline.virtual_stages, "group": config.pipeline.group}


def _read(config: Config) -> Schedule:
    """The schedule in a file. Raises ValueError where there is none, or where keys contradict it."""
    pipeline = config.pipeline
    path = Path(pipeline.schedule)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"pipeline.schedule={pipeline.schedule} is neither a schedule nor a file that can be read "
            f"({error}); take one of {', '.join(SCHEDULES)}, or a path"
        ) from error
    try:
        schedule = _parsed(text, path.stem)
    except ValueError as error:
        raise ValueError(f"pipeline.schedule={pipeline.schedule}: {error}") from error
    if schedule.ranks != config.layout.pp:
        raise ValueError(
            f"pipeline.schedule={pipeline.schedule} has lines for {schedule.ranks} ranks, and layout.pp="
            f"{config.layout.pp}; take layout.pp={schedule.ranks}"
        )
    for key in ("virtual_stages", "group"):
        if getattr(pipeline, key) is not None:
            raise ValueError(f"pipeline.{key}={getattr(pipeline, key)} does nothing with a schedule file; leave it out")
    return schedule


@lru_cache(maxsize=8)
def _parsed(text: str, name: str) -> Schedule:
    schedule = parse(text, name=name)
    check(schedule)
    return schedule
