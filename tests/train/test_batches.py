"""Every layout trains on the same samples and evaluates on the same ones, each once."""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from megalite.data import DataError
from megalite.mesh import Axis, Mesh
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.microbatch import IGNORED
from megalite.train.batches import open_batches, start_count
from megalite.train.check import check
from megalite.train.config import Config, DataConfig, EvalConfig, LayoutConfig
from megalite.train.evaluate import evaluate
from tests.ranks import run

SEQ = 16
LAYOUTS = [(1, None), (1, 2), (2, None), (4, 1)]  # (dp, micro_batch_size) of a batch of 8


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8).tobytes())
    return str(path)


def config_of(text: str, *, dp: int = 1, micro: int | None = None, **changes) -> Config:
    config = Config(data=DataConfig([text]), seq_len=SEQ, global_batch_size=8, micro_batch_size=micro, seed=3)
    return check(replace(config, layout=LayoutConfig(), **changes), dp)


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
    return evaluate(Sums(), batches.validation(), mesh=mesh), int(count)


def test_the_validation_loss_and_the_count_of_tokens_are_the_same_on_any_number_of_data_ranks(text, tmp_path):
    changes = {"eval": EvalConfig(sequences=13)}
    alone = _evaluated(config_of(text, **changes), tmp_path)
    validation = rows(config_of(text, **changes), tmp_path, lambda batches: itertools.chain(*batches.validation()))
    labels = [labels for _, labels in validation.values()]
    # sums of small whole numbers in float32 are exact
    assert alone == (np.mean(labels), 8 * SEQ)
    assert run(_evaluated, 2, config_of(text, dp=2, micro=1, **changes), tmp_path) == [alone, alone]
