"""Every layout trains on the same samples and evaluates on the same ones, each once."""

from __future__ import annotations

import itertools
import operator
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from megalite.data import DataError, IndexedWriter, Part, dtype_for
from megalite.mesh import Axis, Mesh
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.microbatch import IGNORED
from megalite.pipeline.execute import Pipeline
from megalite.pipeline.straight import gpipe
from megalite.train.batches import open_batches, start_count
from megalite.train.check import check
from megalite.train.config import Config, DataConfig, EvalConfig, LayoutConfig, PhaseConfig
from megalite.train.evaluate import evaluate
from tests.ranks import run

SEQ = 16
LAYOUTS = [(1, None), (1, 2), (2, None), (4, 1)]  # (dp, micro_batch_size) of a batch of 8


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8).tobytes())
    return str(path)


def config_of(text: str, *, dp: int = 1, micro: int | None = None, ahead: int = 0, **changes) -> Config:
    config = Config(data=DataConfig([text]), seq_len=SEQ, global_batch_size=8, micro_batch_size=micro, seed=3)
    config = check(replace(config, layout=LayoutConfig(), **changes), dp)
    # Most tests leave batches before their end, and a thread that waits does not go well with a fork.
    return with_data(config, prefetch=ahead)


def with_data(config: Config, **changes) -> Config:
    return replace(config, data=replace(config.data, **changes))


def every_rank(config: Config, tmp_path):
    """The batches of each data rank in turn."""
    dp = config.layout.dp
    return [open_batches(config, dp=Axis("dp", dp, rank), device="cpu", cache_dir=tmp_path) for rank in range(dp)]


def rows(config: Config, tmp_path, microbatches_of) -> dict[int, tuple[list, ...]]:
    """Sample id -> its tensors, over all data ranks; each id comes once."""
    found: dict[int, tuple[list, ...]] = {}
    for batches in every_rank(config, tmp_path):
        for one in microbatches_of(batches):
            fields = [one.tokens, one.labels] if hasattr(one, "tokens") else [one.inputs, one.targets]
            for sample, *values in zip(one.sample_ids.tolist(), *(field.tolist() for field in fields), strict=True):
                assert sample not in found or sample < 0
                found[sample] = tuple(values)
    found.pop(-1, None)
    return found


@pytest.mark.parametrize(("dp", "micro"), LAYOUTS)
@pytest.mark.parametrize("model", [GPTConfig(), MLPConfig(hidden_size=12)], ids=["gpt", "mlp"])
def test_every_layout_trains_on_the_same_samples_in_the_same_step(text, tmp_path, model, dp, micro):
    changes = {"model": model} | ({"data": DataConfig()} if isinstance(model, MLPConfig) else {})
    for step in (1, 2, 7):
        training = operator.methodcaller("training", step)
        alone = rows(config_of(text, **changes), tmp_path, training)
        assert rows(config_of(text, dp=dp, micro=micro, **changes), tmp_path, training) == alone
        assert sorted(alone) == list(range(8 * (step - 1), 8 * step))


def test_a_microbatch_is_the_text_and_the_text_one_byte_on(text, tmp_path):
    config = config_of(text, dp=2, micro=2)
    with open(text, "rb") as file:
        content = file.read()
    for batches in every_rank(config, tmp_path):
        batch = batches.training(5)
        assert len(batch) == 2
        for one in batch:
            assert one.tokens.shape == one.labels.shape == (2, SEQ) and one.tokens.dtype == torch.int64
            assert one.positions.tolist() == list(range(SEQ)) and one.step == 5
            for tokens, labels in zip(one.tokens.tolist(), one.labels.tolist(), strict=True):
                assert bytes([*tokens, labels[-1]]) in content and tokens[1:] == labels[:-1]


@pytest.mark.parametrize("sequences", [1, 5, 8, 13])
@pytest.mark.parametrize(("dp", "micro"), LAYOUTS)
def test_every_layout_evaluates_on_the_same_samples_each_once_in_equally_many_batches(
    text, tmp_path, dp, micro, sequences
):
    def validation(batches):
        return list(itertools.chain(*batches.validation()))

    changes = {"eval": EvalConfig(sequences=sequences)}
    config = config_of(text, dp=dp, micro=micro, **changes)
    alone = rows(config_of(text, **changes), tmp_path, validation)
    assert len(alone) == sequences
    assert rows(config, tmp_path, validation) == alone
    assert len({len(validation(batches)) for batches in every_rank(config, tmp_path)}) == 1


def test_validation_is_never_trained_on_and_may_ask_for_more_than_there_is(text, tmp_path):
    config = config_of(text, eval=EvalConfig(sequences=10_000))
    seen = rows(config, tmp_path, lambda batches: itertools.chain(*batches.validation()))
    trained = rows(config, tmp_path, lambda batches: itertools.chain(*(batches.training(s) for s in range(1, 300))))
    assert 0 < len(seen) < 10_000
    assert not {tuple(tokens) for tokens, _ in seen.values()} & {tuple(tokens) for tokens, _ in trained.values()}


