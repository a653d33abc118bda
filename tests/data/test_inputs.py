"""Which files are meant, and how they are cut: from the files alone, nothing lost, nothing twice."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megalite.data.errors import DataError
from megalite.data.inputs import Piece, cut, find_inputs, unchanged


def test_a_folder_gives_what_is_text_in_it_sorted_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.jsonl", "deep/c.md.gz", "d.py", "e.bin", "f.TXT"):
        (tmp_path / name).write_text("x")
    names = [os.path.relpath(one.path, tmp_path) for one in find_inputs([str(tmp_path)])]
    assert names == ["a.jsonl", "b.txt", "deep/c.md.gz", "f.TXT"]
    assert [os.path.basename(one.path) for one in find_inputs([str(tmp_path / "**/*.py")])] == ["d.py"]


def test_files_keep_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("z.txt", "a.txt")]
    for name in names:
        Path(name).write_text("x")
    assert [one.path for one in find_inputs(names)] == names


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("none.txt", "does not exist"),
        ("*.none", "does not exist, nor any file that fits it"),
        ("empty", "holds no file that ends in"),
        ("x.zst", "packed in a way that is not read here"),
        ("x.parquet.gz", "packed in a way"),
        ("pipe", "is not a regular file"),
        ("dangling.txt", "cannot be read"),
    ],
)
def test_what_cannot_be_an_input_is_refused_in_one_line(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    for file in ("x.zst", "x.parquet.gz"):
        (tmp_path / file).write_text("x")
    with pytest.raises(DataError, match=complaint) as refusal:
        find_inputs([str(tmp_path / name)])
    assert name in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"a\.txt is named twice"):
        find_inputs([str(tmp_path), str(tmp_path / "a.txt")])


def test_parts_cover_every_file_once_in_order_and_none_is_much_larger_than_asked(tmp_path: Path) -> None:
    for number, size in enumerate([10, 0, 250, 99, 1, 100]):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
    inputs = find_inputs([str(tmp_path)])
    parts = cut(inputs, part_bytes=100, split_text=True)
    pieces: list[Piece] = [piece for part in parts for piece in part]
    for source in inputs:
        mine = [piece for piece in pieces if piece.source == source]
        assert [piece.start for piece in mine] == list(range(0, source.size_bytes, 100))
        assert [piece.stop for piece in mine[:-1]] == [piece.start for piece in mine[1:]]
        assert not mine or mine[-1].stop == source.size_bytes
    assert [piece.source.path for piece in pieces] == sorted(piece.source.path for piece in pieces)
    assert all(sum(piece.size_bytes for piece in part) <= 100 for part in parts)
    assert len(parts) == 6  # 10, 100, 100, 50, 99 + 1, 100


def test_what_has_no_ends_to_cut_at_stays_whole(tmp_path: Path) -> None:
    for name in ("one.txt", "packed.jsonl.gz"):
        (tmp_path / name).write_bytes(b"x" * 250)
    parts = cut(find_inputs([str(tmp_path)]), part_bytes=100, split_text=False)
    assert [[(piece.start, piece.stop) for piece in part] for part in parts] == [[(0, 250)], [(0, 250)]]


def test_parquet_is_cut_into_its_row_groups(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["x" * 10] * 10})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    inputs = find_inputs([str(tmp_path / "a.parquet")])
    pieces = [piece for part in cut(inputs, part_bytes=1, split_text=False) for piece in part]
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 1), (1, 2), (2, 3)]
    assert sum(piece.size_bytes for piece in pieces) == inputs[0].size_bytes


def test_parquet_without_pyarrow_is_one_line_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"b\.parquet is no parquet file"):
        cut(find_inputs([str(tmp_path / "b.parquet")]), part_bytes=1, split_text=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'megalite\[parquet\]'"):
        cut(find_inputs([str(tmp_path / "a.parquet")]), part_bytes=1, split_text=False)


def test_many_parts_are_made_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.inputs.MOST_PARTS", 10)
    (tmp_path / "a.jsonl").write_bytes(b"x" * 1000)
    assert len(cut(find_inputs([str(tmp_path)]), part_bytes=1, split_text=False)) == 10


def test_a_change_of_a_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    found = find_inputs([str(path)])[0]
    assert unchanged(found)
    path.write_text("xy")
    assert not unchanged(found)
    path.unlink()
    assert not unchanged(found)
