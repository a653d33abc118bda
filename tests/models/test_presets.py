"""The presets in configs/model/ are the models they are named after, and cost nothing until they are given weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.models.config import GPTConfig, RopeScaling
from megalite.models.gpt import GPT
from megalite.spec import param_specs

PRESETS = {
    path.stem: values
    for path in sorted((Path(__file__).parents[2] / "configs/model").glob("*.yaml"))
    if (values := yaml.safe_load(path.read_text())) and "hidden_size" in values
}


def preset(name: str) -> GPTConfig:
    values = {key: value for key, value in PRESETS[name].items() if key != "defaults"}
    return GPTConfig(**values | {"rope_scaling": RopeScaling(**values.get("rope_scaling", {}))})


@pytest.mark.parametrize(
    ("name", "published", "but"),
    [
        ("gpt2", "GPT2Config", {"embd_pdrop", "resid_pdrop"}),
        ("llama2-7b", "LlamaConfig", {"max_position_embeddings", "rms_norm_eps"}),  # the default is the first Llama's
        ("olmo-7b", "OlmoConfig", set()),
    ],
)
def test_a_preset_is_the_published_model_that_hugging_face_has_as_its_default(
    name: str, published: str, but: set[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    ours, theirs = preset(name), getattr(transformers, published)()
    resolved = asdict(ours) | {"num_key_value_heads": ours.kv_heads, "head_dim": ours.dim_per_head}
    shared = {
        key for key in resolved if hasattr(theirs, key) and key not in {"model_type", "attn_implementation", *but}
    } - {"rope_scaling", "rope_theta"}
    assert len(shared) >= 7
    assert {key: resolved[key] for key in shared} == {key: getattr(theirs, key) for key in shared}
    if ours.position_embedding_type == "rope":
        assert ours.rope_theta == (getattr(theirs, "rope_parameters", None) or vars(theirs))["rope_theta"]
    else:
        assert (ours.hidden_act, ours.intermediate_size) == (theirs.activation_function, 4 * theirs.n_embd)


class OffMeta(TorchDispatchMode):
    """Counts the tensors that are made anywhere but on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += [str(func) for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and not leaf.is_meta]
        return out


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_any_size_is_built_on_meta_out_of_nothing_and_has_the_parameters_it_says(name: str) -> None:
    config, off_meta = preset(name), OffMeta()
    with off_meta:
        model = GPT(config, device="meta")
    assert off_meta.made == []
    assert not list(model.buffers())
    assert config.parameter_count() == sum(spec.numel for spec in param_specs(model).values())
    assert config.parameter_count() == sum(parameter.numel() for parameter in model.parameters())
