"""Which modules have which style, and where each stands: before, in or after a part whose sequence is cut."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

WEIGHTS = ("column", "column_gather", "row", "embedding", "norm", "head_norm")
INPUTS = ("copy", "split_seq", "gather_seq", "join_seq")
LEGAL = ", ".join(("column:N", *WEIGHTS, *INPUTS))

# torch's own modules that hand their children's weights to one fused function, and so would use a part as the whole
UNCUTTABLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Style(NamedTuple):
    """A word, the chunks of `column:N`, and the pattern that gave it."""

    word: str
    chunks: int
    pattern: str

    @classmethod
    def parse(cls, pattern: str, text: str) -> Style:
        word, colon, count = text.partition(":")
        chunks = int(count) if count.isdecimal() else 0
        if word not in (*WEIGHTS, *INPUTS) or (colon and (word != "column" or chunks < 1)):
            raise ValueError(f"style {text!r} of pattern {pattern!r} is unknown; take one of {LEGAL}")
        return cls(word, chunks or 1, pattern)

    @property
    def is_of_input(self) -> bool:
        return self.word in INPUTS

    def __str__(self) -> str:
        return f"{self.word}{f':{self.chunks}' if self.chunks > 1 else ''}, pattern {self.pattern!r}"


@dataclass(eq=False)
class Site:
    """A module with a style for its weights, or for its input, or both.

    owners: every (parent, attribute) that has the module. was_cut, is_cut, stays_cut: whether the sequence is cut when
    it is called, past its own input's style, and after it. entered: whether its input, or that of a module around it,
    was brought whole to ranks that each continue differently, by gather_seq or copy.
    """

    path: str
    module: nn.Module
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    weights: Style | None = None
    inputs: Style | None = None
    was_cut: bool = False
    is_cut: bool = False
    stays_cut: bool = False
    entered: bool = False

    def __str__(self) -> str:
        return f"{self.path} ({'; '.join(str(style) for style in (self.weights, self.inputs) if style)})"


def find_sites(module: nn.Module, styles: Mapping[str, str]) -> list[Site]:
    """All modules that a pattern matches, in order of registration. Raises ValueError, see `parallelize`."""
    named = dict(module.named_modules(remove_duplicate=False))
    sites: dict[int, Site] = {}
    for pattern, text in styles.items():
        style = Style.parse(pattern, text)
        for path in matches(pattern, named):
            _refuse_fused(path, style, named)
            site = sites.setdefault(id(named[path]), Site(path, named[path]))
            _give(site, style)
    for path, owned in named.items():
        if id(owned) in sites:
            parent, _, leaf = path.rpartition(".")
            sites[id(owned)].owners.append((named[parent], leaf))
    return _placed(module, sites)


def matches(pattern: str, named: Mapping[str, nn.Module]) -> list[str]:
    """The paths that a pattern matches, * standing for anything, dots too. ValueError if it matches none."""
    found = [path for path in named if path and fnmatchcase(path, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, [path for path in named if path], n=3, cutoff=0)
        raise ValueError(f"pattern {pattern!r} matches no module; near it are {', '.join(near) or 'none: it has none'}")
    return found


def _refuse_fused(path: str, style: Style, named: Mapping[str, nn.Module]) -> None:
    steps = path.split(".")
    for around in (".".join(steps[:length]) for length in range(len(steps) + 1)):
        if isinstance(named[around], UNCUTTABLE):
            raise ValueError(
                f"{path} ({style}): {type(named[around]).__name__} reads its parts' weights without calling them, so "
                "tp cannot cut it; write attention with linears of its own, or leave it whole (Zero shards it as it is)"
            )


def _give(site: Site, style: Style) -> None:
    before = site.inputs if style.is_of_input else site.weights
    if before is not None and before[:2] != style[:2]:
        raise ValueError(f"{site.path} has two styles: {before}, and {style}; make the patterns exclude each other")
    if style.is_of_input:
        site.inputs = before or style
    else:
        site.weights = before or style


def _placed(module: nn.Module, sites: Mapping[int, Site]) -> list[Site]:
    """The sites in order of registration, which is taken to be that of forward: the first step is checked for it."""
    ordered: list[Site] = []
    is_cut, around = False, None
    for path, inner in module.named_modules():
        if around is not None and not path.startswith(f"{around}."):
            around = None
        site = sites.get(id(inner))
        if site is not None:
            ordered.append(site)
            site.was_cut = is_cut
            is_cut = _past_input(site, is_cut, around)
            if site.inputs is not None and site.inputs.word in ("gather_seq", "copy"):
                around = path
            site.entered, site.is_cut = around is not None, is_cut
            if site.weights is not None and site.weights.word == "column_gather":
                is_cut = False
            site.stays_cut = is_cut
        if site is None or site.weights is None:
            _require_annotated(path, inner, is_cut, around)
    return ordered


def _past_input(site: Site, is_cut: bool, around: str | None) -> bool:
    if site.inputs is None:
        return is_cut
    word = site.inputs.word
    if around is not None:
        raise ValueError(f"{site} lies within {around}, whose input was brought in already; take one of the two away")
    if word in ("gather_seq", "join_seq") and not is_cut:
        raise ValueError(f"{site}: no module before it, in order of registration, has the style split_seq")
    if word in ("split_seq", "copy") and is_cut:
        raise ValueError(f"{site}: the sequence is cut here already; end the part before with join_seq")
    return {"split_seq": True, "join_seq": False}.get(word, is_cut)


def _require_annotated(path: str, inner: nn.Module, is_cut: bool, around: str | None) -> None:
    if hasattr(inner, "specs") or not any(True for _ in inner.parameters(recurse=False)):
        return
    if is_cut or around is not None:
        where = f"in {around}" if around is not None else "where the sequence is cut"
        raise ValueError(
            f"{path} has parameters and no style, and stands {where}, where each rank has a summand of their gradients "
            "only: give it norm, column or row, or end that part before it (join_seq)"
        )
