"""What a GPT promises beside the layout's law: see test_layout_is_free.py and test_gpt_against_transformers.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import megalite.layers.attention
from megalite.layers.rotary import rotate
from megalite.models.config import GPTConfig
from megalite.models.gpt import GPT, LossOptions
from megalite.models.microbatch import Microbatch
from megalite.spec import init_parameters


def batch() -> Microbatch:
    tokens, labels = torch.randint(11, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    return Microbatch(tokens, labels, torch.arange(8), torch.arange(2), 1)


def test_evaluation_leaves_dropout_z_loss_and_smoothing_out() -> None:
    config = GPTConfig(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    torch.manual_seed(0)
    plain = GPT(config, dtype=torch.float64)
    dropping = GPTConfig(**vars(config) | {"resid_pdrop": 0.5, "embd_pdrop": 0.5})
    model = GPT(dropping, loss=LossOptions(z_loss=1.0, label_smoothing=0.5), dtype=torch.float64)
    model.load_state_dict(plain.state_dict())
    assert model(None, batch()) != plain(None, batch())
    model.eval()
    assert torch.equal(model(None, batch()), plain(None, batch()))


def test_logits_and_loss_are_of_one_model() -> None:
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=1), dtype=torch.float64
    )
    expected = torch.nn.functional.cross_entropy(
        model.logits(batch()).flatten(0, 1), batch().labels.flatten(), reduction="sum"
    )
    torch.testing.assert_close(model(None, batch()), expected, rtol=1e-12, atol=0)


def test_a_model_made_on_meta_and_cast_to_bfloat16_turns_by_the_exact_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 the positions 0 to 4095 would be 769 different ones."""
    tables: list[torch.Tensor] = []

    def recorded(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tables.extend((cos, sin))
        return rotate(x, cos, sin)

    monkeypatch.setattr(megalite.layers.attention, "rotate", recorded)
    config = GPTConfig(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=1, rope_theta=500000.0)
    model = GPT(config, device="meta")
    init_parameters(model, seed=0)
    model = model.to(torch.bfloat16)
    positions = torch.tensor([0, 1, 257, 769, 2047, 4093, 4094, 4095])
    one = batch()
    model(None, Microbatch(one.tokens, one.labels, positions, one.sample_ids, one.step))
    pairs = torch.arange(config.dim_per_head // 2, dtype=torch.float64)
    angles = positions.double()[:, None] * config.rope_theta ** (-2 * pairs / config.dim_per_head)
    assert len(tables) == 4  # of queries and of keys
    for table, expected in zip(tables, (angles.cos(), angles.sin()) * 2, strict=True):
        assert table.dtype == torch.float32
        torch.testing.assert_close(table.double(), expected, rtol=0, atol=1e-7)  # rounded once to float32


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("positions", torch.arange(1), r"positions of shape \(1,\) do not go with tokens of \(2, 8\); take \(8,\)"),
        ("labels", torch.zeros(2, 7, dtype=torch.int64), r"labels of shape \(2, 7\)"),
        ("sample_ids", torch.arange(1), r"sample_ids of shape \(1,\)"),
    ],
)
def test_a_micro_batch_whose_parts_disagree_is_refused(field, value, message):
    """One position for all tokens would broadcast, and train something else."""
    with pytest.raises(ValueError, match=message):
        replace(batch(), **{field: value})
