"""What the README says is so: its model of one's own trains, its overrides are legal, the files it names are there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from megalite.train.check import check
from megalite.train.config import load
from tests.ranks import run
from tests.train.composing import changed, choosing

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROGRAM, PLAIN, STAGES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
TABLE = README.partition("| override | means |")[2].partition("\n\n")[0]
ROWS = re.findall(r"^\| `.*=.*", TABLE, flags=re.MULTILINE)
OVERRIDES = [quoted for row in ROWS for quoted in re.findall("`(.*?)`", row) if "=" in quoted]


def norms(program: str) -> list[float]:
    """The gradient norms that the README's program prints, on ranks that are started already or on one."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(dist, "init_process_group", lambda backend: None)
        exec(program, {})
    steps, values = zip(*(line.split() for line in out.getvalue().splitlines()), strict=True)
    assert list(map(int, steps)) == list(range(10))
    return list(map(float, values))


def test_the_model_of_ones_own_trains_on_four_ranks_and_with_the_change_it_names_on_one():
    first, *others = run(norms, 4, PROGRAM)
    assert all(other == first for other in others)
    assert "`mesh = Mesh.build()`" in README
    alone = norms(re.sub(r"(?m)^mesh = .*$", "mesh = Mesh.build()", PROGRAM))
    for values in (first, alone):
        assert values[-1] < values[0]


def test_the_plain_model_trains_at_stage_3_as_it_does_alone_on_the_same_batch():
    """On four ranks with one and the same batch each, the loss is one rank's."""
    same = PLAIN.replace("manual_seed(mesh.dp.rank)", "manual_seed(0)")
    first, *others = run(norms, 4, same)
    assert all(other == first for other in others)
    alone = norms(same.replace("Layout.fit(dist.get_world_size())", "Layout()"))
    assert first == pytest.approx(alone, rel=1e-3)  # float32, over ten steps of AdamW


def test_the_stages_of_ones_own_train_on_two_data_ranks_and_on_one_alike():
    """With one and the same batch on both; the denominator counts it twice, and AdamW does not see a constant."""
    same = STAGES.replace("manual_seed(mesh.dp.rank)", "manual_seed(0)")
    first, *others = run(norms, 4, same)
    assert all(other == first for other in others) and first[-1] < first[0]
    assert run(norms, 2, same)[0] == pytest.approx(first, rel=1e-3)  # float32, over ten steps of AdamW


@pytest.mark.parametrize("overrides", OVERRIDES)
def test_every_override_of_the_table_is_legal(overrides):
    words = re.split(r" (?=[a-z_.]+=)", overrides)  # not at a blank within a value
    choices = [word for word in words if (ROOT / "configs" / word.partition("=")[0]).is_dir()]
    others = [word for word in words if word not in choices]
    check(load(changed(choosing(*choices), *others)), 4)


def test_the_table_has_overrides_and_every_file_that_is_named_is_there():
    assert len(OVERRIDES) > 10
    named = {*re.findall(r"\]\(([\w./]+)\)", README), *re.findall(r"(?:docs|benchmarks|configs)/[\w/]+\.\w+", README)}
    assert len(named) > 5
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
