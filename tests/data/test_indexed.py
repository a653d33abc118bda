"""Megatron's pair: the same bytes, any size, and nothing that does not fit together is read."""

from __future__ import annotations

import os
import struct
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from megalite.data.errors import DataError
from megalite.data.indexed import IndexedWriter, dtype_for, is_indexed, open_indexed, prefix_of
from megalite.data.opening import open_source
from megalite.data.samples import Samples, Stretch
from megalite.data.split import Part
from tests.data.refusals import refusal

DOCUMENTS = [[1, 2, 65535], [7], list(range(100))]


def index_by_hand(sizes, documents, *, code: int, itemsize: int, version: int = 1, magic: bytes = b"MMIDIDX\x00\x00"):
    """The bytes of an index, from the description of the format, not from the code. documents: ends, in sequences."""
    pointers = [itemsize * sum(sizes[:place]) for place in range(len(sizes))]
    entries = [0, *documents]
    head = magic + struct.pack("<Q", version) + struct.pack("<B", code) + struct.pack("<QQ", len(sizes), len(entries))
    body = struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(sizes)}q", *pointers)
    return head + body + struct.pack(f"<{len(entries)}q", *entries)


def write(prefix, documents=DOCUMENTS, dtype=np.uint16, **kind):
    with IndexedWriter(prefix, dtype, **kind) as out:
        for document in documents:
            out.add(document)
    return prefix


@pytest.mark.parametrize(("dtype", "code", "letter"), [(np.uint16, 8, "H"), (np.int32, 4, "i"), (np.uint8, 1, "B")])
def test_both_files_are_byte_for_byte_the_format(tmp_path, dtype, code, letter):
    documents = [[1, 2, 255], [7], list(range(100))]
    write(tmp_path / "a", documents, dtype)
    flat = [token for document in documents for token in document]
    assert (tmp_path / "a.bin").read_bytes() == struct.pack(f"<{len(flat)}{letter}", *flat)
    expected = index_by_hand([3, 1, 100], [1, 2, 3], code=code, itemsize=np.dtype(dtype).itemsize)
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_what_is_written_is_read(tmp_path):
    pair = open_indexed(write(tmp_path / "a"))
    assert pair.tokens.tolist() == [1, 2, 65535, 7, *range(100)] and pair.mask is None
    assert pair.documents.ends(np.arange(3)).tolist() == [3, 4, 104]
    with pytest.raises(ValueError, match="read-only"):
        pair.tokens[0] = 1


@pytest.mark.parametrize(("vocab_size", "last", "dtype"), [(65536, 65535, "uint16"), (70000, 69999, "int32")])
def test_the_largest_token_of_a_vocabulary_survives(tmp_path, vocab_size, last, dtype):
    write(tmp_path / "a", [[0, last]], dtype_for(vocab_size))
    assert open_indexed(tmp_path / "a").tokens.tolist() == [0, last]
    assert open_indexed(tmp_path / "a").tokens.dtype == dtype == dtype_for(vocab_size).name


