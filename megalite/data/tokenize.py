"""Text files into a token file, over several processes, in a way that can be killed at any time and run again.

    1. The input is cut into parts, by the files alone (inputs.py). PREFIX.parts/plan.json says what is being made, of
       which files and how; a run that finds another plan there refuses, or starts over with `overwrite`.
    2. Workers encode parts, each to a pair of its own in PREFIX.parts; NUMBER.done comes last and says that it is
       whole. A run that finds some done goes on with the others.
    3. The parts are joined in their order, and the files take their names: PREFIX.bin, .mask, .idx, .token_bytes.npy,
       and PREFIX.json last of all. PREFIX.parts goes.

So the output is the same bytes for any number of workers, and for a run that was killed and run again. Memory is a few
megabytes a worker, beside the tokenizer and the longest line of JSON. While parts are joined, the disk holds the
tokens twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from megalite.data.encode import Counts, Job, read_counts
from megalite.data.errors import DataError
from megalite.data.indexed import IndexedWriter, dtype_for
from megalite.data.inputs import Input, Part, cut, find_inputs
from megalite.data.meta import Meta, fingerprint, read_meta, write_meta, write_token_bytes
from megalite.data.progress import displayed
from megalite.data.tokenizers import Tokenizer
from megalite.data.workers import encode_parts

PART_BYTES = 1 << 24
FILES = (".bin", ".mask", ".idx", ".token_bytes.npy", ".json")
"""What a finished run leaves beside each other, in the order in which it gets its name."""


@dataclass(frozen=True)
class Made:
    """What came out: Meta as it is in PREFIX.json, and how many documents were left out since they were empty."""

    meta: Meta
    skipped: int


def tokenize(
    names: Sequence[str],
    prefix: str,
    job: Job,
    *,
    workers: int,
    overwrite: bool = False,
    part_bytes: int = PART_BYTES,
) -> Made:
    """Turn files, folders and patterns into the token file PREFIX.

    overwrite: a finished PREFIX, or an unfinished one of another plan, gives way. part_bytes: input that a worker takes
    at a time, and about what each loses when it is killed; never seen in the output.

    Raises ValueError for the job, DataError for the input and the output, WorkerError for a worker that is lost.
    """
    tokenizer = job.open()
    inputs = find_inputs(names)
    parts = cut(inputs, part_bytes=part_bytes, split_text=job.reading.split_on is not None)
    plan = _plan(inputs, job, part_bytes=part_bytes)
    with _workplace(prefix) as place:
        finished = _begin(place, prefix, plan, overwrite=overwrite)
        if finished is not None:
            return finished
        counts = _encode(parts, place, job, workers=workers)
        made = _join(counts, place, prefix, job, tokenizer)
        os.replace(place / "plan.json", place / "finished.json")
        _clear(place)
    return made


def _plan(inputs: Sequence[Input], job: Job, *, part_bytes: int) -> dict[str, Any]:
    """All that the output follows from, as JSON holds it. A tokenizer's file counts by its content."""
    options = {**asdict(job), **asdict(job.reading), "part_bytes": part_bytes}
    del options["reading"]
    for path in (Path(job.tokenizer), *(Path(job.tokenizer, name) for name in ("tokenizer.json", "tokenizer.model"))):
        if path.is_file():
            options["content of the tokenizer"] = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return json.loads(json.dumps({**options, "input": [list(one) for one in inputs]}))


