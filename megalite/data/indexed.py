"""Token files: Megatron-LM's pair PREFIX.bin and PREFIX.idx, and what may lie beside it.

    PREFIX.bin    the tokens of all documents, one after another, in the type that the index names
    PREFIX.idx    b"MMIDIDX" and two zero bytes; uint64 version 1; uint8 code of the type (`DTYPES`); uint64 sequences;
                  uint64 entries of the document index; then, little-endian and unaligned, the arrays
                  int32 tokens of each sequence; int64 byte at which each begins in .bin;
                  int64 the document index: how many sequences come before each document, and their number at the end;
                  for Megatron's multimodal sets also int8 the mode of each sequence, which nothing here reads
    PREFIX.mask   optional: uint8, one a token, 1 where it counts in the loss

`megalite.data.meta` adds what else is known. The two files are byte for byte what Megatron-LM writes
(megatron/core/datasets/indexed_dataset.py), so either program reads the other's. A document is one sequence here;
documents of several, and empty ones, are read as well.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megalite.data.documents import Documents, Packed
from megalite.data.errors import DataError
from megalite.data.meta import Meta, fingerprint, is_indexed, prefix_of, read_meta, write_meta

__all__ = [
    "Indexed",
    "IndexedWriter",
    "Meta",
    "dtype_for",
    "fingerprint",
    "is_indexed",
    "open_indexed",
    "prefix_of",
    "read_meta",
    "write_meta",
]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Megatron-LM's code of each type of tokens; the floats are none of tokens."""
LONGEST_SEQUENCE = (1 << 31) - 1
COPIED_AT_ONCE = 1 << 22  # bytes
SPOTS = 64
"""Places, evenly spread, at which opening compares an index with itself."""


