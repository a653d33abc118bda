"""Hydra's side of a run: from a command line to a plain configuration, on many ranks at once.

What Hydra does alone is made for one process: it reports an error on every rank, in several lines, and lets each rank
write log files. Here its errors become one line that names the nearest key or choice, ranks other than 0 are silent
until the job begins, and the schema's plain values are what overrides are checked against.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ConfigTypeError, OmegaConfBaseException

from megalite.models.config import GPTConfig, MLPConfig
from megalite.train.config import schema
from megalite.train.streams import Silence
from megalite.train.strict import ConfigError, flatten, nearest, unknown_key


def compose(job: Callable[[dict[str, Any]], None], *, folder: Path, name: str, rank: int) -> None:
    """Run `job` on what the command line makes of folder/name.yaml: once, or with -m once for each combination.

    Relative data.paths are taken from where the command was typed; out_dir comes absolute, with -m one for each job.
    Raises ConfigError where Hydra refuses the command line; what the job raises passes through as it is.
    """
    register(rank)
    silence = Silence(held=rank != 0)

    def task(composed: DictConfig) -> None:
        try:
            values = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
            _require_one_choice(folder)
            _place_paths(values)
            with silence.broken():
                job(values)
        except Exception as error:
            raise _JobFailed from error

    try:
        with silence.over_streams():
            hydra.main(version_base="1.3", config_path=str(folder), config_name=name)(task)()
    except _JobFailed as failed:
        cause = cast(Exception, failed.__cause__)
        if isinstance(cause, OmegaConfBaseException):
            raise ConfigError(one_line(cause)) from cause
        raise cause from None
    except Exception as error:
        raise ConfigError(one_line(error)) from error


def register(rank: int) -> None:
    """Tell Hydra the schema, and OmegaConf the resolvers ${by_rank:on rank 0,on others} and ${folder:path}."""
    store = ConfigStore.instance()
    store.store(name="schema", node=schema())
    for config in (GPTConfig(), MLPConfig()):
        store.store(group="model/schema", name=config.model_type, node=asdict(config))
    # --help copies the whole store once for each of Hydra's groups. Sharing is safe: it copies what it gives out.
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    OmegaConf.register_new_resolver("folder", _folder, replace=True)
    OmegaConf.register_new_resolver("by_rank", lambda first, others: others if rank else first, replace=True)


def one_line(error: Exception) -> str:
    """What Hydra or OmegaConf has to say, in one line, with the nearest legal name."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={choice} is unknown{nearest(choice, error.options)}"
    cause = error.__cause__
    if refusal := _refusal_within(error):
        return str(refusal)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        key, legal = str(cause.full_key or cause.key), _legal_keys()
        if key in legal:
            return f"{key} is a key of another kind of model; leave it out, or choose that model with model=..."
        return unknown_key(key, legal)
    if isinstance(cause, ConfigTypeError) and cause.object_type is list:
        return f"{cause.full_key} must be a list, such as {cause.full_key}=[...]"
    said = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, OverrideParseException):
        return f"{error.override} is not understood: {said}"
    if isinstance(error, OSError):
        return f"out_dir: {said}"
    return said or type(error).__name__


def _folder(out_dir: object) -> str:
    """out_dir as Hydra takes it, before Hydra makes it. An empty one would be wherever the command was typed."""
    if out_dir is None or not str(out_dir).strip():
        shown = "null" if out_dir is None else str(out_dir).strip()
        raise ConfigError(f"out_dir={shown} names no folder; take a path such as out_dir=runs/mine")
    return str(out_dir)


def _refusal_within(error: BaseException | None) -> ConfigError | None:
    """The ConfigError that an OmegaConf error was made from, if there is one."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return error


def _legal_keys() -> list[str]:
    models = [asdict(config) for config in (GPTConfig(), MLPConfig())]
    return [key for values in (schema(), *({"model": model} for model in models)) for key, _ in flatten(values)]


def _require_one_choice(folder: Path) -> None:
    """Of each group: Hydra takes a list and lets the last of it win. Experiments may be several."""
    config = HydraConfig.get()
    for group in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        if group not in ("experiment", "hydra") and group not in config.runtime.choices:
            said = next((one for one in config.overrides.task if one.lstrip("+~").startswith(group)), group)
            raise ConfigError(f"{said} is not one choice; take {group}=... with one of them")


def _place_paths(values: dict[str, Any]) -> None:
    """Hydra may have changed the directory, and with -m each job has an out_dir of its own."""
    runtime = HydraConfig.get().runtime
    values["out_dir"] = runtime.output_dir
    data = values.get("data")
    if os.getcwd() == runtime.cwd or not isinstance(data, dict):
        return
    phases = data.get("phases")
    for group in (data, *(phases if isinstance(phases, list) else ())):
        for key in ("paths", "validation_paths"):
            if isinstance(group, dict) and isinstance(group.get(key), list):
                group[key] = [os.path.join(runtime.cwd, str(path)) for path in group[key]]


class _JobFailed(BaseException):
    """Carries the job's own exception, as its cause, past Hydra, which handles and reports an Exception itself."""
