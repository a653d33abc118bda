"""Plain values (dicts, lists, numbers, strings) into typed dataclasses, with nothing guessed.

Hydra takes `+key=1` for any key, a string for a number, and in some versions `true` for a whole number. Here the
dataclass decides: each key must be a field, each field must be there, each value must be of the field's type as it
stands. Errors are one line: the key from the root, the value, what would be legal, the nearest name.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from megalite.models.config import check_choices

MEANING = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string"}


class ConfigError(ValueError):
    """What the command line asks for cannot be; one line that names the key, the value and the way out."""


def build(kind: Any, value: Any, key: str = "") -> Any:
    """`value` as `kind`: a dataclass, list[...], bool, int, float, str, or a union with null.

    Dataclasses in a union are told apart by their model_type. key: where the value stands, dotted from the
    root. Raises ValueError in one line that names it.
    """
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _build_union(get_args(kind), value, key)
    if is_dataclass(kind):
        return _build_dataclass(kind, value, key)
    if origin is list:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{key}={_show(value)} must be a list, such as {key}=[...]")
        entries = enumerate(_with_defaults(get_args(kind)[0], entry) for entry in value)
        return [build(get_args(kind)[0], entry, f"{key}[{place}]") for place, entry in entries]
    return _build_scalar(kind, value, key)


def flatten(values: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    """Nested dicts as (dotted key, value) pairs; a list counts as one value."""
    if not isinstance(values, dict):
        yield key, values
        return
    for name, value in values.items():
        yield from flatten(value, f"{key}.{name}" if key else str(name))


def nearest(word: str, words: Iterable[str]) -> str:
    """`; did you mean X?`, or all the words where nothing is near; made to end a message."""
    known = sorted(set(words))
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; take one of {', '.join(known)}"


def unknown_key(key: str, legal: Iterable[str]) -> str:
    """The refusal of a dotted key that is none of the `legal` ones: what is near, of that name, or there."""
    legal = sorted(set(legal))
    path, dot, leaf = key.rpartition(".")
    siblings = sorted({other[len(path + dot) :].split(".")[0] for other in legal if other.startswith(path + dot)})
    near = [f"{path}{dot}{name}" for name in difflib.get_close_matches(leaf, siblings, n=1)]
    near = near or [other for other in legal if other.rpartition(".")[2] == leaf]
    hint = f"did you mean {' or '.join(near)}?" if near else f"{path or 'the top level'} has {', '.join(siblings)}"
    return f"{key} is no key of the configuration; {hint}"


def _build_union(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    if type(None) in kinds and value is None:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if len(kinds) == 1:
        return build(kinds[0], value, key)
    by_type = {kind().model_type: kind for kind in kinds}
    chosen = value.get("model_type") if isinstance(value, dict) else None
    if chosen not in by_type:
        raise ValueError(f"{key}.model_type={_show(chosen)} is unknown; take one of {', '.join(by_type)}")
    return build(by_type[chosen], value, key)


def _build_dataclass(kind: Any, values: Any, key: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(
            f"{key}={_show(values)} is a group of keys; set {key}.{fields(kind)[0].name} and its neighbours"
        )
    hints = get_type_hints(kind)
    dot = f"{key}." if key else ""
    for name in values:
        if name not in hints:
            raise ValueError(unknown_key(f"{dot}{name}", (f"{dot}{known}" for known in hints)))
    for name in hints:
        if name not in values:
            raise ValueError(f"{dot}{name} is missing; give it a value")
    built = kind(**{name: build(hints[name], values[name], f"{dot}{name}") for name in hints})
    check_choices(built, key)
    return built


def _with_defaults(kind: Any, entry: Any) -> Any:
    """Hydra has no schema to fill an entry of a list from: its fields' defaults are filled in here."""
    if not (is_dataclass(kind) and isinstance(entry, dict)):
        return entry
    return {f.name: f.default for f in fields(kind) if f.default is not MISSING} | entry


def _build_scalar(kind: Any, value: Any, key: str) -> Any:
    if kind is str and type(value) in (int, float):
        return str(value)  # a directory called 2024 is written without quotes
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{key}={_show(value)} must be {MEANING[kind]}{_hint(kind, value)}")
    return value


def _hint(kind: type, value: Any) -> str:
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind in (int, float) and isinstance(value, str):
        return f", and is the string {value!r}"
    return ""


def _show(value: Any) -> str:
    """As YAML and Hydra write it."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or type(value) is bool else str(value)
