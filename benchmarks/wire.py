"""What ZeRO's stages really send, counted by the kernel, beside torch's own: not what was asked for, but what crossed.

    unshare --net sh -c 'ip link set lo up && python benchmarks/wire.py'          2 ranks; --ranks 4, --stages 3

In a network namespace of its own (which takes root) the ranks are alone on the loopback interface, so all that
/proc/net/dev counts there is theirs, with the headers of TCP.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.work import Work, add_work, work_of
from benchmarks.zero import FLOAT_BYTES, OURS, PEER, PEERS, SIDES, STAGES
from megalite.mesh import Layout, Mesh
from megalite.models.gpt import GPT
from tests.ranks import run

STEPS, SETTLE_SECONDS = 4, 1.0


def loopback_bytes() -> int:
    """Sent over lo since it is up. Raises RuntimeError where there is no such interface."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("/proc/net/dev has no lo")


def sent(work: Work, stage: int, side: str) -> float:
    """Runs on every rank: bytes that a rank sends in a step, after the first two."""
    step = SIDES[side](work, stage).step
    for _ in range(2):
        step()
    before = settled_bytes()
    for _ in range(STEPS):
        step()
    return (settled_bytes() - before) / STEPS / dist.get_world_size()


def settled_bytes() -> int:
    """Once all ranks are here and the gathers have come that they have asked for and not waited for yet."""
    dist.barrier()
    time.sleep(SETTLE_SECONDS)
    found = loopback_bytes()
    dist.barrier()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    add_work(parser)
    parser.set_defaults(vocab=2048)
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=STAGES)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work = work_of(options)
    model = GPT(work.config, mesh=Mesh(Layout(), 0), device="meta")
    parameters = sum(parameter.numel() for parameter in model.parameters()) * FLOAT_BYTES
    unit = parameters * (options.ranks - 1) / options.ranks
    rows = []
    for stage in options.stages:
        found = {side: run(sent, options.ranks, work, stage, side, checked=False)[0] for side in (OURS, PEER)}
        shown = [cell for side in (OURS, PEER) for cell in (f"{found[side] / 1e6:.2f}", f"{found[side] / unit:.3f}")]
        rows.append((f"stage {stage}", *shown, PEERS[stage]))
    header = (f"{options.ranks} ranks", "MB a rank", "in (n-1)/n P", "peer's MB", "in (n-1)/n P", "peer")
    print(f"{work}: P = {parameters / 1e6:.2f} MB of parameters\n\n{harness.table(header, rows)}")


if __name__ == "__main__":
    main()
