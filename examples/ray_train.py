"""Ray Train with two workers: stats in every report, checkpoints, and a restart after a worker was killed.

    python examples/ray_train.py --folder /tmp/run --compress --die 14

`--die 14` kills worker 1 in step 14, once. Worker 0 then raises `gs.PeerLost`, which nothing catches: Ray starts both
again, and they continue from the last checkpoint, to the bit as if nothing had happened.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn

import gradsync as gs
from gradsync.integrations import ray as gs_ray


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    gs.init()  # takes the process group that Ray has made
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    model = ray.train.torch.prepare_model(net, parallel_strategy=None)  # moves it, and no DDP around it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = gs.attach(model, optimizer, gs.Plan(compress=gs.int8() if config["compress"] else None))

    start = 0
    if (state := gs_ray.resume()) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sync.load_state_dict(state["sync"])
        start = state["step"]

    for step in range(start, config["steps"]):
        # The data of a step follows from its number, so a resumed run sees what the first would have seen.
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if (rank, step) == (1, config["die"]):
            die_once(Path(config["folder"]) / "died")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % config["every"] == 0 or step + 1 == config["steps"]:
            state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            gs_ray.report({"loss": loss.item(), "step": step + 1, "started_at": start}, sync, state)
    sync.detach()


def die_once(marker: Path) -> None:
    """As when a host fails: at once, and not again after the restart."""
    if not marker.exists():
        ray.train.get_all_reported_checkpoints(timeout_s=60)  # Ray registers a report only when it looks for it
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str] | None = None) -> ray.train.Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where Ray keeps checkpoints; all hosts must see it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--compress", action="store_true", help="send gradients in 8 bits")
    parser.add_argument("--die", type=int, metavar="STEP", help="kill worker 1 there, once")
    options = parser.parse_args(arguments)
    folder = str(options.folder.resolve())
    if not ray.is_initialized():  # on a cluster: ray.init() alone, or `ray job submit`
        ray.init(num_cpus=2, include_dashboard=False)

    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=vars(options) | {"folder": folder},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="gradsync",
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    told = result.metrics
    print(f"step {told['step']}, loss {told['loss']:.4f}, started at step {told['started_at']}")
    print(f"a step took {1e3 * told['gradsync/step_s']:.1f} ms, {1e3 * told['gradsync/exposed_s']:.1f} of it waiting")
    print(f"checkpoint: {result.checkpoint.path}")
    return result


if __name__ == "__main__":
    main()
