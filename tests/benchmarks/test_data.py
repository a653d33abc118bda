"""The loader's benchmark measures what it says: sets as large as they claim, and every rank's share."""

from __future__ import annotations

from benchmarks.data import RANKS, TARGET, loader_rows, write_hole, write_set
from megalite.data import open_source


def test_a_hole_is_a_set_of_its_size_that_takes_no_room(tmp_path):
    write_hole(tmp_path / "hole", 1 << 24)
    source = open_source(tmp_path / "hole", vocab_size=10)
    assert len(source) == 1 << 24 and len(source.documents) == 16
    assert (tmp_path / "hole.bin").stat().st_blocks * 512 < 1 << 20


def test_the_loader_is_timed_for_each_length_and_kind_of_reading(tmp_path):
    for name in ("set", "other"):
        write_set(tmp_path / name, 1 << 17)
    rows = loader_rows(tmp_path, steps=2, tokens_per_rank=1 << 13)
    assert [row[0].split(", ")[0] for row in rows] == ["128"] * 3 + ["1024"] * 3 + ["4096"] * 3
    assert all(float(row[1]) * 1e6 > RANKS * TARGET / 8 for row in rows)  # far below what an idle core reads
