"""Measures the collectives as nccl-tests does: ours (megalite.comm) and torch.distributed's own, in turn, and a model.

    python benchmarks/collectives.py --ranks 2,4                    starts the ranks here, on Gloo
    torchrun --standalone --nproc-per-node=8 benchmarks/collectives.py --backend nccl --bytes 1e6,1e9

Bytes are those of the full tensor: what a reduce-scatter takes and what an all-gather gives. GB are decimal.

- algbw = bytes / time: how fast the job is done.
- busbw = algbw x factor, the factor being the share of the full tensor that the busiest rank must send: so busbw is
  comparable over primitives and numbers of ranks, and with what the link is sold for.
- model: time = alpha + factor x bytes / beta, fitted over the sizes; alpha is the latency, beta the busbw of long ones.

Source of the factors: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm import (
    ring_shift,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_reduce_scatter,
)
from megalite.comm.start import Started, start
from megalite.mesh import Axis

PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
SIDES = ("ours", "torch")


class Record(NamedTuple):
    """One measurement: seconds is the median over repeats of the slowest rank's time."""

    ranks: int
    backend: str
    dtype: str
    primitive: str
    side: str
    full_bytes: int
    seconds: float


class Model(NamedTuple):
    """time = alpha_seconds + sent_bytes / beta_bytes_per_second, sent_bytes as `sent_bytes` gives them."""

    alpha_seconds: float
    beta_bytes_per_second: float

    def seconds(self, sent: float) -> float:
        return self.alpha_seconds + sent / self.beta_bytes_per_second


# ---- pure arithmetic


def bus_factor(primitive: str, ranks: int) -> float:
    """Share of the full tensor that the busiest rank has to send, at best."""
    n = ranks
    if primitive == "all_reduce":
        return 2 * (n - 1) / n
    if primitive in ("all_gather", "reduce_scatter", "all_to_all"):
        return (n - 1) / n
    if primitive in ("broadcast", "reduce", "send_recv"):
        return 1.0
    raise ValueError(f"no primitive {primitive!r}; there are {', '.join(PRIMITIVES)}")


def sent_bytes(primitive: str, full_bytes: float, *, ranks: int) -> float:
    """Bytes that the busiest rank has to send, at best."""
    return bus_factor(primitive, ranks) * full_bytes


def algorithm_bandwidth(full_bytes: float, seconds: float) -> float:
    """algbw, bytes per second of the full tensor."""
    return full_bytes / seconds


def bus_bandwidth(primitive: str, full_bytes: float, seconds: float, *, ranks: int) -> float:
    """busbw, bytes per second that the busiest rank sends."""
    return sent_bytes(primitive, full_bytes, ranks=ranks) / seconds


def fit(sent: Sequence[float], seconds: Sequence[float]) -> Model:
    """Latency and bandwidth by least squares on the relative error, so that short and long transfers weigh alike.

    Neither may be negative: where the straight line would have it so, it goes through the origin, or is flat.
    """
    if len(sent) != len(seconds) or not sent or min(seconds) <= 0:
        raise ValueError(f"{len(sent)} sizes and {len(seconds)} times do not make a model; times must be above 0")
    # Minimise the sum of (alpha u + slope v - 1)^2 with u = 1/t, v = bytes/t: two normal equations.
    u = [1 / t for t in seconds]
    v = [b / t for b, t in zip(sent, seconds, strict=True)]
    uu, uv, vv = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    if determinant > 1e-9 * uu * vv:
        alpha = (sum(u) * vv - sum(v) * uv) / determinant
        slope = (sum(v) * uu - sum(u) * uv) / determinant
        if alpha >= 0 and slope > 0:
            return Model(alpha, 1 / slope)
        if slope <= 0:
            return Model(sum(u) / uu, float("inf"))
    return Model(0.0, vv / sum(v))


def elements(primitive: str, full_bytes: float, *, ranks: int, item_bytes: int) -> int:
    """Elements of a full tensor of about `full_bytes`, a multiple of the ranks and at least one a rank."""
    return max(1, round(full_bytes / (item_bytes * ranks))) * ranks


# ---- what is measured