def test_a_vocabulary_too_small_for_the_data_is_refused(text, tmp_path):
    with pytest.raises(DataError, match=r"model\.vocab_size=100 is too small for data\.paths"):
        every_rank(config_of(text, model=GPTConfig(vocab_size=100)), tmp_path)


class Sums(nn.Module):
    """A loss that can be summed by hand: the labels that count."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, _, microbatch):
        assert not self.training
        return (microbatch.labels * (microbatch.labels != IGNORED)).sum() * self.scale


def _evaluated(config: Config, tmp_path) -> tuple[float, int]:
    mesh = Mesh.build(config.layout.fit(config.layout.dp))
    batches = open_batches(config, dp=mesh.dp, device="cpu", cache_dir=tmp_path)
    count = start_count(batches.training(1), mesh=mesh, device="cpu").wait()
    return evaluate(Pipeline({0: Sums()}, gpipe(1, 1)), batches.validation(), mesh=mesh)["val/loss"], int(count)


def test_the_validation_loss_and_the_count_of_tokens_are_the_same_on_any_number_of_data_ranks(text, tmp_path):
    changes = {"eval": EvalConfig(sequences=13)}
    alone = _evaluated(config_of(text, **changes), tmp_path)
    validation = rows(config_of(text, **changes), tmp_path, lambda batches: itertools.chain(*batches.validation()))
    labels = [labels for _, labels in validation.values()]
    # sums of small whole numbers in float32 are exact
    assert alone == (np.mean(labels), 8 * SEQ)
    assert run(_evaluated, 2, config_of(text, dp=2, micro=1, **changes), tmp_path) == [alone, alone]


@pytest.mark.parametrize("model", [GPTConfig(), MLPConfig(hidden_size=12)], ids=["gpt", "mlp"])
def test_batches_are_the_same_read_ahead_or_not(text, tmp_path, model):
    def tensors(ahead: int) -> list:
        data = DataConfig([text] if isinstance(model, GPTConfig) else [])
        with open_batches(
            config_of(text, micro=2, ahead=ahead, data=data, model=model),
            dp=Axis("dp"),
            device="cpu",
            cache_dir=tmp_path,
        ) as batches:
            read = [vars(one) for step in range(1, 9) for one in batches.training(step)]
            assert batches.waited_seconds > 0
        return read

    for one, other in zip(tensors(0), tensors(3), strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]


def test_leaving_ends_the_thread_also_by_an_error(text, tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        open_batches(config_of(text, ahead=2), dp=Axis("dp"), device="cpu", cache_dir=tmp_path) as batches,
    ):
        batches.training(1)
        assert [thread for thread in threading.enumerate() if thread.name == "prefetch"]
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def write_set(prefix, documents: int, *, vocab_size: int = 256, seed: int = 0, **kind) -> str:
    """A pair of documents of 1 to 60 tokens, each ended by the largest token of the vocabulary."""
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, dtype_for(vocab_size), **kind) as out:
        for _ in range(documents):
            tokens = np.append(random.integers(0, vocab_size - 1, random.integers(1, 60)), vocab_size - 1)
            out.add(tokens, tokens % 3 > 0) if kind else out.add(tokens)
    return str(prefix)


def test_separate_documents_are_told_apart_and_lose_the_first_token_of_each(tmp_path):
    prefix = write_set(tmp_path / "set", 700)
    config = config_of(prefix)
    for documents in ("join", "separate"):
        (batches,) = every_rank(with_data(config, documents=documents), tmp_path)
        (one,) = batches.training(3)
        (joined,) = every_rank(config, tmp_path)[0].training(3)
        assert torch.equal(one.tokens, joined.tokens)
        if documents == "join":
            assert one.documents is None and (one.labels != IGNORED).all()
        else:
            last = one.tokens == 255
            assert (last.sum() > 3) and torch.equal(one.labels == IGNORED, last)
            # the number of a document is how many have ended before in its row
            assert torch.equal(one.documents, last.cumsum(1) - last.long())
        assert one.valid() == (one.labels != IGNORED).sum()


def test_masked_labels_are_out_of_the_loss_in_training_and_evaluation(tmp_path):
    prefix = write_set(tmp_path / "set", 700, masked=True)
    (batches,) = every_rank(config_of(prefix), tmp_path)
    for one in [*batches.training(1), *itertools.chain(*batches.validation())]:
        present = one.sample_ids >= 0
        ahead = one.tokens[present, 1:]
        assert torch.equal(one.labels[present, :-1], torch.where(ahead % 3 > 0, ahead, IGNORED))
        assert one.valid() == (one.labels != IGNORED).sum() < one.labels.numel()


RAMPED = {"seq_len_ramp": [[3, 32]], "global_batch_size_ramp": [[4, 16]], "steps": 8}


@pytest.mark.parametrize(("dp", "micro"), [(2, None), (4, 2)])
def test_with_ramps_and_phases_every_layout_reads_the_same_and_each_sample_once(text, tmp_path, dp, micro):
    later = write_set(tmp_path / "later", 700)
    data = DataConfig([text], phases=[PhaseConfig(5, [later, text], [1.0, 2.0])])
    sizes = [8, 8, 8, 16, 16, 16, 16, 16]
    seen = []
    for step, size in enumerate(sizes, 1):
        training = operator.methodcaller("training", step)
        alone = rows(config_of(text, data=data, **RAMPED), tmp_path, training)
        assert rows(config_of(text, dp=dp, micro=micro, data=data, **RAMPED), tmp_path, training) == alone
        assert len(alone) == size and {len(tokens) for tokens, _ in alone.values()} == {16 if step < 3 else 32}
        seen += sorted(alone)
    assert seen == list(range(sum(sizes)))


def test_a_run_reads_samples_0_to_n_and_its_divisors_are_its_own_tokens(tmp_path):
    """No partial last batch: 2.5 batches of windows, and the third step goes on into the next epoch, on all ranks."""
    prefix = write_set(tmp_path / "set", 40, masked=True)  # few windows
    config = config_of(prefix, dp=2)
    config = with_data(config, validation_period=0)
    windows = len(every_rank(config, tmp_path)[0].samples.windows(SEQ)[0])
    batch = 2 * (windows // 5)
    config = replace(config, global_batch_size=batch, steps=5)
    assert 2 * batch < windows < 3 * batch
    ids, epochs = [], []
    for step in range(1, 6):
        shares = [batches.training(step) for batches in every_rank(config, tmp_path)]
        assert [len(share) for share in shares] == [1, 1]
        counted = sum(int((one.labels != IGNORED).sum()) for share in shares for one in share)
        assert counted == sum(one.valid() for share in shares for one in share)
        numbers = torch.cat([one.sample_ids for share in shares for one in share])
        ids += sorted(numbers.tolist())
        epochs += every_rank(config, tmp_path)[0].samples.locate(numbers.numpy()).epoch.tolist()
    assert ids == list(range(5 * batch)) and set(epochs) == {0, 1, *range(2, 1 + (5 * batch - 1) // windows)}


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_validation_set_of_five_samples_is_counted_once_on_any_number_of_ranks(text, tmp_path, dp):
    held_out = tmp_path / "held_out.txt"
    content = bytes(range(5 * SEQ + 1))
    held_out.write_bytes(content)
    config = config_of(text, dp=dp, data=DataConfig([text], validation_paths=[str(held_out)]))
    every = [list(itertools.chain(*batches.validation())) for batches in every_rank(config, tmp_path)]
    assert len({len(microbatches) for microbatches in every}) == 1
    labels = [one.labels[one.labels != IGNORED] for microbatches in every for one in microbatches]
    assert sorted(torch.cat(labels).tolist()) == list(content[1:])
    assert sum(one.label_bytes for microbatches in every for one in microbatches) == 5 * SEQ
    # and all of the text is for training
    assert every_rank(config, tmp_path)[0].samples.windows(SEQ)[0].split.windows(Part.VALIDATION) == 0


def _evaluated_apart(config: Config, tmp_path) -> float:
    mesh = Mesh.build(config.layout.fit(config.layout.dp))
    with open_batches(config, dp=mesh.dp, device="cpu", cache_dir=tmp_path) as batches:
        return evaluate(Pipeline({0: Sums()}, gpipe(1, 1)), batches.validation(), mesh=mesh)["val/loss"]


def test_evaluation_is_the_mean_over_tokens_of_a_set_of_five_on_two_ranks(text, tmp_path):
    """A mean of batch means would weigh the short last batch as much as a whole one."""
    held_out = tmp_path / "held_out.txt"
    held_out.write_bytes(bytes(range(5 * SEQ + 1)))
    config = config_of(text, dp=2, micro=1, data=DataConfig([text], validation_paths=[str(held_out)]))
    config = replace(config, global_batch_size=4)
    mean = sum(range(1, 5 * SEQ + 1)) / (5 * SEQ)  # small whole numbers: exact
    assert run(_evaluated_apart, 2, config, tmp_path) == [mean, mean]


def test_a_description_has_a_line_for_each_source_with_its_fingerprint(text, tmp_path):
    prefix = write_set(tmp_path / "set", 700)
    (batches,) = every_rank(config_of(text, data=DataConfig([text, prefix])), tmp_path)
    lines = batches.describe().splitlines()
    assert len(batches.fingerprints) == 2
    for line, name, found in zip(lines, [text, prefix], batches.fingerprints, strict=False):
        assert name in line and found in line
