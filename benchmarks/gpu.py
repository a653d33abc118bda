"""What only a GPU can show, on one GPU: the law in low precision, step time and MFU. At most 3 minutes a part.

    python benchmarks/gpu.py                        all parts
    python benchmarks/gpu.py --parts linear         one of them

- linear: two ranks on Gloo share the device: tensor parallelism, with and without sequence parallelism, equals one
  rank; then one rank on NCCL trains the model of configs/model/llama-0.5b.yaml in bfloat16 (float32 masters, AdamW).
- zero: two ranks on Gloo share the device: stages 1 to 3 against stage 0, their memory and the time of a step.
- pipeline: two ranks on Gloo share the device: schedules, split backward among them, against one process.

MFU = FLOPs of the model / time / the device's peak. FLOPs of a token: 6N + 12 L h s (PaLM, arXiv:2204.02311, appendix
B): N parameters without the embedding table, whose look-up multiplies nothing; L layers, h = heads x head_dim, s the
sequence. Attention counts in full, though causal attention needs half of it, as PaLM, Megatron-LM and torchtitan do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn

from benchmarks import gpu_pipeline, gpu_zero, harness
from benchmarks.work import Work, partial_parameters, sum_gradients
from megalite.comm import start_all_reduce
from megalite.mesh import Layout, Mesh
from megalite.models.config import GPTConfig
from megalite.models.gpt import GPT, Block
from megalite.spec import init_parameters, param_specs
from megalite.train.config import OptimConfig
from megalite.train.optim import optimizer
from megalite.zero import Zero
from tests.ranks import run

ROOT = Path(__file__).parents[1]
SEED = 0
PART_SECONDS = 180
# Dense bfloat16, as the makers publish it (collected in github.com/stas00/ml-engineering, compute/accelerator).
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100": 989.4,
    "H200": 989.4,
    "H800": 989.4,
    "B200": 2250.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "MI250X": 383.0,
    "MI300X": 1300.0,
}


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a device by its name, None if the table lacks it; PCIe cards are slower than their name says."""
    names = [name for name in PEAK_TFLOPS if name in device_name.replace(" ", "")]
    slower = any(card in device_name.upper() for card in ("PCI", "NVL"))
    return 1e12 * PEAK_TFLOPS[max(names, key=len)] if names and not slower else None


def token_flops(config: GPTConfig, *, parameters: int, seq: int) -> float:
    """Forward and backward of one token: 6N + 12 L h s. parameters: all; those of the embedding table are taken off."""
    matmul = parameters - config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * config.num_attention_heads * config.dim_per_head * seq
    return 6 * matmul + 12 * attention


# ---- the law


class Error(NamedTuple):
    """Against one rank in float32: |loss - its| / its, and the largest over parameters of max |g - its| / max |its|."""

    loss: float
    gradient: float


def backward(
    work: Work, mesh: Mesh, *, dtype: torch.dtype, device: str, sequence_parallel: bool
) -> tuple[Tensor, nn.Module]:
    """One forward and backward; the loss, and the model with its gradients, final."""
    model = GPT(work.config, mesh=mesh, sequence_parallel=sequence_parallel, device="meta", dtype=dtype)
    init_parameters(model, SEED, device=device)
    loss = model(None, work.microbatch(device=device)) / work.tokens
    loss.backward()
    sum_gradients(partial_parameters(model, mesh.tp), mesh.tp)
    return loss.detach(), model


def law(work: Work, device: str) -> dict[str, Error]:
    """Runs on every rank of a tensor axis: name of dtype and layout -> how far it is from one rank in float32."""
    mesh, alone = Mesh.build(Layout(tp=dist.get_world_size())), Mesh(Layout(), 0)
    reference_loss, reference = backward(work, alone, dtype=torch.float32, device=device, sequence_parallel=False)
    whole = {name: parameter.grad for name, parameter in reference.named_parameters()}
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        for layout, sequence_parallel in (("one rank", False), ("tp", False), ("tp + sp", True)):
            on = alone if layout == "one rank" else mesh
            loss, model = backward(work, on, dtype=dtype, device=device, sequence_parallel=sequence_parallel)
            worst = torch.zeros(2, dtype=torch.float64)
            worst[0] = abs(loss.double() - reference_loss.double()) / abs(reference_loss.double())
            for (name, spec), parameter in zip(param_specs(model).items(), model.parameters(), strict=True):
                expected, gradient = whole[name], parameter.grad
                assert expected is not None and gradient is not None
                valid = spec.valid_box()
                off = (gradient[valid].float() - expected[_in_logical(spec.box(), spec.shape)]).abs().max()
                worst[1] = max(worst[1], (off / expected.abs().max()).double().cpu())
            name = f"{str(dtype).removeprefix('torch.')}, {layout}"
            errors[name] = Error(*start_all_reduce(worst, mesh.world, op="max").wait().tolist())
    return errors


