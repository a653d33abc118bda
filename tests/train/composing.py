"""What the command line would compose, without a command line."""

from __future__ import annotations

import functools
from copy import deepcopy
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from megalite.train.compose import register

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


@functools.cache
def choosing(*choices: str) -> dict[str, Any]:
    """configs/train.yaml with <group>=<choice>, composed by Hydra, as plain values. Not to be changed: it is shared."""
    register(rank=0)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        values = OmegaConf.to_container(compose("train", list(choices)))
    assert isinstance(values, dict)
    return values


def composed(*overrides: str, model: str = "gpt-tiny") -> dict[str, Any]:
    """The same under overrides, whose values Hydra parses; to compose anew would take it a fifth of a second each."""
    return changed(choosing(f"model={model}"), *overrides)


def changed(shared: dict[str, Any], *overrides: str) -> dict[str, Any]:
    """Composed values with some of them overridden."""
    values = deepcopy(shared)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        *groups, name = override.key_or_group.split(".")
        node = functools.reduce(lambda inner, group: inner[group], groups, values)
        if override.is_delete():
            del node[name]
        else:
            node[name] = override.value()
    return values
