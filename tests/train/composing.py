"""What the command line would compose, without a command line."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from megalite.train.compose import register

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


def composed(*overrides: str) -> DictConfig:
    """configs/train.yaml under these overrides, as Hydra gives it to the trainer."""
    register(rank=0)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", list(overrides))
