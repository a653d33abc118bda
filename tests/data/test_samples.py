"""Samples by number: any layout and any restart reads the same run, each window as often as it should be."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from megalite.data.errors import DataError
from megalite.data.samples import Samples, Stretch, shard
from megalite.data.source import Source
from megalite.data.split import CHUNK, Part

LAYOUTS = [
    (1, 12),
    (1, 4),
    (2, 6),
    (2, 2),
    (4, 3),
    (4, 1),
    (3, 4),
    (12, 1),
]  # (dp, micro) of a batch of 12


def source(chunks: int, *, name: str = "a", vocab_size: int = 50_000) -> Source:
    tokens = np.random.default_rng(chunks).integers(0, vocab_size, chunks * CHUNK).astype(np.uint16)
    return Source(name, tokens, vocab_size=vocab_size)


def one_step(consumed: int, dp: int, micro: int) -> np.ndarray:
    """(dp, microbatches, micro): what each rank reads."""
    return np.stack(
        [shard(consumed, global_batch_size=12, micro_batch_size=micro, dp_size=dp, dp_rank=rank) for rank in range(dp)]
    )


@pytest.mark.parametrize(("dp", "micro"), LAYOUTS)
@pytest.mark.parametrize("consumed", [0, 12, (1 << 40) + 5])
def test_ranks_of_every_layout_share_out_the_same_step_without_overlap(dp, micro, consumed):
    step = one_step(consumed, dp, micro)
    assert step.shape == (dp, 12 // (dp * micro), micro) and step.dtype == np.int64
    assert sorted(step.ravel().tolist()) == list(range(consumed, consumed + 12))


@pytest.mark.parametrize(("dp", "micro"), LAYOUTS)
def test_a_microbatch_is_one_contiguous_slice_cut_by_rank(dp, micro):
    """So micro-batch j is the same sequences in every layout of equal dp * micro."""
    step = one_step(0, dp, micro)
    for j in range(step.shape[1]):
        assert step[:, j].ravel().tolist() == list(range(j * dp * micro, (j + 1) * dp * micro))


@pytest.mark.parametrize(("micro", "dp"), [(5, 1), (4, 2), (12, 2), (0, 1), (-1, 1), (-3, 2)])
def test_a_batch_that_does_not_divide_is_refused_with_the_numbers(micro, dp):
    with pytest.raises(ValueError, match=rf"global_batch_size=12 .*micro_batch_size={micro} x layout.dp={dp}"):
        shard(0, global_batch_size=12, micro_batch_size=micro, dp_size=dp, dp_rank=0)


def test_tokens_and_labels_are_one_window_shifted_by_one():
    samples = Samples([source(25)], [Stretch(0, 32)], seed=0)
    batch = samples.read(np.array([5, 3]))
    _, _, window = samples.locate(np.array([5, 3]))
    rows = samples.sources[0].windows(32, Part.TRAIN).read(window)
    assert np.array_equal(batch.tokens, rows[:, :-1]) and np.array_equal(batch.labels, rows[:, 1:])
    assert batch.sample_ids.tolist() == [5, 3]
    assert {array.dtype for array in batch[:3]} == {np.dtype(np.int64)} and batch.documents is None


@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_and_labels_share_no_memory(rows):
    """Who masks a label in place must not change a token."""
    samples = Samples([source(25)], [Stretch(0, 32)], seed=0)
    batch = samples.read(np.arange(rows))
    assert not np.shares_memory(batch.tokens, batch.labels)


def test_over_dp_2_an_epoch_is_disjoint_and_covers_every_window():
    samples = Samples([source(20)], [Stretch(0, 100)], seed=1)
    count = len(samples.sources[0].windows(100, Part.TRAIN))
    assert count % 2 == 0
    for epoch in (0, 3):
        seen = []
        for rank in range(2):
            indices = np.concatenate(
                [
                    shard(consumed, global_batch_size=2, micro_batch_size=1, dp_size=2, dp_rank=rank)
                    for consumed in range(epoch * count, (epoch + 1) * count, 2)
                ]
            ).ravel()
            place = samples.locate(indices)
            assert (place.epoch == epoch).all()
            seen.append(set(place.window.tolist()))
            assert len(seen[-1]) == count // 2
        assert not seen[0] & seen[1] and seen[0] | seen[1] == set(range(count))


def test_in_a_mixture_every_source_goes_through_all_its_windows_before_any_comes_again():
    sources = [source(2, name="small"), source(23, name="large")]
    samples = Samples(sources, [Stretch(0, 64, [1, 1])], seed=2)
    place = samples.locate(np.arange(4096))
    for which, one in enumerate(sources):
        count = len(one.windows(64, Part.TRAIN))
        mine = place.source == which
        windows, epochs = place.window[mine], place.epoch[mine]
        for epoch in range(len(windows) // count):
            here = slice(epoch * count, (epoch + 1) * count)
            assert (epochs[here] == epoch).all() and sorted(windows[here].tolist()) == list(range(count))


def test_two_epochs_of_one_source_have_different_orders():
    samples = Samples([source(20)], [Stretch(0, 100)], seed=0)
    count = len(samples.sources[0].windows(100, Part.TRAIN))
    first, second = (samples.locate(np.arange(epoch * count, (epoch + 1) * count)).window for epoch in (0, 1))
    assert (first == second).sum() < 12  # two random permutations agree in one place on average


def run(samples: Samples, consumed: int, *, steps: int, dp: int, micro: int) -> dict[int, list[int]]:
    """What a run of so many steps reads: sample number -> its tokens, over all ranks."""
    read = {}
    for step in range(steps):
        for indices in one_step(consumed + 12 * step, dp, micro):
            for microbatch in indices:
                batch = samples.read(microbatch)
                read |= dict(zip(batch.sample_ids.tolist(), batch.tokens.tolist(), strict=True))
    return read


def test_a_straight_run_equals_the_run_cut_twice_and_resumed_in_other_layouts():
    """Cut after 3 and after 7 of 10 steps, each part by fresh objects that know only `samples_consumed`."""

    def fresh() -> Samples:
        return Samples([source(2), source(21)], [Stretch(0, 40, [0.3, 0.7])], seed=9)

    straight = run(fresh(), 0, steps=10, dp=1, micro=12)
    cut: dict[int, list[int]] = {}
    for begin, end, dp, micro in [(0, 3, 2, 3), (3, 7, 4, 1), (7, 10, 3, 4)]:
        cut |= run(fresh(), 12 * begin, steps=end - begin, dp=dp, micro=micro)
    assert straight == cut and len(straight) == 120


def test_seeds_give_different_orders():
    orders = [Samples([source(20)], [Stretch(0, 32)], seed=seed).locate(np.arange(500)).window for seed in (0, 1)]
    assert (orders[0] == orders[1]).sum() < 12


def test_past_two_to_the_31_samples_epoch_and_window_are_right():
    """Epochs times windows overflow 32 bits long before the run does; Python's own integers are the reference."""
    samples = Samples([source(20)], [Stretch(0, 100)], seed=0)
    count = len(samples.sources[0].windows(100, Part.TRAIN))
    for number in [(1 << 31) - 1, 1 << 31, (1 << 33) + 7, (1 << 60) + 11]:
        place = samples.locate(np.array([number]))
        assert place.epoch.tolist() == [number // count] and 0 <= place.window[0] < count
        assert samples.read(np.array([number])).sample_ids.tolist() == [number]
    far = (1 << 60) // count * count
    assert sorted(samples.locate(np.arange(far, far + count)).window.tolist()) == list(range(count))


def test_a_negative_sample_number_is_an_error():
    with pytest.raises(IndexError, match="-1"):
        Samples([source(20)], [Stretch(0, 100)], seed=0).read(np.array([-1]))


def test_a_source_of_weight_zero_is_as_if_it_were_not_there():
    used, idle = source(22), source(21)
    samples = Samples([used, idle], [Stretch(0, 64, [2, 0])], seed=0)
    alone = Samples([used], [Stretch(0, 64)], seed=0)
    assert np.array_equal(samples.read(np.arange(100)).tokens, alone.read(np.arange(100)).tokens)
    assert samples.used == alone.used == [0]


def test_leaving_a_source_out_keeps_the_order_within_the_others():
    sources = [source(21), source(22)]
    both, second = (Samples(sources, [Stretch(0, 64, weights)], seed=0) for weights in ([1, 1], [0, 1]))
    place = both.locate(np.arange(400))
    mine = place.window[place.source == 1]
    assert mine.tolist() == second.locate(np.arange(len(mine))).window.tolist()
    assert (second.locate(np.arange(400)).source == 1).all()


def test_without_weights_two_files_are_read_in_proportion_to_their_size():
    samples = Samples([source(20), source(60)], [Stretch(0, 64)], seed=0)
    assert np.bincount(samples.locate(np.arange(1024)).source).tolist() == [256, 768]


def test_wrong_weights_are_refused_by_key():
    with pytest.raises(DataError, match=r"data\.weights has 1 values for 2 sources"):
        Samples([source(2), source(2)], [Stretch(0, 64, [1.0])], seed=0)


def test_the_order_of_a_run_without_phases_never_changes():
    """Runs of earlier versions resume where they stood: the order was written down when there were no phases yet."""
    weighted = Samples([source(30), source(47), source(21)], [Stretch(0, 64, [0.3, 0, 0.7])], seed=11)
    by_size = Samples([source(30), source(47)], [Stretch(0, 64)], seed=11)
    for samples, sources, windows, digest in [
        (weighted, [0, 2, 2, 2, 2, 2, 2, 2], [1413, 383, 955, 337, 557, 907, 514, 460], "7b06900db140ce0f"),
        (by_size, [0, 1, 1, 1, 1, 1, 1, 0], [1413, 711, 2553, 4, 1820, 203, 301, 1189], "945170aa160e5fe2"),
    ]:
        place = samples.locate(np.arange(5000))
        assert place.source[:8].tolist() == sources and place.window[:8].tolist() == windows
        assert hashlib.sha256(np.stack(place).tobytes()).hexdigest()[:16] == digest


PHASES = [
    Stretch(0, 64, [1, 2, 0]),
    Stretch(700, 64, [1, 2, 0]),  # as a larger batch makes them: nothing changes
    Stretch(1500, 32, [1, 2, 0]),
    Stretch(1999, 64, [3, 0, 1]),
    Stretch(5000, 64, [1, 1, 1]),
    Stretch(5100, 32, [0, 1, 0]),
]


def phased(stretches=PHASES) -> Samples:
    return Samples([source(5), source(8), source(11)], stretches, seed=4)


def test_over_all_phases_a_source_is_read_in_one_sequence_for_each_seq_len():
    """Within an epoch each window once, and no epoch begins before the last one has ended."""
    samples = phased()
    place = samples.locate(np.arange(7000))
    first = [stretch.first_sample for stretch in PHASES]
    seq_lens = np.array([stretch.seq_len for stretch in PHASES])[np.searchsorted(first, np.arange(7000), "right") - 1]
    for seq_len in (32, 64):
        for which, windows in samples.windows(seq_len).items():
            mine = (place.source == which) & (seq_lens == seq_len)
            epochs, numbers = place.epoch[mine], place.window[mine]
            assert np.array_equal(epochs, np.arange(len(epochs)) // len(windows))
            for epoch in range(int(epochs[-1])):
                assert sorted(numbers[epochs == epoch].tolist()) == list(range(len(windows)))


@pytest.mark.parametrize("kept", range(1, len(PHASES)))
def test_a_phase_that_is_added_later_changes_no_sample_before_it(kept):
    before, after = phased(PHASES[:kept]), phased()
    numbers = np.arange(PHASES[kept].first_sample)
    assert np.array_equal(np.stack(before.locate(numbers)), np.stack(after.locate(numbers)))


def test_a_stretch_like_the_one_before_changes_nothing():
    cut = phased([Stretch(start, 64, [1, 2, 3]) for start in (0, 1, 1024, 1500, 1501)])
    whole = phased([Stretch(0, 64, [1, 2, 3])])
    numbers = np.arange(4000)
    assert np.array_equal(np.stack(cut.locate(numbers)), np.stack(whole.locate(numbers)))


def test_phases_read_alike_in_any_order_and_by_fresh_objects():
    """Nothing but the number decides, so a resumed run, another rank and another layout read the same."""
    straight = np.stack(phased().locate(np.arange(7000)))
    fresh = phased()
    for number in np.random.default_rng(0).permutation(7000)[:60]:
        assert np.array_equal(np.stack(fresh.locate(np.array([number])))[:, 0], straight[:, number])


def test_rows_have_the_length_of_their_phase_and_come_from_its_sources():
    samples = phased()
    for stretch, seq_len in zip(PHASES, (64, 64, 32, 64, 64, 32), strict=True):
        numbers = stretch.first_sample + np.arange(20)
        batch, place = samples.read(numbers), samples.locate(numbers)
        assert batch.tokens.shape == (20, seq_len)
        assert {which for which, weight in enumerate(stretch.weights) if weight} >= set(place.source.tolist())
        for tokens, which, window in zip(batch.tokens, place.source, place.window, strict=True):
            windows = samples.windows(seq_len)[which]
            assert tokens.tolist() == windows.read(np.array([window]))[0, :-1].tolist()


def test_validation_of_a_longer_seq_len_is_never_trained_on_in_a_shorter_phase():
    """Chunks are those of the longest windows in every phase."""
    one = Source("a", np.arange(60 * CHUNK).astype(np.int32), vocab_size=60 * CHUNK)
    samples = Samples([one], [Stretch(0, 64), Stretch(4000, 5000)], seed=0)
    validation = one.windows(5000, Part.VALIDATION, longest=5000)
    held_out = np.unique(validation.read(np.arange(len(validation))))
    assert len(held_out) > 5000
    for first, seq_len in ((0, 64), (4000, 5000)):
        windows = samples.windows(seq_len)[0]
        assert not np.isin(windows.read(np.arange(len(windows))), held_out).any(), first


def test_wrong_weights_of_a_phase_are_refused_by_its_key():
    with pytest.raises(
        DataError, match=r"data\.phases\[0\]\.weights has 1 values for 2 sources in data\.phases\[0\]\.p"
    ):
        Samples([source(2), source(2)], [Stretch(0, 64), Stretch(9, 64, [1.0], "data.phases[0].weights")], seed=0)
