"""The loader: tokens a second against what training takes, and that neither memory nor opening grows with the corpus.

    python benchmarks/data.py

1. Four data ranks' shares of the same steps, one after another: how many tokens a second of one core each reads, and
   what share of a core a rank needs for a million tokens a second.
2. What opening a set takes, and what reading 64 shuffled samples of it holds, from 2**20 tokens to 2**31 (files with a
   hole, so no disk is needed).
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.harness import table
from megalite.data import IndexedWriter, Samples, Stretch, open_source
from megalite.mesh import Axis
from megalite.models.config import GPTConfig
from megalite.train.batches import open_batches
from megalite.train.config import Config, DataConfig, LayoutConfig

RANKS = 4
TARGET = 1_000_000
"""Tokens a second that a data rank trains on: what a small model takes on a GPU."""
VOCABULARY = 50_000
SHUFFLED = 64


def write_set(prefix: Path, tokens: int, *, document: int = 700) -> None:
    """Random documents of about so many tokens."""
    random = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as out:
        while out.tokens < tokens:
            out.add(random.integers(0, VOCABULARY, random.integers(1, 2 * document)))


def write_hole(prefix: Path, tokens: int) -> None:
    """A set of tokens 0 in documents of 2**20, of which only the index takes room."""
    document = 1 << 20
    count = tokens // document
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * tokens)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, count + 1))
        np.full(count, document, dtype="<i4").tofile(file)
        (np.arange(count, dtype="<i8") * 2 * document).tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)


def config_of(paths: list[str], *, seq_len: int, tokens_per_rank: int, documents: str) -> Config:
    """Steps of so many tokens on each of the ranks, each read when it is asked for."""
    data = DataConfig(paths, documents=documents, prefetch=0)
    model = GPTConfig(vocab_size=VOCABULARY)
    batch = RANKS * tokens_per_rank // seq_len
    return Config(model=model, data=data, layout=LayoutConfig(dp=RANKS), seq_len=seq_len, global_batch_size=batch)


def seconds_a_call(call: Callable[[int], object], *, steps: int) -> float:
    """CPU seconds of this process a call, which other work on the machine hardly moves."""
    call(1)
    start = time.process_time()
    for step in range(2, steps + 2):
        call(step)
    return (time.process_time() - start) / steps


def loader_rows(folder: Path, *, steps: int, tokens_per_rank: int) -> list[list[str]]:
    rows = []
    for seq_len in (128, 1024, 4096):
        base = config_of([str(folder / "set")], seq_len=seq_len, tokens_per_rank=tokens_per_rank, documents="join")
        mixed = [str(folder / "set"), str(folder / "other")]
        for name, data in [
            ("one source", base.data),
            ("documents apart", replace(base.data, documents="separate")),
            ("two sources", replace(base.data, paths=mixed)),
        ]:
            config = replace(base, data=data)
            ranks = []
            for rank in range(RANKS):
                axis = Axis("dp", RANKS, rank)
                with open_batches(config, dp=axis, device="cpu", cache_dir=folder) as batches:
                    ranks.append(seconds_a_call(batches.training, steps=steps))
            slowest = tokens_per_rank / max(ranks)
            share = f"{TARGET / slowest:.1%}"
            rows.append([f"{seq_len}, {name}", f"{slowest / 1e6:.1f}", share, f"{slowest / TARGET:.0f}"])
    return rows


def size_rows(folder: Path, *, rounds: int) -> list[list[str]]:
    rows, first = [], None
    for bits in (20, 24, 28, 31):
        prefix = folder / f"hole{bits}"
        write_hole(prefix, 1 << bits)

        def opened(prefix: Path = prefix) -> Samples:
            source = open_source(prefix, vocab_size=VOCABULARY)
            return Samples([source], [Stretch(0, 128)], seed=0, separate=True)

        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            opened()
            times.append(time.perf_counter() - start)
        tracemalloc.start()
        opened().read(np.arange(SHUFFLED))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        found = statistics.median(times), peak
        first = first or found
        milliseconds, kilobytes = f"{1000 * found[0]:.2f}", f"{peak / 1000:.0f}"
        rows.append([f"2**{bits}", milliseconds, f"{found[0] / first[0]:.2f}", kilobytes, f"{peak / first[1]:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="steps that are timed on each rank")
    parser.add_argument("--tokens", type=int, default=1 << 16, help="tokens a rank reads in a step, a multiple of 4096")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_set(folder / "set", 1 << 24)
        write_set(folder / "other", 1 << 22)
        print(f"{RANKS} data ranks, {arguments.tokens} tokens each a step; the slowest, in CPU seconds of one core:\n")
        header = ["seq_len", "Mtokens/s", f"of a core at {TARGET / 1e6:.0f}M/s", "x the target"]
        print(table(header, loader_rows(folder, steps=arguments.steps, tokens_per_rank=arguments.tokens)))
        print(f"\nopening a set, and the memory of {SHUFFLED} shuffled samples of 128 (Python's own allocations):\n")
        print(table(["tokens", "ms", "x the first", "KB", "x the first"], size_rows(folder, rounds=20)))


if __name__ == "__main__":
    main()
