"""The shapes of models: plain values under Hugging Face's key names, no torch.

The same dataclasses are the `model` part of the trainer's schema, so each default stands here and nowhere else; the
presets in configs/model/ hold what differs. `validate` looks at a model alone, `validate_cut` at a model on a layout;
both raise ValueError in one line that names the config key (`model.<name>`), the numbers and what would be legal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

NORM_EPS = 1e-5


def one_of(default: str, *others: str) -> Any:
    """A string field that takes `default` or one of `others`: how the schema says a choice, read by `check_choices`."""
    return field(default=default, metadata={"choices": (default, *others)})


def check_choices(config: Any, prefix: str) -> None:
    """Raise ValueError for a field declared by `one_of` whose value is none of its choices."""
    for f in fields(config):
        choices = f.metadata.get("choices")
        if choices and getattr(config, f.name) not in choices:
            legal = ", ".join(choices)
            key = f"{prefix}.{f.name}" if prefix else f.name
            raise ValueError(f"{key}={getattr(config, f.name)} is unknown; take one of {legal}")


def check_positive(config: Any, names: tuple[str, ...]) -> None:
    """Raise ValueError for a field among `names` that is neither null nor above 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"model.{name}={value} must be above 0")


def divisors(*numbers: int) -> list[int]:
    """All d >= 1 that divide every one of `numbers`, ascending."""
    return [d for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers)]


@dataclass
class RopeScaling:
    """How rotary frequencies are changed for a longer context than a model was first trained on.

    rope_type: none; linear (position / factor: arXiv:2306.15595); llama3 (low frequencies divided by `factor`, high
    ones kept, a ramp between: Llama 3.1's); yarn (the same idea with a ramp in rotations, `beta_fast` to `beta_slow`,
    and a temperature on attention: arXiv:2309.00071).
    factor: the stretch of the context, >= 1.
    original_max_position_embeddings: the context before the stretch, in tokens; llama3 and yarn measure by it.
    low_freq_factor, high_freq_factor (llama3): wavelengths above original / low are stretched, those below
    original / high kept.
    beta_fast, beta_slow (yarn): dims that turn more often than beta_fast within the original context are kept, those
    that turn less often than beta_slow are stretched.
    attention_factor (yarn): multiplies cos and sin; null = 0.1 ln(factor) + 1, the paper's, or, with mscale and
    mscale_all_dim given, (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), DeepSeek's.
    truncate (yarn): the ramp's ends are rounded outwards to whole dims.
    """

    rope_type: str = one_of("none", "linear", "llama3", "yarn")
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def validate(self) -> None:
        """Raise ValueError for values that do not go together."""
        key = "model.rope_scaling"
        check_choices(self, key)
        if self.rope_type == "none" and self.factor != 1:
            raise ValueError(
                f"{key}.factor={self.factor} does nothing while {key}.rope_type=none; take linear, llama3 or yarn"
            )
        if self.factor < 1:
            raise ValueError(f"{key}.factor={self.factor} must be at least 1")
        original = self.original_max_position_embeddings
        if self.rope_type in ("llama3", "yarn") and (original is None or original < 1):
            raise ValueError(
                f"{key}.original_max_position_embeddings={original} must be the context length before scaling, "
                f"at least 1, with {key}.rope_type={self.rope_type}"
            )
        if self.rope_type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"{key}.low_freq_factor={self.low_freq_factor} must be above 0 and below "
                f"{key}.high_freq_factor={self.high_freq_factor}"
            )
        if self.rope_type == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"{key}.beta_slow={self.beta_slow} must be above 0 and below {key}.beta_fast={self.beta_fast}"
            )
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise ValueError(f"{key}.attention_factor={self.attention_factor} must be above 0")


