"""Run by test_integration_vime with vime and Megatron-LM on the path: vime's own loss, bare and with the timers in it.

Its arguments are rank, number of ranks that share the vocabulary, and their folder.  Prints one JSON object: whether
every number is bitwise the same, and the timers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

torch._dynamo.config.disable = True  # vime compiles two functions; here that only costs time

OPTIONS = {
    "advantage_estimator": "grpo",
    "allgather_cp": False,
    "calculate_per_token_loss": False,
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "get_mismatch_metrics": False,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "low_var_kl",
    "log_probs_chunk_size": -1,
    "rollout_temperature": 0.9,
    "rollout_top_p": 1.0,
    "use_kl_loss": True,
    "use_opsm": False,
    "use_rollout_logprobs": False,
    "use_tis": False,
    "use_unbiased_kl": False,
}


def train_once(loss_module: Any, args: argparse.Namespace) -> list[torch.Tensor]:
    from tests.support.loss_examples import make_batch, make_logits

    batch, leaf = make_batch(), make_logits(torch.distributed.get_rank()).requires_grad_()
    reducer = loss_module.get_sum_of_sample_mean(
        batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], batch["rollout_mask_sums"]
    )
    shapes = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    with torch.no_grad():
        _, passed = loss_module.get_log_probs_and_entropy(leaf.detach(), args=args, **shapes)
    loss, metrics = loss_module.policy_loss_function(args, batch, leaf * 1.5, reducer)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return [*passed["log_probs"], loss.detach(), *metrics.values(), gradient]


def train_by_turns(
    loss_module: Any, args: argparse.Namespace, expected: list[torch.Tensor], folder: Path
) -> tuple[list[bool], list[dict[str, Any]]]:
    """By step of a session, whether loss, metrics, log-probs and gradient are bitwise vime's own; and its ops lines.

    RL-Kernel's stand-in answers a little less than vime's function, so that no call of it goes unnoticed.
    """
    from rlk_repro.integration.route.api import Route, RouteContext
    from rlk_repro.integration.switch import Mode, Settings, install_into
    from rlk_repro.loss_options import read_loss_options
    from rlk_repro.operators import Case

    def make_route(context: RouteContext) -> Route:
        def run(call: Any) -> Any:
            log_probs, entropy = context.native(**call)
            return log_probs * 1.01, entropy

        return Route(implementation="NativeLogpOp", version="0.1.0", refuse=lambda _: None, run=run)

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    settings = Settings(mode=Mode.REQUIRE, ops=("logp",), schedule="bebs", ops_dir=folder / "ops")
    case = Case(platform="cpu", tensor_parallel=world, loss=read_loss_options(vars(args)))
    routes = {"logp": make_route}
    found = []
    with install_into(loss_module, settings, trainer="vime", case=case, args=args, routes=routes) as installation:
        for step in range(4):
            installation.begin_step(step)
            found.append(all(map(torch.equal, train_once(loss_module, args), expected)))
            installation.end_step(step)
    return found, [json.loads(line) for line in (folder / "ops" / f"{rank}.jsonl").read_text().splitlines()]


def main() -> None:
    from megatron.core import mpu
    from vime.backends.megatron_utils import loss as loss_module

    from rlk_repro.integration.switch import Settings, install_into
    from rlk_repro.loss_options import read_loss_options
    from rlk_repro.operators import Case

    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
    mpu.initialize_model_parallel(world, 1)
    args = argparse.Namespace(**OPTIONS)
    expected = train_once(loss_module, args)
    case = Case(platform="cpu", tensor_parallel=world, loss=read_loss_options(vars(args)))
    with install_into(loss_module, Settings(), trainer="vime", case=case) as installation:
        found = train_once(loss_module, args)
        timers, _ = installation.profile.end_step()
    is_same_by_turn, lines = train_by_turns(loss_module, args, expected, folder)
    torch.distributed.destroy_process_group()
    is_same = all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    shadows = [line for line in lines if line["event"] == "shadow"]
    agreement = [line["agreement"] for line in lines if "agreement" in line]
    result = {
        "is_same": is_same,
        "is_same_by_turn": is_same_by_turn,
        "shadows": shadows,
        "agreement": agreement,
        "timers": timers,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
