"""Data: numpy arrays of tokens, in an order that is a pure function of (seed, sample number).

    sources = open_sources(paths, cache_dir=...)                        texts and token files, memory-mapped
    samples = Samples(sources, [Stretch(0, seq_len=128)], seed=0)       every sample of the run, by number
    mine = shard(samples_consumed, global_batch_size=16, micro_batch_size=4, dp_size=2, dp_rank=0)
    batch = samples.read(mine[0])                                       tokens, labels, sample_ids of micro-batch 0

Nothing here imports torch or reads the environment.
"""

from __future__ import annotations

from megalite.data.baselines import Baselines, baselines_of
from megalite.data.corpus import default_cache_dir, open_standard_library
from megalite.data.errors import DataError
from megalite.data.indexed import Indexed, IndexedWriter, dtype_for, open_indexed
from megalite.data.meta import Meta, fingerprint, read_meta, read_token_bytes, write_meta, write_token_bytes
from megalite.data.opening import open_pair, open_source, open_sources, open_text
from megalite.data.order import checked_weights
from megalite.data.samples import Batch, Samples, Stretch, shard
from megalite.data.source import IGNORED, Source, Windows
from megalite.data.split import Part, Split
from megalite.data.validation import Validation, validation_steps
from megalite.data.vectors import gaussian, targets

__all__ = [
    "IGNORED",
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
    "Stretch",
    "Validation",
    "Windows",
    "baselines_of",
    "checked_weights",
    "default_cache_dir",
    "dtype_for",
    "fingerprint",
    "gaussian",
    "open_indexed",
    "open_pair",
    "open_source",
    "open_sources",
    "open_standard_library",
    "open_text",
    "read_meta",
    "read_token_bytes",
    "shard",
    "targets",
    "validation_steps",
    "write_meta",
    "write_token_bytes",
]
