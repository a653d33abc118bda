"""Tokenizing against the tokenizer's own library: bytes of text a second, and what two processes add.

    python benchmarks/tokenizing.py
    python benchmarks/tokenizing.py --text my.txt --only tokenizers bytes

One text, Python's own standard library cut into documents, is tokenized by each side in turn:

- the library alone, in one process with its threads off: its own encode of the documents, in memory, in batches. For
  bytes, where there is no library, numpy: the file read whole, `frombuffer`, and the tokens written.
- `python -m megalite.data tokenize` as a user runs it, with 1 and 2 workers: JSON read, documents ended, token files
  written and joined. Its time is that of the work: starting processes is taken off (measured on one document).

The tokenizers are trained here on the text, so nothing is fetched. (The file is not called tokenize.py: a script's
folder comes first where Python looks for modules, and its own `inspect` imports its own `tokenize`.)
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of this process: the library is one side, on one core
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.harness import ratio, table
from megalite.data.corpus import list_sources
from megalite.data.tokenizers import GPT4_PATTERN

KINDS = ("tokenizers", "tiktoken", "sentencepiece", "bytes")
BATCH = 256  # documents that the library gets at once
MEGABYTE = 1e6


def documents_of(text: Path | None, *, megabytes: float, document_bytes: int) -> list[str]:
    """Stretches of about so many bytes, cut at line ends, of a text or of Python's own source."""
    if text is None:
        import sysconfig

        listing = list_sources(Path(sysconfig.get_path("stdlib")))
        content = b"".join((listing.root / name).read_bytes() for name, _ in listing.files)
    else:
        content = text.read_bytes()
    lines = content[: int(megabytes * MEGABYTE)].decode(errors="replace").splitlines(keepends=True)
    documents, size = [""], 0
    for line in lines:
        if size >= document_bytes:
            documents, size = [*documents, ""], 0
        documents[-1] += line
        size += len(line)
    return documents


def train(kind: str, documents: list[str], folder: Path, *, vocab_size: int) -> str:
    """A tokenizer of this kind, trained on some of the text; the name that opens it."""
    some = documents[:: max(1, len(documents) // 2000)]
    if kind == "bytes":
        return kind
    path = folder / {"tokenizers": "tokenizer.json", "tiktoken": "t.tiktoken", "sentencepiece": "s.model"}[kind]
    if kind == "sentencepiece":
        import sentencepiece

        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in some[:500] for line in text.splitlines() if line),
            model_prefix=str(path.with_suffix("")), vocab_size=min(vocab_size, 8000), model_type="bpe",
            byte_fallback=True, num_threads=1, minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip
        return str(path)
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    pattern = GPT4_PATTERN.replace("++", "+").replace("?+", "?").replace("*+", "*")
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    inner = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(some, trainer)
    if kind == "tokenizers":
        inner.add_special_tokens(["<|endoftext|>"])
        inner.save(str(path))
    else:
        write_ranks(inner.get_vocab(), path)
    return str(path)


def write_ranks(vocabulary: dict[str, int], path: Path) -> None:
    """The same merges as a file of ranks: the bytes first, then the tokens in the order in which they were merged."""
    import base64

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [code for code in range(256) if code not in printable]
    byte_of = {chr(code): code for code in printable} | {chr(256 + n): code for n, code in enumerate(others)}
    tokens = sorted(vocabulary, key=lambda token: (len(token) > 1, vocabulary[token]))
    rows = (bytes(byte_of[sign] for sign in token) for token in tokens)
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(rows)))


def library(kind: str, name: str, documents: list[str], raw: Path) -> Callable[[], Any]:
    """The library's own encode of all documents, as its manual does it, on one thread."""
    groups = [documents[start : start + BATCH] for start in range(0, len(documents), BATCH)]
    if kind == "tokenizers":
        from tokenizers import Tokenizer

        inner = Tokenizer.from_file(name)
        return lambda: [inner.encode_batch(group, add_special_tokens=False) for group in groups] and None
    if kind == "tiktoken":
        from megalite.data.tokenizers import _encoding_of_ranks

        encoding = _encoding_of_ranks(name, pattern=GPT4_PATTERN, end="<|endoftext|>")
        return lambda: [encoding.encode_ordinary_batch(group, num_threads=1) for group in groups] and None
    if kind == "sentencepiece":
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=name)
        return lambda: [model.encode(group, num_threads=1) for group in groups] and None
    return lambda: np.frombuffer(raw.read_bytes(), dtype=np.uint8).astype(np.uint16).tofile(raw.with_suffix(".bin"))