@pytest.mark.parametrize("wrong", [[65536], [-1], [2**40]])
def test_a_token_that_the_type_does_not_hold_is_refused_and_leaves_nothing(tmp_path, wrong):
    assert str(wrong[0]) in refusal(lambda: write(tmp_path / "a", [[1], wrong]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [[], [[1, 2]], [0.5]])
def test_what_is_no_document_is_refused(tmp_path, wrong):
    assert "document 1" in refusal(lambda: write(tmp_path / "a", [[1], wrong]))


def test_documents_given_in_pieces_are_those_given_one_by_one(tmp_path):
    """Cut anywhere, also within a document, before the first end and just after one."""
    flat, ends = np.array([1, 2, 65535, 7, *range(100)]), np.array([3, 4, 104])
    write(tmp_path / "whole")
    for cuts in ([0, 104], [0, 1, 2, 3, 4, 50, 104], [0, 3, 4, 104]):
        with IndexedWriter(tmp_path / "a", np.uint16) as out:
            for begin, stop in pairwise(cuts):
                out.extend(flat[begin:stop], ends[(ends > begin) & (ends <= stop)] - begin)
        for end in (".bin", ".idx"):
            assert (tmp_path / f"a{end}").read_bytes() == (tmp_path / f"whole{end}").read_bytes()
    with pytest.raises(AssertionError, match="no end"), IndexedWriter(tmp_path / "b", np.uint16) as out:
        out.extend(flat, ends[:2])
    assert not (tmp_path / "b.bin").exists()


@pytest.mark.parametrize("dtype", [np.float32, np.uint32, np.uint64])
def test_a_type_that_the_format_does_not_have_is_refused(tmp_path, dtype):
    assert np.dtype(dtype).name in refusal(lambda: write(tmp_path / "a", dtype=dtype))


def test_an_interrupted_writer_leaves_what_was_there(tmp_path):
    write(tmp_path / "a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "a", np.uint16) as out:
        out.add([1, 2, 3])
        raise KeyboardInterrupt
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert "no document" in refusal(lambda: write(tmp_path / "b", []))


def test_parts_joined_are_the_documents_written_at_once(tmp_path, monkeypatch):
    """In blocks of eight bytes, so that borders between blocks are passed."""
    write(tmp_path / "whole", [*DOCUMENTS, *DOCUMENTS, [5]])
    write(tmp_path / "part")
    monkeypatch.setattr("megalite.data.indexed.COPIED_AT_ONCE", 8)
    with IndexedWriter(tmp_path / "joined", np.uint16) as out:
        out.append(tmp_path / "part")
        out.append(tmp_path / "part.bin")
        out.add([5])
    for end in (".bin", ".idx"):
        assert (tmp_path / f"joined{end}").read_bytes() == (tmp_path / f"whole{end}").read_bytes()


def test_masks_travel_with_their_tokens_and_parts_of_another_kind_are_refused(tmp_path):
    with IndexedWriter(tmp_path / "a", np.uint16, masked=True) as out:
        out.add([4, 5, 6], [0, 1, 1])
    with IndexedWriter(tmp_path / "b", np.uint16, masked=True) as out:
        out.append(tmp_path / "a")
        out.add([7], [0])
    assert open_indexed(tmp_path / "b").mask.tolist() == [0, 1, 1, 0]
    write(tmp_path / "c", dtype=np.int32, documents=[[1]])
    for other, word in [("a", "mask"), ("c", "int32")]:
        with pytest.raises(DataError, match=word), IndexedWriter(tmp_path / "d", np.uint16) as out:
            out.append(tmp_path / other)
    write(tmp_path / "b")  # the new set has no mask, so the old one's must go
    assert open_indexed(tmp_path / "b").mask is None


def test_documents_of_several_sequences_empty_ones_and_modes_are_read(tmp_path):
    """Sentences apart (as for BERT), an empty sequence, an empty document, and the modes of a multimodal set."""
    sizes, documents = [3, 2, 0, 4, 1], [2, 2, 4, 5]
    index = index_by_hand(sizes, documents, code=4, itemsize=4)
    (tmp_path / "a.bin").write_bytes(np.arange(10, dtype=np.int32).tobytes())
    for modes in (b"", bytes(len(sizes))):
        (tmp_path / "a.idx").write_bytes(index + modes)
        pair = open_indexed(tmp_path / "a")
        assert pair.documents.ends(np.arange(4)).tolist() == [5, 5, 9, 10]
        assert pair.documents.holding(np.arange(10)).tolist() == [0] * 5 + [2] * 4 + [3]


def damaged(tmp_path) -> dict[str, tuple[str, bytes, list[str]]]:
    """What is wrong -> which file, its content, words of the refusal."""
    index, content = (tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes()
    sizes = [3, 1, 100]

    def made(**changes):
        return index_by_hand(sizes, changes.pop("documents", [1, 2, 3]), **({"code": 8, "itemsize": 2} | changes))

    return {
        "magic": ("idx", b"PK" + index[2:], ["a.idx", "MMIDIDX", "PK"]),
        "version": ("idx", made(version=2), ["version 2", "1"]),
        "unknown type": ("idx", made(code=9), ["type 9", "1 to 8"]),
        "float": ("idx", made(code=7, itemsize=4), ["type 7", "float32"]),
        "another width": ("idx", made(code=4, itemsize=4), ["208", "416"]),
        "short head": ("idx", index[:20], ["20", "34"]),
        "short index": ("idx", index[:-1], [str(len(index)), str(len(index) - 1)]),
        "long index": ("idx", index + b"\0", [str(len(index)), str(len(index) + 1)]),
        "documents": ("idx", made(documents=[1, 2, 4]), ["0 to 4", "0 to 3"]),
        "nothing": ("idx", index[:18] + bytes(16), ["0 sequences", "0 ends"]),
        "a pointer": ("idx", index[:54] + b"\x08" + index[55:], ["sequence 0", "byte 6", "at 8"]),
        "empty index": ("idx", b"", ["a.idx holds 0 bytes"]),
        "empty tokens": ("bin", b"", ["a.bin holds 0 bytes"]),
        "short tokens": ("bin", content[:-2], ["206", "208"]),
        "long tokens": ("bin", content + b"\0\0", ["210", "208"]),
        "mask": ("mask", b"\1" * 103, ["103", "104"]),
    }


def test_whatever_does_not_fit_together_is_refused_with_both_numbers(tmp_path):
    write(tmp_path / "a")
    whole = {end: (tmp_path / f"a.{end}").read_bytes() for end in ("bin", "idx")}
    for wrong, (end, content, words) in damaged(tmp_path).items():
        (tmp_path / f"a.{end}").write_bytes(content)
        message = refusal(lambda: open_indexed(tmp_path / "a", key="data.paths[2]"))
        for word in ["data.paths[2]", *words]:
            assert word in message, (wrong, message)
        for name, before in whole.items():
            (tmp_path / f"a.{name}").write_bytes(before)
    os.remove(tmp_path / "a.mask")
    assert len(open_indexed(tmp_path / "a").tokens) == 104


@pytest.mark.parametrize(("missing", "there"), [("bin", "idx"), ("idx", "bin")])
def test_a_missing_partner_is_named(tmp_path, missing, there):
    os.remove(f"{write(tmp_path / 'a')}.{missing}")
    message = refusal(lambda: open_source(tmp_path / f"a.{there}", vocab_size=65536))
    assert f"a.{missing} does not exist" in message and f"a.{there} is there" in message


def test_names_of_a_pair(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "my.txt").touch()
    for name, yes in [("a", True), ("a.bin", True), ("a.idx", True), ("no.idx", True), ("my.txt", False), ("b", False)]:
        assert is_indexed(tmp_path / name) == yes
    assert [prefix_of(name) for name in ("x/a", "x/a.bin", "x/a.idx", "a.txt")] == ["x/a", "x/a", "x/a", "a.txt"]


TOKENS = (1 << 31) + 4096


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """2**31 + 4096 tokens of 16 bits in two documents: a hole, no disk, but for the last 2000, which count to 65535."""
    prefix = tmp_path_factory.mktemp("huge") / "set"
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * TOKENS)
        file.seek(2 * (TOKENS - 2000))
        file.write(np.arange(65536 - 2000, 65536, dtype=np.uint16).tobytes())
    with open(f"{prefix}.idx", "wb") as file:
        file.write(index_by_hand([1 << 30, TOKENS - (1 << 30)], [1, 2], code=8, itemsize=2))
    return prefix


def test_past_two_to_the_31_tokens_the_last_sample_and_its_document_read_right(huge):
    """A 32-bit offset, of tokens or of bytes, would wrap to a negative one."""
    source = open_source(huge, vocab_size=65536)
    windows = source.windows(128, Part.TRAIN, period=0)
    rows = windows.labelled(np.array([len(windows) - 1]), separate=True)
    start = (len(windows) - 1) * 128
    first = 65536 - (TOKENS - start)
    assert start > 1 << 31 and rows.tokens.tolist() == [list(range(first, first + 128))]
    assert rows.labels.tolist() == [list(range(first + 1, first + 129))]
    border = (1 << 30) // 128  # the second document begins with this window
    assert source.documents.holding(np.array([(1 << 30) - 1, 1 << 30, TOKENS - 1])).tolist() == [0, 1, 1]
    assert windows.labelled(np.array([border - 1]), separate=True).labels[0, -1] == -100


def test_past_two_to_the_31_samples_epochs_of_a_huge_set_are_right(huge):
    samples = Samples([open_source(huge, vocab_size=65536)], [Stretch(0, 128)], seed=0, validation_period=0)
    count = (TOKENS - 1) // 128
    for number in [(1 << 31) - 1, 1 << 31, (1 << 40) + 3]:
        place = samples.locate(np.array([number]))
        assert place.epoch.tolist() == [number // count] and 0 <= place.window[0] < count


def test_opening_and_a_shuffled_read_of_a_huge_set_hold_no_more_memory_than_of_a_small_one(huge, tmp_path):
    """Python's own allocations: pages of the map belong to the system, which takes them back as it likes."""
    with IndexedWriter(tmp_path / "small", np.uint16) as out:
        for _ in range(40):
            out.add(np.arange(4096))
    peaks = []
    for prefix in (tmp_path / "small", huge):
        tracemalloc.start()
        source = open_source(prefix, vocab_size=65536)
        Samples([source], [Stretch(0, 128)], seed=0, separate=True).read(np.arange(64))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= 1.5 * peaks[0]  # both a few hundred KB; one byte a window would be 16 MB


def test_opening_a_set_of_many_documents_reads_no_list_of_them(tmp_path):
    """A million documents: any array of them would be 4 MB at least."""
    count = 1 << 20
    with open(tmp_path / "many.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        np.full(count, 4, dtype=np.int32).tofile(file)
        (np.arange(count, dtype=np.int64) * 8).tofile(file)
        np.arange(count + 1, dtype=np.int64).tofile(file)
    np.arange(4 * count, dtype=np.uint64).astype(np.uint16).tofile(tmp_path / "many.bin")
    tracemalloc.start()
    source = open_source(tmp_path / "many", vocab_size=65536)
    rows = source.windows(128, Part.TRAIN).labelled(np.array([0, 12345]), separate=True)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert rows.documents.tolist() == [[place // 4 for place in range(128)]] * 2