@contextmanager
def _workplace(prefix: str) -> Iterator[Path]:
    """PREFIX.parts, for this process alone, and gone at the end if nothing is left in it."""
    place = Path(f"{prefix}.parts")
    try:
        place.mkdir(parents=True, exist_ok=True)
        with open(place / "lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"--output {prefix}: another process is writing it; wait for it or stop it") from None
            try:
                yield place
            finally:
                if {path.name for path in place.iterdir()} <= {"lock"}:
                    shutil.rmtree(place)
    except OSError as error:
        raise DataError(f"--output {prefix} cannot be written ({error}); is there room, and may you write?") from None


def _begin(place: Path, prefix: str, plan: dict[str, Any], *, overwrite: bool) -> Made | None:
    """Make the workplace ready: keep the parts that an earlier run of this plan finished, remove all else.

    What that run made, if it was killed between finishing and cleaning up.
    """
    finished, before = _read(place / "finished.json"), _read(place / "plan.json")
    if finished == plan and (meta := read_meta(prefix)) is not None:
        skipped = int(_read(place / "skipped.json") or 0)
        _clear(place)
        return Made(meta, skipped)
    if before is not None and before != plan and not overwrite:
        raise DataError(f"{place} is of an unfinished run: {_difference(before, plan)}; --overwrite starts over")
    if before is None and not overwrite:
        there = [f"{prefix}{end}" for end in FILES if os.path.exists(f"{prefix}{end}")]
        if there:
            raise DataError(f"{there[0]} exists; give another --output, or --overwrite")
    done = {path.stem for path in place.glob("*.done")} if before == plan else set()
    for path in place.iterdir():
        keep = path.name == "lock" or (before == plan and path.name == "plan.json")
        if not keep and not (path.stem in done and path.suffix in (".bin", ".idx", ".mask", ".done")):
            path.unlink()
    _write(place / "plan.json", plan)
    return None


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first thing in which two plans differ, in words."""
    for name in sorted({*before, *now}, key=lambda name: name == "input"):
        old, new = before.get(name), now.get(name)
        if old == new or name == "input":
            continue
        return f"its {name.replace('_', ' ')} was {old!r}, and now is {new!r}"
    files, files_now = ({one[0]: one for one in plan["input"]} for plan in (before, now))
    for path in [*files, *files_now]:
        if path not in files or path not in files_now:
            return f"{path} {'was' if path in files else 'was not'} among its files"
        if files[path] != files_now[path]:
            return f"{path} has changed since"
    return "its files came in another order"


def _encode(parts: Sequence[Part], place: Path, job: Job, *, workers: int) -> list[Counts]:
    """The counts of every part, in order; those that are not done yet, encoded."""
    found = {number: read_counts(_part(place, number)) for number in range(len(parts))}
    counts = {number: one for number, one in found.items() if one is not None}
    sizes = [sum(piece.size_bytes for piece in part) for part in parts]
    read = {number: sizes[number] for number in counts}
    waiting = {number: (part, _part(place, number)) for number, part in enumerate(parts) if number not in counts}
    with displayed(sum(sizes), begun_bytes=sum(read.values())) as display:
        total, total_read = _sum(counts.values()), sum(read.values())
        with closing(encode_parts(waiting, job, workers=workers)) as updates:
            for update in updates:
                number = update.number
                total = total.plus(update.counts).plus(counts.get(number, Counts()), -1)
                total_read += update.read_bytes - read.get(number, 0)
                counts[number], read[number] = update.counts, update.read_bytes
                display.show(total, total_read)
    return [counts[number] for number in range(len(parts))]


def _join(counts: Sequence[Counts], place: Path, prefix: str, job: Job, tokenizer: Tokenizer) -> Made:
    """All parts as one set under its own name."""
    total = _sum(counts)
    if not total.documents:
        _clear(place)
        raise DataError(f"the input holds no text: {total.skipped} documents, all of them empty; name other files")
    dtype = dtype_for(tokenizer.vocab_size)
    whole = str(place / "whole")
    with IndexedWriter(whole, dtype, masked=job.masked) as out:
        for number, one in enumerate(counts):
            if one.documents:
                out.append(_part(place, number))
    if tokenizer.token_bytes is not None:
        write_token_bytes(whole, tokenizer.token_bytes)
    meta = Meta(
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        tokens=total.tokens,
        documents=total.documents,
        text_bytes=total.text_bytes,
        dtype=dtype.name,
        fingerprint=fingerprint(f"{whole}.bin"),
    )
    write_meta(whole, meta)
    _write(place / "skipped.json", total.skipped)
    for end in reversed(FILES):  # an older set goes from its description down, so that no half of it looks whole
        Path(f"{prefix}{end}").unlink(missing_ok=True)
    for end in FILES:
        if os.path.exists(whole + end):
            os.replace(whole + end, f"{prefix}{end}")
    return Made(meta, total.skipped)


def _sum(counts: Iterable[Counts]) -> Counts:
    return reduce(Counts.plus, counts, Counts())


def _part(place: Path, number: int) -> str:
    return str(place / f"{number:06d}")


def _clear(place: Path) -> None:
    """Remove what a finished run left, and last what says that it is finished."""
    for path in sorted(place.iterdir(), key=lambda path: (path.name == "finished.json", path.name == "lock")):
        if path.name != "lock":
            path.unlink()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _write(path: Path, values: Any) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(values), encoding="utf-8")
    os.replace(temporary, path)