def _in_logical(box: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """A box of the padded tensor without its padding."""
    return tuple(slice(min(part.start, size), min(part.stop, size)) for part, size in zip(box, shape, strict=True))


def bounds(errors: dict[str, Error]) -> dict[str, Error]:
    """What is allowed: in float32 sums in another order; in bfloat16 twice what rounding alone does on one rank."""
    rounding = errors["bfloat16, one rank"]
    low = Error(2 * rounding.loss + 1e-3, 2 * rounding.gradient)
    return {name: low if name.startswith("bfloat16") else Error(1e-5, 1e-3) for name in errors}


def report_law(errors: dict[str, Error]) -> str:
    """As a table. Raises SystemExit, after printing it, where an error is out of bounds."""
    allowed = bounds(errors)
    rows = [
        (name, f"{e.loss:.1e}", f"{allowed[name].loss:.1e}", f"{e.gradient:.1e}", f"{allowed[name].gradient:.1e}")
        for name, e in errors.items()
    ]
    text = harness.table(("against one rank in float32", "loss", "allowed", "gradients", "allowed"), rows)
    broken = [n for n, e in errors.items() if not (e.loss <= allowed[n].loss and e.gradient <= allowed[n].gradient)]
    if broken:
        raise SystemExit(f"{text}\nThe law does not hold for: {'; '.join(broken)}")
    return text + "\nlargest relative differences; allowed in bfloat16: twice what rounding does on one rank"


# ---- speed


class Speed(NamedTuple):
    """One training step: median seconds, parameters, and the most bytes that torch had on the device."""

    seconds: float
    parameters: int
    peak_bytes: int
    device_name: str


def train(work: Work, device: str, steps: int, seconds: float) -> Speed:
    """Runs on the one rank. Steps of `Zero` stage 0 in bfloat16: 3 to warm up, then `steps`, fewer after `seconds`."""
    mesh = Mesh.build(Layout())
    model = GPT(work.config, mesh=mesh, device="meta", dtype=torch.bfloat16)
    zero = Zero(model, mesh, stage=0, units=(Block,), optimizer=optimizer(OptimConfig()), seed=SEED, device=device)
    microbatch = work.microbatch(device=device)
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) < steps + 3 and (len(taken) < 4 or time.perf_counter() - begun < seconds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        zero.begin(microbatches=1)
        (model(None, microbatch) / work.tokens).backward()
        zero.step(max_norm=1.0)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = torch.cuda.get_device_name(device)
    return Speed(statistics.median(taken[3:]), parameters, torch.cuda.max_memory_allocated(device), name)


def report_speed(found: Speed, work: Work) -> str:
    flops = token_flops(work.config, parameters=found.parameters, seq=work.seq) * work.tokens
    peak = peak_flops(found.device_name)
    ideal = ["?", "?"] if peak is None else [f"{1e3 * flops / peak:.1f}", f"{flops / peak / found.seconds:.3f}"]
    row = (
        f"{found.parameters / 1e9:.2f}B, {work.batch} x {work.seq} tokens",
        f"{work.tokens / found.seconds:.0f}",
        f"{1e3 * found.seconds:.1f}",
        *ideal,
        f"{flops / found.seconds / 1e12:.1f}",
        f"{found.peak_bytes / 1e9:.1f}",
    )
    header = ("train, bfloat16, one rank on NCCL", "tokens/s", "step ms", "ms at peak", "MFU", "TFLOP/s", "peak GB")
    return harness.table(header, [row]) + "\nFLOPs: 6N + 12 L h s a token; MFU: ms at peak / step ms"


def linear(options: argparse.Namespace) -> None:
    """The part `linear`."""
    small = GPTConfig(
        vocab_size=1001,  # padded: no tensor axis divides it
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    errors = run(law, 2, Work(small, 4, 128), "cuda:0", start="spawn", checked=False, timeout=PART_SECONDS / 2)[0]
    print(report_law(errors), flush=True)
    work = Work(model_config("llama-0.5b"), options.batch, options.seq)
    budget = PART_SECONDS / 4
    found = run(
        train, 1, work, "cuda:0", options.steps, budget, backend="nccl", checked=False, timeout=PART_SECONDS / 2
    )[0]
    print("\n" + report_speed(found, work), flush=True)


def model_config(preset: str) -> GPTConfig:
    """A file of configs/model/, which holds what differs from the defaults."""
    values = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "model" / f"{preset}.yaml"))
    assert isinstance(values, dict)
    return GPTConfig(**{str(key): value for key, value in values.items() if key != "defaults"})


def zero(options: argparse.Namespace) -> None:
    """The part `zero`. float32: sums in another order; bfloat16: gradients of eight bits, over some steps."""
    work = Work(LARGE, options.batch, min(options.seq, 512))
    for dtype, allowed in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        call = (work, "cuda:0", options.steps, dtype)
        found = run(gpu_zero.train, 2, *call, start="spawn", checked=False, timeout=PART_SECONDS / 2)[0]
        print("\n" + gpu_zero.report(found, dtype=dtype, allowed=allowed), flush=True)


def pipeline(options: argparse.Namespace) -> None:
    """The part `pipeline`. float32: sums in another order; bfloat16: gradients of eight bits."""
    work = Work(LARGE, options.batch, min(options.seq, 512))
    for dtype, allowed in ((torch.float32, (1e-5, 1e-3)), (torch.bfloat16, (2e-2, 5e-2))):
        call = (work, "cuda:0", options.steps, dtype)
        found = run(gpu_pipeline.train, 2, *call, start="spawn", checked=False, timeout=PART_SECONDS / 2)[0]
        print("\n" + gpu_pipeline.report(found, dtype=dtype, allowed=allowed), flush=True)


PARTS = {"linear": linear, "zero": zero, "pipeline": pipeline}
LARGE = GPTConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=16,
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batch", type=int, default=8, help="sequences of the timed step")
    parser.add_argument("--seq", type=int, default=2048, help="their length")
    parser.add_argument("--steps", type=int, default=20, help="timed steps, at most")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("No GPU here: torch.cuda.is_available() is False, so there is nothing to measure.")
        return
    torch.set_num_threads(1)  # of this process, whose ranks run the same
    for part in options.parts:
        PARTS[part](options)


if __name__ == "__main__":
    main()
