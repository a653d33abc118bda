"""From parts to the stages of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.mesh import Mesh
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.gpt import GPT
from megalite.models.mlp import MLP
from megalite.models.part import Part, require_placed


def stages(
    config: GPTConfig | MLPConfig,
    parts: Mapping[int, Part],
    *,
    mesh: Mesh,
    rank_of: Sequence[int] | None = None,
    **how: Any,
) -> dict[int, GPT] | dict[int, MLP]:
    """This rank's stages of a model, by number: GPTs or MLPs that hold these parts, built with `how`.

    rank_of: stage -> the rank of mesh.pp that holds it, of all stages (a schedule's `rank_of`); None = one stage a
    rank. Tied weights on one rank are one Parameter, also in the two stages' state_dicts; on two ranks each has a
    parameter embedding.weight, a summand over `mesh.joins`. Every rank calls it, since that makes a process group.
    Parameters are made by `Zero` or, all stages in one call, by `init_parameters`.
    Raises ValueError where `parts` are not the stages that rank_of gives this rank.
    """
    rank_of = range(mesh.pp.size) if rank_of is None else rank_of
    require_placed(parts, rank_of, rank=mesh.pp.rank)
    if isinstance(config, MLPConfig):
        return {stage: MLP(config, mesh=mesh, part=parts[stage], **how) for stage in sorted(parts)}
    tie = mesh.joins(rank_of[0], rank_of[-1]) if config.tie_word_embeddings else None
    built: dict[int, GPT] = {}
    for stage in sorted(parts):
        shared = built[0].embedding if config.tie_word_embeddings and 0 in built else None
        built[stage] = GPT(config, mesh=mesh, part=parts[stage], tie=tie, embedding=shared, **how)
    return built