@dataclass
class GPTConfig:
    """A decoder-only transformer: GPT-2, Llama 2 and 3, Qwen 2 and 3, OLMo 1 and 2 (dense), and what lies between.

    Sizes: vocab_size, hidden_size, intermediate_size (width of the MLP's inside), num_hidden_layers;
    num_attention_heads query heads that share num_key_value_heads key and value heads (null = as many); head_dim
    (null = hidden_size / num_attention_heads); max_position_embeddings, the longest sequence in tokens.
    MLP: hidden_act and is_gated_act: down(act(gate x) * up x) if gated (silu: SwiGLU), else down(act(up x)).
    gelu_new is another name of gelu_pytorch_tanh.
    Norm: norm_type with rms_norm_eps or layer_norm_epsilon; layernorm_nonparametric has no weight (OLMo 1).
    norm_placement: pre = x + f(norm x); post = x + norm(f x): what a sublayer gives is normalised before it is added
    (OLMo 2).
    Positions: rope (rope_theta, rope_scaling) or absolute (a learned vector for each position, GPT-2).
    Attention: attention_bias on q, k, v; attention_out_bias on the output (null = as attention_bias; Qwen 2 has the
    first alone); qk_norm over each head (head, Qwen 3) or over all heads at once (full, OLMo 2), of norm_type;
    clip_qkv clamps q, k, v to +-value (OLMo 1); sliding_window: a query sees that many tokens, itself the last;
    layer_types names each layer full_attention or sliding_attention (null: all sliding if there is a window, else all
    full); attn_implementation: sdpa (torch's fused kernels) or eager (explicit softmax).
    Weights: tie_word_embeddings (output weight = embedding), initializer_range (std of every matrix),
    residual_init_scaled (the two projections that write into the residual get std / sqrt(2 layers), GPT-2).
    Dropout: embd_pdrop, resid_pdrop (each sublayer's output), attention_dropout (probabilities; eager only).
    """

    model_type: str = one_of("gpt")
    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048

    hidden_act: str = one_of("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
    is_gated_act: bool = True
    mlp_bias: bool = False

    norm_type: str = one_of("rmsnorm", "layernorm", "layernorm_nonparametric")
    norm_placement: str = one_of("pre", "post")
    rms_norm_eps: float = NORM_EPS
    layer_norm_epsilon: float = NORM_EPS

    position_embedding_type: str = one_of("rope", "absolute")
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)

    attention_bias: bool = False
    attention_out_bias: bool | None = None
    qk_norm: str = one_of("none", "head", "full")
    clip_qkv: float | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    attn_implementation: str = one_of("sdpa", "eager")

    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    residual_init_scaled: bool = False

    embd_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    attention_dropout: float = 0.0

    @property
    def kv_heads(self) -> int:
        """Key and value heads, null resolved."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def dim_per_head(self) -> int:
        """head_dim, null resolved."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def out_bias(self) -> bool:
        """attention_out_bias, null resolved."""
        return self.attention_bias if self.attention_out_bias is None else self.attention_out_bias

    def window(self, layer: int) -> int | None:
        """How many tokens a query of this layer sees, itself included; None = all before it."""
        sliding = self.layer_types is None or self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None

    def validate(self) -> None:
        """Raise ValueError for values that make no model, whatever the layout."""
        check_choices(self, "model")
        self._validate_sizes()
        self._validate_attention()
        self._validate_positions()
        for name in ("embd_pdrop", "resid_pdrop", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be a probability in [0, 1)")
        for name in ("rms_norm_eps", "layer_norm_epsilon", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be above 0")

    def _validate_sizes(self) -> None:
        check_positive(self, ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"))
        check_positive(self, ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"))
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not a multiple of model.num_attention_heads={heads}; "
                f"set model.head_dim, or take heads from {divisors(self.hidden_size)}"
            )
        if heads % self.kv_heads:
            raise ValueError(
                f"model.num_attention_heads={heads} is not a multiple of model.num_key_value_heads={self.kv_heads}; "
                f"take one of {divisors(heads)}"
            )

    def _validate_attention(self) -> None:
        if self.attention_dropout and self.attn_implementation != "eager":
            raise ValueError(
                f"model.attention_dropout={self.attention_dropout} needs model.attn_implementation=eager, not "
                f"{self.attn_implementation}: fused kernels draw their own dropout, which no other layout could repeat"
            )
        check_positive(self, ("clip_qkv", "sliding_window"))
        if self.layer_types is None:
            return
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"model.layer_types has {len(self.layer_types)} entries and model.num_hidden_layers="
                f"{self.num_hidden_layers}; give one to each layer, or null"
            )
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"model.layer_types has {min(unknown)}; take full_attention or sliding_attention")
        sliding = "sliding_attention" in self.layer_types
        if sliding != (self.sliding_window is not None):
            raise ValueError(
                f"model.sliding_window={self.sliding_window} and model.layer_types with "
                f"{self.layer_types.count('sliding_attention')} sliding_attention entries do not go together"
            )

    def _validate_positions(self) -> None:
        self.rope_scaling.validate()
        if self.position_embedding_type == "absolute" and self.rope_scaling.rope_type != "none":
            raise ValueError(
                f"model.rope_scaling.rope_type={self.rope_scaling.rope_type} needs "
                "model.position_embedding_type=rope, not absolute"
            )
        check_positive(self, ("rope_theta",))
        if self.position_embedding_type == "rope" and self.dim_per_head % 2:
            raise ValueError(
                f"model.head_dim={self.dim_per_head} must be even: rotary positions turn pairs of channels"
            )

    def validate_cut(self, tp: int, *, sequence_parallel: bool, seq_len: int) -> None:
        """Raise ValueError where this model on sequences of seq_len cannot be cut over layout.tp.

        Query heads and the MLP's inside are cut; tp above the key and value heads is legal where each of those then
        serves a whole number of ranks. The vocabulary is padded, so it always fits.
        """
        if seq_len > self.max_position_embeddings:
            raise ValueError(
                f"seq_len={seq_len} is longer than model.max_position_embeddings={self.max_position_embeddings}; "
                "shorten the one or raise the other"
            )
        heads, ffn, kv_heads = self.num_attention_heads, self.intermediate_size, self.kv_heads
        lengths = {"model.num_attention_heads": heads, "model.intermediate_size": ffn}
        if sequence_parallel:
            lengths["seq_len"] = seq_len
        legal = [d for d in divisors(*lengths.values()) if kv_heads % d == 0 or d % kv_heads == 0]
        for key, length in lengths.items():
            if length % tp:
                why = " under layout.sequence_parallel=true" if key == "seq_len" else ""
                raise ValueError(f"{key}={length} cannot be cut over layout.tp={tp}{why}; take layout.tp from {legal}")
        if tp not in legal:
            raise ValueError(
                f"model.num_key_value_heads={kv_heads} is neither a multiple nor a divisor of layout.tp={tp}; "
                f"take layout.tp from {legal}"
            )

    def parameter_count(self) -> int:
        """How many numbers the model learns, tied weights counted once, vocabulary unpadded."""
        hidden, ffn, head_dim = self.hidden_size, self.intermediate_size, self.dim_per_head
        heads, kv_heads = self.num_attention_heads, self.kv_heads
        norm = {"rmsnorm": 1, "layernorm": 2, "layernorm_nonparametric": 0}[self.norm_type]  # vectors in one norm

        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        attention += self.attention_bias * (heads + 2 * kv_heads) * head_dim + self.out_bias * hidden
        attention += norm * {"none": 0, "head": 2 * head_dim, "full": (heads + kv_heads) * head_dim}[self.qk_norm]
        ups = 2 if self.is_gated_act else 1
        mlp = (ups + 1) * hidden * ffn + self.mlp_bias * (ups * ffn + hidden)
        layer = attention + mlp + 2 * norm * hidden

        vocabularies = 1 if self.tie_word_embeddings else 2
        positions = self.max_position_embeddings if self.position_embedding_type == "absolute" else 0
        return (vocabularies * self.vocab_size + positions + norm) * hidden + self.num_hidden_layers * layer


@dataclass
class MLPConfig:
    """The deep MLP on which parallelism is taught: num_hidden_layers times x <- act(x W^T), every W square, no bias.

    It learns to give back the positive part of random vectors of hidden_size, under the mean squared error.
    """

    model_type: str = one_of("mlp")
    hidden_size: int = 1024
    num_hidden_layers: int = 4
    hidden_act: str = one_of("gelu", "silu", "gelu_pytorch_tanh", "gelu_new", "relu")
    initializer_range: float = 0.02

    def validate(self) -> None:
        """Raise ValueError for values that make no model, whatever the layout."""
        check_choices(self, "model")
        check_positive(self, ("hidden_size", "num_hidden_layers", "initializer_range"))

    def validate_cut(self, tp: int, *, sequence_parallel: bool, seq_len: int) -> None:
        """Raise ValueError where the model cannot be cut over layout.tp. It has no sequence."""
        if self.hidden_size % tp:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} cannot be cut over layout.tp={tp}; "
                f"take layout.tp from {divisors(self.hidden_size)}"
            )

    def parameter_count(self) -> int:
        """How many numbers the model learns."""
        return self.num_hidden_layers * self.hidden_size**2
