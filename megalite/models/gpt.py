"""One decoder-only transformer: GPT-2, Llama, Qwen and OLMo are values of its config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalite.layers.cross_entropy import linear_cross_entropy
from megalite.layers.dropout import DropoutKey, dropout
from megalite.layers.embedding import LearnedPositions, VocabParallelEmbedding, padded_size
from megalite.layers.linear import Enter, parallel_linear
from megalite.layers.recompute import Recompute
from megalite.layers.rotary import Rotary
from megalite.mesh import Axis, Mesh
from megalite.models.block import NO_RECOMPUTE, Block, BlockInputs, Setting, stream_norm
from megalite.models.config import GPTConfig
from megalite.models.microbatch import Microbatch
from megalite.models.part import Part
from megalite.spec import ParallelModule, ParamSpec, normal


@dataclass(frozen=True)
class LossOptions:
    """z_loss: weight of logsumexp^2. label_smoothing: in [0, 1). chunk_tokens: logits of so many tokens at a time."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    chunk_tokens: int | None = None


class Head(ParallelModule):
    """The output layer: hidden to logits over the vocabulary, cut over tp, or to the loss, for which they never live at
    once. Its weight may be the embedding's."""

    def __init__(self, config: GPTConfig, setting: Setting, *, tied_to: VocabParallelEmbedding | None = None) -> None:
        super().__init__()
        self.vocab_size, self.tp, self.sequence_parallel = config.vocab_size, setting.tp, setting.sequence_parallel
        if tied_to is not None:
            self.weight, self.specs["weight"] = tied_to.weight, tied_to.specs["weight"]
            return
        shape = (config.vocab_size, config.hidden_size)
        pad = {0: padded_size(config.vocab_size, setting.tp.size)}
        spec = ParamSpec(shape, normal(config.initializer_range), cut={setting.tp: 0}, pad=pad, matrices=None)
        self.weight = self.declare("weight", spec, device=setting.device, dtype=setting.dtype)

    def forward(self, x: Tensor, labels: Tensor | None = None, options: LossOptions | None = None) -> Tensor:
        """(batch, seq[/tp], hidden) -> this rank's logits (batch, seq, padded vocab/tp).

        With labels, (batch, seq): the sum of the loss over those that count, a scalar, equal on all ranks of tp.
        """
        if labels is None:
            enter: Enter = "all_gather" if self.sequence_parallel else "copy"
            return parallel_linear(x, self.weight, tp=self.tp, enter=enter, leave="cut")
        options = options or LossOptions()
        return linear_cross_entropy(
            x,
            self.weight,
            labels,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            vocab_size=self.vocab_size,
            chunk_tokens=options.chunk_tokens,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
        )


