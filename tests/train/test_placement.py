"""A configuration's stages: every layer once, the schedules by name or from a file, refusals by the key."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megalite.models.config import GPTConfig, MLPConfig
from megalite.pipeline.catalogue import SCHEDULES
from megalite.train.check import check
from megalite.train.config import Config, LayoutConfig, PipelineConfig
from megalite.train.placement import placement
from megalite.train.spans import micro_batch, microbatches, spans_of

GPT = GPTConfig(num_hidden_layers=7)


def config_of(pp: int, *, layers: int = 7, dp: int = 1, **changes) -> Config:
    pipeline = PipelineConfig(**{key: changes.pop(key) for key in list(changes) if hasattr(PipelineConfig, key)})
    pipeline = replace(pipeline, split=changes.pop("split", None))
    base = Config(model=replace(GPT, num_hidden_layers=layers), layout=LayoutConfig(pp=pp), pipeline=pipeline)
    return replace(base, **changes)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_every_schedule_has_each_layer_once_in_stages_whose_sizes_differ_by_one(name, pp):
    found = placement(check(config_of(pp, schedule=name), pp))
    layers = [layer for part in found.parts for layer in part.layers]
    assert layers == list(range(7))
    sizes = [len(part.layers) for part in found.parts]
    assert max(sizes) - min(sizes) <= 1
    assert [part.is_first for part in found.parts] == [True, *[False] * (len(sizes) - 1)]
    assert [part.is_last for part in found.parts] == [*[False] * (len(sizes) - 1), True]
    mine = [found.parts_of(rank) for rank in range(pp)]
    assert sorted(stage for parts in mine for stage in parts) == list(range(len(sizes)))
    assert found.schedule(5).rank_of == found.rank_of


def test_a_file_is_a_schedule_whose_ranks_and_micro_batches_must_be_the_runs(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("F0@0 F1@0 BW0@0 BW1@0\nF0@1 BW0@1 F1@1 BW1@1\n")
    fits = config_of(2, schedule=str(file), global_batch_size=4, micro_batch_size=2)
    assert placement(check(fits, 2)).schedule(2).microbatches == 2
    refusals = [
        (replace(fits, micro_batch_size=1), 2, "is for 2 micro-batches a step, and global_batch_size / (layout.dp x "),
        (replace(fits, layout=LayoutConfig(pp=3)), 3, "has lines for 2 ranks, and layout.pp=3; take layout.pp=2"),
        (
            replace(fits, pipeline=replace(fits.pipeline, virtual_stages=2)),
            2,
            "pipeline.virtual_stages=2 does nothing ",
        ),
    ]
    for config, ranks, says in refusals:
        with pytest.raises(ValueError, match=re.escape(says)):
            check(config, ranks)
    file.write_text("F0@0 F1@0 BW0@0\nF0@1 BW0@1 F1@1 BW1@1\n")
    with pytest.raises(ValueError, match="rank 0 lacks BW1@0"):
        check(fits, 2)


def test_without_a_micro_batch_size_a_pipeline_has_four_micro_batches_a_rank_where_the_batch_allows():
    def split(pp: int, batch: int, dp: int = 1, micro: int | None = None) -> tuple[int, int]:
        config = check(config_of(pp, global_batch_size=batch, micro_batch_size=micro), pp * dp)
        return micro_batch(config, batch), microbatches(config, spans_of(config)[0])

    assert split(1, 32) == (32, 1)
    assert split(2, 32) == (4, 8)
    assert split(2, 32, dp=2) == (2, 8)
    assert split(4, 8) == (1, 8)
    assert split(2, 36) == (4, 9)
    assert split(2, 7) == (1, 7)
    assert split(2, 32, micro=16) == (16, 2)


def test_a_ramp_of_the_batch_is_checked_for_each_number_of_micro_batches(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("F0@0 BW0@0 F1@0 BW1@0\n")
    base = config_of(1, schedule=str(file), global_batch_size=2, micro_batch_size=1)
    check(base, 1)
    with pytest.raises(ValueError, match=r"from step 5 on pipeline\.schedule=.* is for 2 micro-batches a step"):
        check(replace(base, global_batch_size_ramp=[[5, 4]]), 1)


def test_the_deep_mlp_is_cut_into_stages_too():
    config = config_of(2)
    config = check(replace(config, model=MLPConfig(num_hidden_layers=3)), 2)
    assert [len(part.layers) for part in placement(config).parts] == [2, 1]
