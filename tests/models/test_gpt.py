"""What a GPT promises beside the layout's law: see test_layout_is_free.py and test_gpt_against_transformers.py."""

from __future__ import annotations

import torch

from megalite.models.config import GPTConfig
from megalite.models.gpt import GPT, LossOptions
from megalite.models.microbatch import Microbatch


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