def ours(name: str, text: Path, prefix: Path, *, workers: int, part_bytes: int = 1 << 20) -> Callable[[], Any]:
    """The command, as a user runs it."""
    command = [sys.executable, "-m", "megalite.data", "tokenize", str(text), "--output", str(prefix), "--overwrite"]
    command += ["--tokenizer", name, "--workers", str(workers), "--part-bytes", str(part_bytes)]
    root = Path(__file__).parents[1]
    return lambda: subprocess.run(command, cwd=root, check=True, capture_output=True)


class Spent(NamedTuple):
    """By the clock, and by the processors: of this process and of its children."""

    seconds: float
    cpu_seconds: float


def spent_in(step: Callable[[], Any]) -> Spent:
    def now() -> Spent:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return Spent(time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in usage))

    before = now()
    step()
    return Spent(*(b - a for a, b in zip(before, now(), strict=True)))


def measure(kind: str, documents: list[str], *, rounds: int, vocab_size: int) -> list[tuple[str, ...]]:
    """Rows of the table for one kind of tokenizer."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        name = train(kind, documents, folder, vocab_size=vocab_size)
        lines, few, raw = folder / "all.jsonl", folder / "few.jsonl", folder / "all.raw"
        lines.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents))
        few.write_text('{"text": "x"}\n' * 2)
        raw.write_text("".join(documents))
        sides = {"library": library(kind, name, documents, raw)}
        for workers in (1, 2):
            sides[f"{workers}"] = ours(name, lines, folder / f"out{workers}", workers=workers)
            # A part a worker: as many are started as have something to do.
            sides[f"start {workers}"] = ours(name, few, folder / f"few{workers}", workers=workers, part_bytes=14)
        times: dict[str, list[Spent]] = {side: [] for side in sides}
        for turn in range(rounds + 1):
            for side, step in sides.items():
                spent = spent_in(step)
                if turn:  # the first warms caches
                    times[side].append(spent)
    total = sum(len(text.encode()) for text in documents)
    alone = times["library"]
    rows = [_row(f"{kind}: {'numpy' if kind == 'bytes' else 'the library'} alone", total, alone, alone)]
    for workers in "12":
        work = [
            Spent(*(a - b for a, b in zip(*both, strict=True)))
            for both in zip(times[workers], times[f"start {workers}"], strict=True)
        ]
        rows.append(_row(f"{kind}: ours, {workers} worker{'s' * (workers > '1')}", total, work, alone))
    return rows


def _row(side: str, total_bytes: int, spent: list[Spent], library: list[Spent]) -> tuple[str, ...]:
    clock, cpu = (statistics.median(values) for values in zip(*spent, strict=True))
    by_clock, by_cpu = (
        str(ratio([one[kind] for one in library], [one[kind] for one in spent])) if spent is not library else ""
        for kind in range(2)
    )
    return side, f"{clock:.2f}", f"{total_bytes / MEGABYTE / clock:.1f}", by_clock, f"{cpu:.2f}", by_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenizing against the tokenizer's own library.")
    parser.add_argument("--text", type=Path, default=None, help="a text in place of Python's own source")
    parser.add_argument("--megabytes", type=float, default=10, help="of the text (10)")
    parser.add_argument("--document-bytes", type=int, default=2000, help="of a document, about (2000)")
    parser.add_argument("--vocab", type=int, default=8000, help="of the tokenizers that are trained (8000)")
    parser.add_argument("--rounds", type=int, default=3, help="that count (3)")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=" ".join(KINDS))
    options = parser.parse_args()
    documents = documents_of(options.text, megabytes=options.megabytes, document_bytes=options.document_bytes)
    rows = []
    for kind in options.only:
        rows += measure(kind, documents, rounds=options.rounds, vocab_size=options.vocab)
    total = sum(len(text.encode()) for text in documents)
    print(f"{total / MEGABYTE:.1f} MB in {len(documents)} documents; medians of {options.rounds} rounds")
    print("times the library: its time over ours, paired (quartiles); by CPU, of all processes together")
    print(table(("side", "s", "MB/s", "times the library", "CPU s", "by CPU"), rows))


if __name__ == "__main__":
    main()