def dtype_for(vocab_size: int) -> np.dtype[np.integer]:
    """The type that Megatron-LM gives tokens below vocab_size: 16 bits unsigned as long as they fit, else 32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


@dataclass(frozen=True)
class Indexed:
    """An open pair: tokens, a read-only memory map; where documents end, in tokens; the mask, if there is one."""

    prefix: str
    tokens: npt.NDArray[np.integer]
    documents: Documents
    mask: npt.NDArray[np.uint8] | None


def open_indexed(path: str | os.PathLike[str], *, key: str = "data.paths") -> Indexed:
    """PREFIX, PREFIX.bin or PREFIX.idx, memory-mapped: opening takes the same time and memory for any corpus.

    Raises DataError, in one line with `key`, the file and both numbers, where a file is missing, is not what it says,
    or does not go with its partner. Sizes are compared whole, the index with itself in a few places.
    """
    prefix = prefix_of(path)
    index = _map(f"{prefix}.idx", key=key, partner=f"{prefix}.bin")
    content = _map(f"{prefix}.bin", key=key, partner=f"{prefix}.idx")
    dtype, sequences, entries = _header(index, name=f"{key}: {prefix}.idx")
    sizes, starts, first_sequences = _arrays(index, sequences, entries, name=f"{key}: {prefix}.idx")
    spots = np.unique(np.linspace(0, sequences - 1, SPOTS).astype(np.int64))
    ends = starts.at(spots) + sizes.at(spots) * dtype.itemsize
    if ends[-1] != len(content):
        raise DataError(
            f"{key}: {prefix}.bin holds {len(content)} bytes, but {prefix}.idx tells of {ends[-1]}; "
            "they are not of one set, or one was cut short: write both anew"
        )
    begins = np.append(starts.at(spots[:-1] + 1), len(content))
    for spot, expected, found in zip(spots, ends, begins, strict=True):
        if expected != found:
            raise DataError(
                f"{key}: {prefix}.idx: sequence {spot} ends at byte {expected} but the next begins at {found}; "
                "the file is damaged: write both anew"
            )
    tokens = content.view(dtype)
    return Indexed(
        prefix,
        tokens,
        SequencesOfDocuments(starts, first_sequences, tokens=len(tokens), itemsize=dtype.itemsize),
        _open_mask(prefix, len(tokens), key=key),
    )


@dataclass(frozen=True)
class SequencesOfDocuments(Documents):
    """The document ends of an index, read where they are asked for.

    starts: the byte at which each sequence begins; first_sequences: the document index.
    """

    starts: Packed
    first_sequences: Packed
    tokens: int
    itemsize: int

    def __len__(self) -> int:
        return len(self.first_sequences) - 1

    def ends(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        after = self.first_sequences.at(documents + 1)
        last = after == len(self.starts)  # the last one ends where the tokens do; no sequence begins there
        return np.where(last, self.tokens, self.starts.at(np.where(last, 0, after)) // self.itemsize)


def _map(path: str, *, key: str, partner: str) -> npt.NDArray[np.uint8]:
    try:
        if not os.path.isfile(path):
            there = f", though {partner} is there" if os.path.isfile(partner) else ""
            raise DataError(
                f"{key}: {path} does not exist{there} (looked in {Path.cwd()}); a token file is a pair, .bin and .idx"
            )
        if not os.path.getsize(path):
            raise DataError(f"{key}: {path} holds 0 bytes; write both files of the pair anew")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise DataError(f"{key}: {path} cannot be read ({error.strerror}); give files that you may read") from None


def _header(index: npt.NDArray[np.uint8], *, name: str) -> tuple[np.dtype[np.integer], int, int]:
    """The type of the tokens, how many sequences and how many entries of the document index."""
    head = index[: HEADER.size].tobytes()
    if not head.startswith(MAGIC):
        raise DataError(f"{name} begins with {head[: len(MAGIC)]!r} and not with {MAGIC!r}: it is no Megatron index")
    if len(head) < HEADER.size:
        raise DataError(f"{name} holds {len(head)} bytes and its head alone is {HEADER.size}; write both files anew")
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != 1:
        raise DataError(f"{name} is of version {version}, and 1 is the only one that is known; write it anew")
    if code not in DTYPES:
        raise DataError(f"{name} has tokens of type {code}, and known are {min(DTYPES)} to {max(DTYPES)}")
    dtype = np.dtype(DTYPES[code])
    if dtype.kind == "f":
        raise DataError(f"{name} has values of type {code} ({dtype}), and tokens are whole numbers; write it anew")
    if not sequences or entries < 2:
        raise DataError(
            f"{name} tells of {sequences} sequences and {entries} ends of documents; there is nothing in it"
        )
    return dtype, sequences, entries


def _arrays(index: npt.NDArray[np.uint8], sequences: int, entries: int, *, name: str) -> tuple[Packed, Packed, Packed]:
    """Tokens of each sequence, the byte at which each begins, the document index."""
    after = HEADER.size + 12 * sequences
    expected = after + 8 * entries
    if len(index) not in (expected, expected + sequences):
        raise DataError(
            f"{name} holds {len(index)} bytes, but its head tells of {expected} "
            f"({sequences} sequences, {entries} entries); it was cut short: write both files anew"
        )
    pieces = (HEADER.size, "<i4", sequences), (HEADER.size + 4 * sequences, "<i8", sequences), (after, "<i8", entries)
    sizes, starts, first_sequences = (Packed.within(index, *piece) for piece in pieces)
    ends = first_sequences.at(np.array([0, entries - 1]))
    if ends.tolist() != [0, sequences]:
        raise DataError(
            f"{name}: its document index goes from {ends[0]} to {ends[1]}, not from 0 to {sequences}, "
            "the number of its sequences; the file is damaged: write both anew"
        )
    return sizes, starts, first_sequences


def _open_mask(prefix: str, tokens: int, *, key: str) -> npt.NDArray[np.uint8] | None:
    path = f"{prefix}.mask"
    if not os.path.exists(path):
        return None
    mask = _map(path, key=key, partner=f"{prefix}.bin")
    if len(mask) != tokens:
        raise DataError(
            f"{key}: {path} holds {len(mask)} bytes for {tokens} tokens; it needs one each: write it anew or remove it"
        )
    return mask


class IndexedWriter:
    """Writes a pair, document by document, in constant memory; nothing has its name before all of it is there.

        with IndexedWriter("corpus", dtype_for(tokenizer.vocab_size)) as out:
            for document in documents:
                out.add(document)

    Leaving by an exception removes what was written. `masked`: PREFIX.mask is written too. The folder must exist.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike, *, masked: bool = False) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        self._code = next((code for code, name in DTYPES.items() if np.dtype(name) == self.dtype), 0)
        if self.dtype.kind not in "iu" or not self._code:
            raise DataError(f"tokens cannot be written as {np.dtype(dtype)}; take uint16, or int32 past 65536 of them")
        self.masked = masked
        self.tokens = self.sequences = self.documents = 0
        self._unfinished = 0  # tokens past the end of the last document

    def __enter__(self) -> IndexedWriter:
        self._files, self._out = ExitStack(), dict[str, IO[bytes]]()
        unique = f"{os.getpid()}.{secrets.token_hex(4)}"
        kinds = ["bin", "idx", "sizes", "documents"] + ["mask"] * self.masked
        self._names = {kind: f"{self.prefix}.{kind}.{unique}" for kind in kinds}
        try:
            for kind, name in self._names.items():
                self._out[kind] = self._files.enter_context(open(name, "w+b"))
        except OSError:
            self._discard()
            raise
        self._put("documents", np.zeros(1, dtype="<i8"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._discard()

    def add(
        self, tokens: npt.NDArray[np.integer] | list[int], mask: npt.NDArray[np.integer] | list[int] | None = None
    ) -> None:
        """One document, (length,) whole numbers; with `masked` also (length,), 1 for what counts in the loss.

        Raises DataError for an empty document and for a token that the type does not hold.
        """
        row = np.asarray(tokens)
        self.extend(row, np.array([len(row)]), None if mask is None else np.asarray(mask))

    def extend(
        self,
        tokens: npt.NDArray[np.integer],
        ends: npt.NDArray[np.int64],
        mask: npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Documents one after another: (length,) tokens, (documents,) where in them each ends, the mask as `add`.

        Tokens past the last end begin a document that the next call goes on with. Raises DataError as `add`.
        """
        limits = np.iinfo(self.dtype)
        sizes = np.diff(ends, prepend=-self._unfinished)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not ((sizes > 0) & (sizes <= LONGEST_SEQUENCE)).all():
            raise DataError(
                f"document {self.documents} or one of {len(ends)} after it: {tokens.dtype} of shape {tokens.shape}, "
                f"ends {ends[:9].tolist()}; give 1 to {LONGEST_SEQUENCE} whole numbers for each"
            )
        if tokens.size and (tokens.min() < 0 or tokens.max() > limits.max):
            raise DataError(
                f"document {self.documents} or one of {len(ends)} after it: tokens {tokens.min()} to {tokens.max()} "
                f"do not fit into {self.dtype}, 0 to {limits.max}; take the type of the vocabulary's size"
            )
        assert (mask is not None) == self.masked and (mask is None or len(mask) == len(tokens)), "one mask a token"
        if mask is not None:
            self._put("mask", mask.astype(np.uint8))
        self._put("bin", tokens.astype(self.dtype))
        self._put("sizes", sizes.astype("<i4"))
        self._put("documents", np.arange(1, len(ends) + 1, dtype="<i8") + self.sequences)
        self.tokens += len(tokens)
        self.sequences += len(ends)
        self.documents += len(ends)
        self._unfinished = len(tokens) - int(ends[-1]) if len(ends) else self._unfinished + len(tokens)

    def append(self, prefix: str | os.PathLike[str]) -> None:
        """All documents of another pair, copied in blocks. Raises DataError as `open_indexed`, and for another type."""
        assert not self._unfinished, "a document has begun"
        other = open_indexed(prefix, key="append")
        if other.tokens.dtype != self.dtype or (other.mask is not None) != self.masked:
            raise DataError(
                f"{other.prefix}.bin holds {other.tokens.dtype}{' with a mask' * (other.mask is not None)}, "
                f"{self.prefix} {self.dtype}{' with a mask' * self.masked}; write both parts alike"
            )
        index = np.memmap(f"{other.prefix}.idx", dtype=np.uint8, mode="r")
        _, sequences, entries = _header(index, name=other.prefix)
        sizes_end = HEADER.size + 4 * sequences
        documents = HEADER.size + 12 * sequences
        for kind, source in [("bin", other.tokens), ("mask", other.mask), ("sizes", index[HEADER.size : sizes_end])]:
            for block in _blocks(source):
                self._put(kind, block)
        for block in _blocks(index[documents + 8 : documents + 8 * entries]):
            self._put("documents", block.copy().view("<i8") + self.sequences)
        self.tokens += len(other.tokens)
        self.sequences += sequences
        self.documents += entries - 1

    def _put(self, kind: str, array: npt.NDArray[np.generic]) -> None:
        self._out[kind].write(array.tobytes())

    def _finish(self) -> None:
        assert not self._unfinished, "the last document has no end"
        if not self.documents:
            raise DataError(f"{self.prefix}: no document was given, and an empty set cannot be read; give at least one")
        out, sizes = self._out["idx"], self._out["sizes"]
        out.write(HEADER.pack(MAGIC, 1, self._code, self.sequences, self.documents + 1))
        for block in _read_blocks(sizes):
            out.write(block)
        start = 0
        for block in _read_blocks(sizes):
            ends = start + np.cumsum(np.frombuffer(block, dtype="<i4").astype("<i8") * self.dtype.itemsize)
            out.write(np.concatenate([[start], ends[:-1]]).astype("<i8").tobytes())
            start = int(ends[-1])
        for block in _read_blocks(self._out["documents"]):
            out.write(block)
        named = [kind for kind in ("bin", "mask", "idx") if kind in self._out]
        for kind in named:
            self._out[kind].flush()
            os.fsync(self._out[kind].fileno())
        # No reader may take an index for the tokens of another: the old one goes first, the new one comes last.
        for kind in ("idx", "mask"):
            Path(f"{self.prefix}.{kind}").unlink(missing_ok=True)
        for kind in named:
            os.replace(self._names[kind], f"{self.prefix}.{kind}")

    def _discard(self) -> None:
        self._files.close()
        for name in self._names.values():
            Path(name).unlink(missing_ok=True)


def _blocks(array: npt.NDArray[np.generic] | None) -> Iterator[npt.NDArray[np.generic]]:
    for start in range(0, 0 if array is None else len(array), COPIED_AT_ONCE):
        assert array is not None
        yield array[start : start + COPIED_AT_ONCE]


def _read_blocks(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while block := file.read(COPIED_AT_ONCE):
        yield block
