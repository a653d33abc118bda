"""Data: numpy arrays of tokens, in an order that is a pure function of (seed, sample number).

    sources = open_sources(paths, cache_dir=...)                        files of bytes, memory-mapped
    samples = Samples(sources, seq_len=128, seed=0)                     every sample of the run, by number
    mine = shard(samples_consumed, global_batch_size=16, micro_batch_size=4, dp_size=2, dp_rank=0)
    batch = samples.read(mine[0])                                       tokens, labels, sample_ids of micro-batch 0

Nothing here imports torch or reads the environment.
"""

from __future__ import annotations

from megalite.data.baselines import Baselines, baselines_of
from megalite.data.corpus import default_cache_dir, open_sources, open_standard_library
from megalite.data.indexed import Indexed, IndexedWriter, dtype_for, open_indexed
from megalite.data.meta import Meta, fingerprint, read_meta, read_token_bytes, write_meta, write_token_bytes
from megalite.data.samples import Batch, Samples, shard, validation_steps
from megalite.data.source import DataError, Source, open_text, open_texts
from megalite.data.split import Part, Split
from megalite.data.vectors import gaussian, targets

__all__ = [
    "Baselines",
    "Batch",
    "DataError",
    "Indexed",
    "IndexedWriter",
    "Meta",
    "Part",
    "Samples",
    "Source",
    "Split",
    "baselines_of",
    "default_cache_dir",
    "dtype_for",
    "fingerprint",
    "gaussian",
    "open_indexed",
    "open_sources",
    "open_standard_library",
    "open_text",
    "open_texts",
    "read_meta",
    "read_token_bytes",
    "shard",
    "targets",
    "validation_steps",
    "write_meta",
    "write_token_bytes",
]
