"""From the configuration's data group to open sources, the samples of training and the windows of evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from megalite.data import (
    DataError,
    Part,
    Samples,
    Source,
    Stretch,
    Validation,
    checked_weights,
    open_source,
    open_standard_library,
)
from megalite.data.meta import is_indexed, prefix_of
from megalite.data.split import CHUNK
from megalite.models.config import GPTConfig
from megalite.train.config import Config
from megalite.train.spans import Span

DEFAULT_CORPUS = ""


@dataclass(frozen=True)
class Opened:
    """What a run reads. sources: all of it, in the order of first naming, data.validation_paths last."""

    samples: Samples
    validation: Validation
    sources: list[Source]


def open_data(config: Config, spans: Sequence[Span], *, cache_dir: Path) -> Opened:
    """Open all that the spans and data.validation_paths name, each source once.

    The place of a source in the order of first naming keys the order of its samples. Evaluation has the sequence length
    of the last span and, without validation_paths, the kept parts of all sources of all phases. Raises DataError for
    what cannot be read, is too short, has a tokenizer or fingerprint of its own, or is trained and evaluated on.
    """
    data, last = config.data, spans[-1]
    separate = data.documents == "separate"
    period = 0 if data.validation_paths else data.validation_period
    opened = _Opened(config, cache_dir)
    weights = [opened.weights(span, least_bytes=2 * CHUNK if period else 2) for span in spans]
    trained = list(opened)
    stretches = [
        Stretch(span.first_sample, span.seq_len, [of_span.get(name, 0.0) for name in trained], f"{key}.weights")
        for span, (key, of_span) in zip(spans, weights, strict=True)
    ]
    sources = list(opened.values())
    samples = Samples(sources, stretches, seed=config.seed, validation_period=period, separate=separate)
    used = [sources[place] for place in samples.used]
    apart = opened.open(data.validation_paths, key="data.validation_paths", least_bytes=2) if period == 0 else []
    for source in (opened[name] for name in apart):
        if source in used:
            raise DataError(f"data.validation_paths: {source.name} is trained on as well; name it in one place only")
    longest = max(span.seq_len for span in spans)
    kept = [source.windows(last.seq_len, Part.VALIDATION, longest=longest, period=period) for source in used if period]
    whole = [opened[name].windows(last.seq_len, Part.TRAIN, period=0) for name in dict.fromkeys(apart)]
    everything = used + [windows.source for windows in whole]
    _check_vocabularies(everything, vocab_size=opened.vocab_size)
    _check_fingerprints(everything, data.fingerprints)
    return Opened(samples, Validation(kept + whole, separate=separate), everything)


class _Opened(dict[str, Source]):
    """Sources by what they are: the same file is one source, however it is named."""

    def __init__(self, config: Config, cache_dir: Path) -> None:
        assert isinstance(config.model, GPTConfig)
        super().__init__()
        self.vocab_size = config.model.vocab_size
        self._phases, self._cache_dir = config.data.phases, cache_dir

    def weights(self, span: Span, *, least_bytes: int) -> tuple[str, dict[str, float]]:
        """The key of the phase that a span lies in, and how much of each source it reads."""
        phase = max((place for place, one in enumerate(self._phases) if one.from_step <= span.first_step), default=None)
        key = "data" if phase is None else f"data.phases[{phase}]"
        names = self.open(span.paths, key=f"{key}.paths", least_bytes=least_bytes) or [self._open_default()]
        sizes = [len(self[name]) for name in names]
        found: dict[str, float] = {}
        for name, weight in zip(names, checked_weights(span.weights, sizes=sizes, key=f"{key}.weights"), strict=True):
            found[name] = found.get(name, 0.0) + weight
        return key, found

    def open(self, paths: Sequence[str], *, key: str, least_bytes: int) -> list[str]:
        """Open what is new among these; the name of each."""
        names = []
        for place, path in enumerate(paths):
            name = os.path.abspath(prefix_of(path) if is_indexed(path) else path)
            if name not in self:
                self[name] = open_source(
                    path, vocab_size=self.vocab_size, key=f"{key}[{place}]", least_bytes=least_bytes
                )
            names.append(name)
        return names

    def _open_default(self) -> str:
        if DEFAULT_CORPUS not in self:
            self[DEFAULT_CORPUS] = open_standard_library(self._cache_dir)
        return DEFAULT_CORPUS


def _check_vocabularies(sources: Sequence[Source], *, vocab_size: int) -> None:
    for source in sources:
        if source.vocab_size > vocab_size:
            raise DataError(
                f"model.vocab_size={vocab_size} is too small for data.paths: {source.name}, whose tokens go up to "
                f"{source.vocab_size - 1}; take at least {source.vocab_size}"
            )
    known = [source for source in sources if source.tokenizer is not None]
    for one, other in combinations(known, 2):
        # A tokenizer's file has another name on another machine; of another size it is another one.
        if one.tokenizer != other.tokenizer and one.vocab_size != other.vocab_size:
            raise DataError(
                f"data.paths: {one.name} has {one.vocab_size} tokens of {one.tokenizer}, {other.name} "
                f"{other.vocab_size} of {other.tokenizer}; one model reads one tokenizer's: write them alike"
            )


def _check_fingerprints(sources: Sequence[Source], expected: Sequence[str] | None) -> None:
    if expected is None:
        return
    if len(expected) != len(sources):
        names = ", ".join(f"{source.name} {source.fingerprint}" for source in sources)
        raise DataError(
            f"data.fingerprints has {len(expected)} values for {len(sources)} sources; give one each, or null: {names}"
        )
    for place, (source, told) in enumerate(zip(sources, expected, strict=True)):
        if source.fingerprint != told:
            raise DataError(
                f"data.fingerprints[{place}]={told}, but {source.name} has {source.fingerprint}: it is not what the "
                "configuration was made for; bring that back, or set data.fingerprints=null"
            )
