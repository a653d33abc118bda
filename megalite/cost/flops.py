"""Floating-point operations a token, and the share of a device's peak that a run makes of them (MFU).

The convention is PaLM's (arXiv:2204.02311, appendix B): a multiply and an add are two operations, backward costs twice
forward, so 6 for each parameter and token; work that recomputation repeats is not counted. Two things are said more
exactly than there: N leaves out parameters that are only looked up (the embedding, unless it is the head as well, and
learned positions), and attention counts what a causal mask leaves: half of 12 L heads head_dim s, less under a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalite.models.config import GPTConfig, MLPConfig


def flops_per_token(model: GPTConfig | MLPConfig, *, seq_len: int) -> float:
    """Forward and backward, of one token in a sequence of seq_len; of the deep MLP, of one sample.

    6 N + 12 heads head_dim sum over layers of k, k = w - w^2 / (2 s) keys a query in the mean, w = min(window, s):
    s/2 without a window.
    """
    dense = 6.0 * multiplied_parameters(model)
    if isinstance(model, MLPConfig):
        return dense
    keys = 0.0
    for layer in range(model.num_hidden_layers):
        window = min(model.window(layer) or seq_len, seq_len)
        keys += window - window**2 / (2 * seq_len)
    return dense + 12 * model.num_attention_heads * model.dim_per_head * keys


def multiplied_parameters(model: GPTConfig | MLPConfig) -> int:
    """N: all parameters but those that are only looked up."""
    count = model.parameter_count()
    if isinstance(model, MLPConfig):
        return count
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size
    if model.position_embedding_type == "absolute":
        looked_up += model.max_position_embeddings
    return count - looked_up * model.hidden_size


def mfu(*, flops_per_token: float, tokens_per_second_per_rank: float, peak_tflops: float) -> float:
    """Model FLOPs utilisation: the operations that the model needs in a second over those that the device could do."""
    return flops_per_token * tokens_per_second_per_rank / (peak_tflops * 1e12)


@dataclass(frozen=True)
class Peak:
    """Dense TFLOPS of one device: bf16 and fp16 on the tensor cores; fp32 and fp64 as torch computes them by default.

    fp32 is the vector units' rate, since torch leaves TF32 off; TF32 has half of bf16's. fp64 is the tensor cores'.
    """

    bf16: float
    fp32: float
    fp64: float


# By what torch.cuda.get_device_name() begins with, "NVIDIA " left out; the longest that fits counts. From NVIDIA's data
# sheets of each product, dense rates (those printed there with sparsity, halved).
PEAKS: Mapping[str, Peak] = {
    "A100": Peak(312, 19.5, 19.5),
    "H100": Peak(989, 67, 67),  # SXM5: "NVIDIA H100 80GB HBM3"
    "H100 PCIe": Peak(756, 51, 51),
    "H100 NVL": Peak(835, 60, 60),
    "H200": Peak(989, 67, 67),  # SXM
    "H200 NVL": Peak(835, 60, 60),
    "GH200": Peak(989, 67, 67),
    "B200": Peak(2250, 75, 37),
    "L40S": Peak(362, 91.6, 1.4),
    "L4": Peak(121, 30.3, 0.5),
}


def peak_tflops(device_name: str, precision: str, *, tf32: bool = False) -> float | None:
    """What is known of a device, or None. precision: fp32, bf16, fp16, fp64; tf32: whether fp32 products may use it."""
    name = device_name.removeprefix("NVIDIA ")
    known = [key for key in PEAKS if name == key or name.startswith((f"{key} ", f"{key}-"))]
    if not known:
        return None
    peak = PEAKS[max(known, key=len)]
    if precision == "fp32" and tf32:
        return peak.bf16 / 2
    return {"bf16": peak.bf16, "fp16": peak.bf16, "fp32": peak.fp32, "fp64": peak.fp64}[precision]