def calls(primitive: str, x: Tensor, axis: Axis) -> dict[str, Callable[[], object]]:
    """side -> one run of the primitive on the full tensor x (all zeros: sums stay in range, whatever is repeated)."""
    part = x[axis.part(len(x))].clone()
    whole, share = torch.zeros_like(x), torch.zeros_like(part)
    n, rank = axis.size, axis.rank
    all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def exchange() -> None:
        works = [dist.isend(x, (rank + 1) % n), dist.irecv(whole, (rank - 1) % n)]
        for work in works:
            work.wait()

    table: dict[str, dict[str, Callable[[], object]]] = {
        "all_reduce": {
            "ours": lambda: start_all_reduce(x, axis).wait(),
            "torch": lambda: dist.all_reduce(x),
        },
        "all_gather": {
            "ours": lambda: start_all_gather(part, axis).wait(),
            "torch": lambda: all_gather_flat(whole, part),
        },
        "reduce_scatter": {
            "ours": lambda: start_reduce_scatter(x, axis).wait(),
            "torch": lambda: reduce_scatter_flat(share, x),
        },
        "all_to_all": {
            "ours": lambda: start_all_to_all(x, axis).wait(),
            "torch": lambda: dist.all_to_all_single(whole, x),
        },
        "broadcast": {
            "ours": lambda: start_broadcast(x, axis).wait(),
            "torch": lambda: dist.broadcast(x, 0),
        },
        "reduce": {"torch": lambda: dist.reduce(x, 0)},
        "send_recv": {"ours": lambda: ring_shift([x], axis).wait(), "torch": exchange},
    }
    return table[primitive]


def times(sides: dict[str, Callable[[], object]], *, device: str, warmup: int, repeats: int) -> dict[str, float]:
    """side -> median over repeats of the slowest rank's seconds. The sides take turns; each run starts together."""
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(warmup + repeats):
        for side, call in sides.items():
            dist.barrier()
            _synchronize(device)
            began = time.perf_counter()
            call()
            _synchronize(device)
            if turn >= warmup:
                measured[side].append(time.perf_counter() - began)
    slowest = torch.tensor([measured[side] for side in sides], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {side: statistics.median(row) for side, row in zip(sides, slowest.tolist(), strict=True)}


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure(started: Started, options: argparse.Namespace, path: str) -> None:
    """All primitives, dtypes and sizes on this number of ranks; rank 0 prints them and writes the records to `path`."""
    axis, _, device = started
    if axis.size < 2:
        raise ValueError("one rank sends nothing; measure at least 2")
    records = []
    for dtype in options.dtypes:
        for primitive in options.primitives:
            for size in options.bytes:
                item_bytes = getattr(torch, dtype).itemsize
                count = elements(primitive, size, ranks=axis.size, item_bytes=item_bytes)
                x = torch.zeros(count, dtype=getattr(torch, dtype), device=device)
                sides = calls(primitive, x, axis)
                found = times(sides, device=device, warmup=options.warmup, repeats=options.repeats)
                case = (axis.size, options.backend, dtype, primitive)
                records += [Record(*case, side, count * item_bytes, seconds) for side, seconds in found.items()]
    if axis.rank == 0:
        print(table(records), flush=True)
        Path(path).write_text(json.dumps([record._asdict() for record in records]))


# ---- what is told


def models(records: Sequence[Record]) -> dict[tuple[int, str, str, str], Model]:
    """(ranks, dtype, primitive, side) -> the model fitted over that one's sizes."""
    cases: dict[tuple[int, str, str, str], list[Record]] = {}
    for record in records:
        cases.setdefault((record.ranks, record.dtype, record.primitive, record.side), []).append(record)
    return {
        case: fit([sent_bytes(r.primitive, r.full_bytes, ranks=r.ranks) for r in rows], [r.seconds for r in rows])
        for case, rows in cases.items()
    }


def table(records: Sequence[Record]) -> str:
    """The records of one number of ranks as aligned text, then the latency and bandwidth of each primitive."""
    first = records[0]
    fitted = models(records)
    theirs = {(r.dtype, r.primitive, r.full_bytes): r.seconds for r in records if r.side == "torch"}
    lines = [
        f"{first.ranks} ranks on {first.backend}; GB are decimal, bytes those of the full tensor",
        f"{'primitive':<15}{'dtype':<10}{'side':<6}{'bytes':>12}{'ms':>10}{'algbw GB/s':>12}{'busbw GB/s':>12}"
        f"{'model ms':>10}{'ms/model':>10}{'torch/ours':>12}",
    ]
    for r in records:
        model = fitted[r.ranks, r.dtype, r.primitive, r.side]
        expected = model.seconds(sent_bytes(r.primitive, r.full_bytes, ranks=r.ranks))
        gain = f"{theirs[r.dtype, r.primitive, r.full_bytes] / r.seconds:12.2f}" if r.side == "ours" else ""
        lines.append(
            f"{r.primitive:<15}{r.dtype:<10}{r.side:<6}{r.full_bytes:12,}{r.seconds * 1e3:10.3f}"
            f"{algorithm_bandwidth(r.full_bytes, r.seconds) / 1e9:12.3f}"
            f"{bus_bandwidth(r.primitive, r.full_bytes, r.seconds, ranks=r.ranks) / 1e9:12.3f}"
            f"{expected * 1e3:10.3f}{r.seconds / expected:10.2f}{gain}"
        )
    lines.append(f"{'fitted':<15}{'dtype':<10}{'side':<6}{'alpha us':>12}{'beta GB/s':>10}")
    for (_, dtype, primitive, side), model in fitted.items():
        lines.append(
            f"{primitive:<15}{dtype:<10}{side:<6}{model.alpha_seconds * 1e6:12.1f}"
            f"{model.beta_bytes_per_second / 1e9:10.3f}"
        )
    return "\n".join(lines) + "\n"


def plot(records: Sequence[Record], path: str) -> None:
    """busbw over bytes, a panel for each number of ranks and dtype. Points are measured, lines the model."""
    pyplot = _pyplot()
    fitted = models(records)
    panels = sorted({(r.ranks, r.dtype) for r in records})
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 5), sharey=True, squeeze=False)
    for panel, ax in zip(panels, axes[0], strict=True):
        for (ranks, dtype, primitive, side), model in fitted.items():
            rows = [r for r in records if (r.ranks, r.dtype, r.primitive, r.side) == (ranks, dtype, primitive, side)]
            if (ranks, dtype) != panel:
                continue
            color = f"C{PRIMITIVES.index(primitive)}"
            sizes = [r.full_bytes for r in rows]
            busbw = [bus_bandwidth(primitive, r.full_bytes, r.seconds, ranks=ranks) / 1e9 for r in rows]
            sent = [sent_bytes(primitive, size, ranks=ranks) for size in sizes]
            ax.plot(sizes, busbw, "o" if side == "ours" else "x", color=color)
            curve = [b / model.seconds(b) / 1e9 for b in sent]
            ax.plot(sizes, curve, "-" if side == "ours" else "--", color=color, label=f"{primitive} ({side})")
        ax.set(xscale="log", yscale="log", xlabel="bytes of the full tensor", title=f"{panel[0]} ranks, {panel[1]}")
    axes[0][0].set_ylabel("busbw, GB/s")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def _pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot draws with matplotlib, which is missing: pip install 'megalite[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