class GPT(nn.Module):
    """Embedding, Blocks, a last norm and the head, cut over mesh.tp; on one rank (mesh None) the plain model.

    `model(None, microbatch)` gives the sum of the loss over this rank's valid tokens, a scalar, equal on all ranks of
    tp; divide it by the valid tokens of the whole global batch. In evaluation z-loss and label smoothing are left out.
    `logits` gives this rank's columns of the logits.
    sequence_parallel: activations between the parallel linears are cut along the sequence over tp.
    seed: of dropout. device, dtype: of the parameters; on "meta" `init_parameters` or `Zero(seed=...)` makes them.

    part: what of the model this is, a pipeline stage; None = all. Only what it needs is made, under the names of the
    whole model; (activation | None, microbatch) -> activation (batch, seq[/tp], hidden), or the loss on the last.
    tie, embedding: for `megalite.models.build.stages`, where tied weights lie on two stages: the axis that joins the
    ranks of these, and the first stage's module where this, the last one, is on its rank.
    Raises ValueError, naming the config key, for a config that cannot be or that tp cannot cut.
    """

    embedding: VocabParallelEmbedding | None
    positions: LearnedPositions | None
    rotary: Rotary | None
    norm: nn.Module | None
    head: Head | None

    def __init__(
        self,
        config: GPTConfig,
        *,
        mesh: Mesh | None = None,
        sequence_parallel: bool = False,
        recompute: Recompute | None = None,
        loss: LossOptions | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        part: Part | None = None,
        tie: Axis | None = None,
        embedding: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        mesh = mesh or Mesh.build()
        setting = Setting(mesh, sequence_parallel, recompute or NO_RECOMPUTE, seed, device, dtype)
        config.validate()
        config.validate_cut(mesh.tp.size, sequence_parallel=False, seq_len=1)
        self.config, self.setting, self.loss_options = config, setting, loss or LossOptions()
        self.part = part = part or Part(range(config.num_hidden_layers))
        tied = config.tie_word_embeddings
        if tied and part.is_first != part.is_last and tie is None:
            raise ValueError(
                "model.tie_word_embeddings=true ties the first and the last stage: build them by megalite.models.stages"
            )
        self.embedding = self.positions = self.rotary = self.norm = self.head = None
        if part.is_first or (part.is_last and tied):
            # On a last stage it is not called: it gives the weight that the head reads its name in the whole model.
            self.embedding = embedding or _embedding(config, setting, tie)
        if part.is_first and config.position_embedding_type == "absolute":
            self.positions = _positions(config, setting)
        if part.layers and config.position_embedding_type == "rope":
            self.rotary = Rotary(config.dim_per_head, config.rope_theta, scaling=config.rope_scaling)
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer, setting) for layer in part.layers})
        if part.is_last:
            self.norm = stream_norm(config, setting)
            self.head = Head(config, setting, tied_to=self.embedding if tied else None)

    def forward(self, activation: Tensor | None, microbatch: Microbatch) -> Tensor:
        x = self.hidden(activation, microbatch)
        if self.head is None:
            return x
        options = self.loss_options
        if not self.training:  # evaluation reports the plain loss
            options = replace(options, label_smoothing=0.0, z_loss=0.0)
        return self.head(x, microbatch.labels, options)

    def logits(self, microbatch: Microbatch, activation: Tensor | None = None) -> Tensor:
        """This rank's columns of the logits, (batch, seq, padded vocab/tp); padded columns mean nothing."""
        assert self.head is not None, "the last stage has the logits"
        return self.head(self.hidden(activation, microbatch))

    def hidden(self, activation: Tensor | None, microbatch: Microbatch) -> Tensor:
        """What the head reads: the last norm's output, (batch, seq[/tp], hidden); of a part what the next reads."""
        setting = self.setting
        key = DropoutKey(setting.seed, microbatch.step, microbatch.sample_ids, microbatch.positions)
        local_key = key.part(setting.tp) if setting.sequence_parallel else key
        x = self._embed(microbatch, local_key) if activation is None else activation
        rotary = None if self.rotary is None else self.rotary(microbatch.positions, x.dtype)
        inputs = BlockInputs(rotary, key, local_key, microbatch.documents)
        for block in self.blocks.values():
            x = block(x, inputs)
        return x if self.norm is None else self.norm(x)

    def _embed(self, microbatch: Microbatch, local_key: DropoutKey) -> Tensor:
        if not self.part.is_first or self.embedding is None:
            raise ValueError(
                f"the stage of layers {list(self.part.layers)} is not the first: it takes an activation, not None"
            )
        x = self.embedding(microbatch.tokens)
        if self.positions is not None:
            x = self.positions(x, local_key.positions)
        pdrop = self.config.embd_pdrop if self.training else 0.0
        return dropout(x, pdrop, key=local_key, layer=0, site="embedding")


def _embedding(config: GPTConfig, setting: Setting, tie: Axis | None) -> VocabParallelEmbedding:
    """tie: joins the two ranks that have it, of which one has the gradients of the tokens and one those of the head."""
    embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **_table(config, setting))
    if tie is not None:
        embedding.specs["weight"] = replace(embedding.specs["weight"], partial=(tie,))
    return embedding


def _positions(config: GPTConfig, setting: Setting) -> LearnedPositions:
    return LearnedPositions(config.max_position_embeddings, config.hidden_size, **_table(config, setting))


def _table(config: GPTConfig, setting: Setting) -> dict[str, Any]:
    """How a table of vectors is made."""
    return {
        "init": normal(config.initializer_range),
        "tp": setting.tp,
        "sequence_parallel": setting.sequence_parallel,
        "device": setting.device,
        "dtype": setting.dtype,
    }
