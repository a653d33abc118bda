"""What the data group names: each source once, the right part of it, and nothing that was swapped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megalite.data import DataError, IndexedWriter, Meta, fingerprint, write_meta
from megalite.models.config import GPTConfig
from megalite.train.config import Config, DataConfig, PhaseConfig
from megalite.train.sources import open_data
from megalite.train.spans import spans_of

SEQ = 16


@pytest.fixture
def texts(tmp_path):
    """Paths of five texts, each of one letter."""
    paths = []
    for letter in "abcde":
        path = tmp_path / f"{letter}.txt"
        path.write_text(letter * 20_000)
        paths.append(str(path))
    return paths


def opened(tmp_path, data: DataConfig, **changes):
    config = Config(data=data, seq_len=SEQ, global_batch_size=64, steps=20, **changes)
    return open_data(config, spans_of(config), cache_dir=tmp_path)


def letters(data, first: int, count: int = 64) -> set[str]:
    """Which texts samples come from."""
    return {chr(token) for token in np.unique(data.samples.read(np.arange(first, first + count)).tokens)}


def test_sources_are_all_that_any_phase_names_in_the_order_of_first_naming(tmp_path, texts):
    a, b, c, d, _ = texts
    phases = [PhaseConfig(4, [c, a], [1, 1]), PhaseConfig(8, [b, d])]
    data = opened(tmp_path, DataConfig([a, b], phases=phases, fingerprints=[fingerprint(p) for p in (a, b, c, d)]))
    assert [source.name for source in data.sources] == [a, b, c, d]
    assert [letters(data, 64 * (step - 1)) for step in (1, 3, 4, 7, 8, 20)] == [
        {"a", "b"}, {"a", "b"}, {"a", "c"}, {"a", "c"}, {"b", "d"}, {"b", "d"},
    ]  # fmt: skip
    # what is kept for evaluation is that of all phases, so that the number means the same throughout
    assert {chr(token) for token in np.unique(data.validation.read(np.arange(len(data.validation))).tokens)} == set(
        "abcd"
    )


def test_a_file_named_twice_is_one_source_and_goes_on_where_it_stood(tmp_path, texts):
    a, b, *_ = texts
    phases = [PhaseConfig(3, [f"{tmp_path}/../{tmp_path.name}/a.txt"]), PhaseConfig(5, [b, a])]
    data = opened(tmp_path, DataConfig([a], phases=phases))
    assert len(data.sources) == 2
    place = data.samples.locate(np.arange(64 * 8))
    mine = place.source == 0
    windows = len(data.samples.windows(SEQ)[0])
    assert place.epoch[mine].tolist() == (np.arange(mine.sum()) // windows).tolist()
    twice = opened(tmp_path, DataConfig([a, b, a]))
    assert np.bincount(twice.samples.locate(np.arange(1024)).source).tolist() == [683, 341]  # two thirds, one third


def test_the_default_corpus_is_a_source_like_any_other(tmp_path, texts):
    data = opened(tmp_path, DataConfig(phases=[PhaseConfig(4, texts[:1])]))
    assert ["standard library" in source.name for source in data.sources] == [True, False]
    assert len(data.sources[0].documents) > 100
    assert letters(data, 64 * 3) == {"a"} and len(letters(data, 0)) > 20


@pytest.mark.parametrize("places", [[4], [3, 4]])
def test_validation_paths_are_read_whole_and_all_else_is_for_training(tmp_path, texts, places):
    held_out = [texts[place] for place in places]
    data = opened(tmp_path, DataConfig(texts[:2], validation_paths=held_out))
    assert [source.name for source in data.sources] == texts[:2] + held_out
    assert len(data.validation) == len(places) * (19_999 // SEQ)
    assert [len(windows) for windows in data.samples.windows(SEQ).values()] == [19_999 // SEQ] * 2
    with pytest.raises(DataError, match=r"data\.validation_paths.*a\.txt is trained on"):
        opened(tmp_path, DataConfig(texts[:2], validation_paths=texts[:1]))


@pytest.mark.parametrize("period", [0, 2, 4])
def test_the_period_keeps_one_chunk_in_so_many_for_evaluation(tmp_path, texts, period):
    data = opened(tmp_path, DataConfig(texts[:1], validation_period=period))
    kept = {0: 0, 2: 2, 4: 1}[period]  # of the four whole chunks of 20000 tokens
    assert len(data.validation) == kept * (4095 // SEQ)


def test_a_source_of_weight_zero_everywhere_is_as_if_it_were_not_named(tmp_path, texts):
    data = opened(
        tmp_path, DataConfig(texts[:3], weights=[1, 0, 1], fingerprints=[fingerprint(texts[0]), fingerprint(texts[2])])
    )
    assert [source.name for source in data.sources] == [texts[0], texts[2]]
    assert letters(data, 0, 500) == {"a", "c"}


def test_a_swapped_source_is_refused_by_its_fingerprint(tmp_path, texts):
    right = [fingerprint(path) for path in texts[:3]]
    wanted = DataConfig(texts[:2], validation_paths=texts[2:3], fingerprints=right)
    assert [source.fingerprint for source in opened(tmp_path, wanted).sources] == right
    with pytest.raises(DataError) as caught:
        opened(tmp_path, replace(wanted, fingerprints=right[:2]))
    assert "has 2 values for 3 sources" in str(caught.value)
    with open(texts[1], "w") as file:
        file.write("b" * 19_999 + "c")
    with pytest.raises(DataError) as caught:
        opened(tmp_path, wanted)
    for word in ["data.fingerprints[1]", texts[1], right[1], fingerprint(texts[1])]:
        assert word in str(caught.value)


def write_set(prefix, vocab_size: int, *, tokenizer: str | None) -> str:
    with IndexedWriter(prefix, np.uint16) as out:
        for _ in range(100):
            out.add(np.arange(200))
    if tokenizer is not None:
        write_meta(prefix, Meta(tokenizer, vocab_size, None, 20_000, 100, 0, "uint16", fingerprint(prefix)))
    return str(prefix)


def test_a_mixture_has_one_tokenizer(tmp_path, texts):
    one, other = (write_set(tmp_path / name, size, tokenizer=name) for name, size in (("one", 200), ("other", 220)))
    foreign = write_set(tmp_path / "foreign", 200, tokenizer=None)
    for paths in ([one, other], [texts[0], one]):
        with pytest.raises(DataError, match="one model reads one tokenizer's"):
            opened(tmp_path, DataConfig(paths))
    assert len(opened(tmp_path, DataConfig([one, foreign])).sources) == 2  # who wrote that one is unknown


def test_a_vocabulary_past_the_models_is_refused_before_any_token_is_read(tmp_path):
    prefix = write_set(tmp_path / "one", 200, tokenizer="one")
    with pytest.raises(DataError, match=r"model\.vocab_size=199 is too small.*up to 199; take at least 200"):
        opened(tmp_path, DataConfig([prefix]), model=GPTConfig(vocab_size=199))


@pytest.mark.parametrize(
    ("phase", "word"),
    [
        (PhaseConfig(4, ["nowhere.txt"]), r"data\.phases\[0\]\.paths\[0\]: nowhere\.txt does not exist"),
        (PhaseConfig(4, ["a", "a"], [1.0]), r"data\.phases\[0\]\.weights has 1 values for 2 sources"),
        (PhaseConfig(4, ["a"], [0.0]), r"data\.phases\[0\]\.weights: all 1 are 0"),
    ],
)
def test_what_is_wrong_in_a_phase_is_refused_by_its_key_before_training(tmp_path, texts, phase, word):
    phase = replace(phase, paths=[texts[0] if path == "a" else path for path in phase.paths])
    with pytest.raises(DataError, match=word):
        opened(tmp_path, DataConfig(texts[1:2], phases=[phase]))