# ---- the command line


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    def list_of(kind: Callable[[str], object]) -> Callable[[str], list[object]]:
        return lambda text: [kind(item) for item in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--ranks", type=list_of(int), help="numbers of ranks to start here, e.g. 2,4 (not under torchrun)"
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--bytes", type=list_of(float), default=[4e3, 64e3, 1e6, 8e6], help="of the full tensor")
    parser.add_argument("--dtypes", type=list_of(str), default=["float32"], help="e.g. float32,bfloat16")
    parser.add_argument("--primitives", type=list_of(str), default=list(PRIMITIVES))
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="write the records to this file")
    parser.add_argument("--plot", help="draw busbw over bytes into this file")
    return parser.parse_args(arguments), parser


def main(arguments: Sequence[str] | None = None) -> None:
    options, parser = _parse(arguments)
    try:
        for primitive in options.primitives:
            bus_factor(primitive, 2)
        if options.plot:
            _pyplot()
    except ValueError as error:
        parser.error(str(error))
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "records.json")
        worlds = [None] if dist.is_torchelastic_launched() else options.ranks or [2]
        for ranks in worlds:
            start(measure, options, str(path), ranks=ranks, backend=options.backend)
            if path.exists():  # under torchrun only rank 0 has written
                records += [Record(**row) for row in json.loads(path.read_text())]
    if records and options.json:
        Path(options.json).write_text(json.dumps([record._asdict() for record in records], indent=1))
    if records and options.plot:
        plot(records, options.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
