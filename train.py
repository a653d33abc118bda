"""Trains a model in any layout.

    python train.py                                                   one process
    torchrun --standalone --nproc-per-node=4 train.py layout.tp=2     four; dp takes what the other axes leave
`python train.py --cfg job` lists what can be set; megalite/train/config.py says what it means.
"""

from __future__ import annotations

from megalite.train import launch
from megalite.train.config import Config


def main(config: Config, world: launch.World) -> None:
    from megalite.comm import start_all_reduce  # here, so that --help and a refusal cost no import of torch
    from megalite.mesh import Mesh
    from megalite.train.batches import open_batches, start_count
    from megalite.train.evaluate import evaluate
    from megalite.train.finite import LossScale
    from megalite.train.log import Log
    from megalite.train.memory_measure import measured_memory
    from megalite.train.model import build_pipeline, build_stages, build_zero
    from megalite.train.optim import learning_rate
    from megalite.train.profile import Profile

    mesh, device = Mesh.build(config.layout.fit(world.size)), world.device
    stages = build_stages(config, mesh=mesh)
    with open_batches(config, dp=mesh.dp, device=device, cache_dir=world.cache_dir) as batches:
        log = Log(batches.pinned(config), world=world, mesh=mesh)
        log.header(data=batches.describe(), baselines=batches.baselines)
        zero, scale = build_zero(config, stages, mesh=mesh, device=device), LossScale.of(config.precision.compute)
        with Profile(config, world.rank, zero=zero, stages=stages) as profile, log, measured_memory(log, stages, zero):
            pipeline = build_pipeline(config, stages, mesh=mesh, around=profile.range)
            for step in range(1, config.last_step + 1):
                world.at(step)
                profile.at(step)
                batch = log.read(batches.training, step)
                count = start_count(batch, mesh=mesh, device=device)
                zero.lr = learning_rate(config.optim, step, steps=config.steps)
                zero.begin(microbatches=len(batch), in_turns=True)
                told = {"last_backward": zero.last_backward, "announce": zero.announce}
                loss = pipeline.step(batch, denominator=count, loss_scale=scale.value, **told)
                grad_norm = zero.step(max_norm=config.optim.max_norm, loss_scale=scale.value)
                loss = start_all_reduce(loss, mesh.data()).wait()
                metrics = {"train/loss": loss.item(), "train/grad_norm": grad_norm.item(), "train/lr": zero.lr}
                metrics |= scale.metrics() | log.measured(step)
                if config.evaluates(step):
                    metrics |= evaluate(pipeline, batches.validation(), mesh=mesh)
                log.step(step, metrics)
                scale.see(step, metrics["train/grad_norm"])
            log.summary(skipped=zero.skipped)


if __name__ == "__main__":
    launch.run(main)
