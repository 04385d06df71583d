"""Run by test_agreement with vime and Megatron-LM on the path: vime's own policy loss, bare and
with operators routed in, on random batches and options.

``python -m tests.support.vime_agreement RANK WORLD FOLDER OP``: the log-probs with gradient, or the
whole loss, go to OP; with ``seam`` as OP, a stand-in of RL-Kernel takes turns with vime.  Rank 0
prints one JSON object.  The vocabulary is split over the ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from rlk_repro.integration.switch import Mode, Settings, install_into
from rlk_repro.loss_options import read_loss_options
from rlk_repro.operators import Case, find_conflicts, find_refusal
from tests.support.loss_examples import make_loud_route

torch._dynamo.config.disable = True  # vime compiles two functions; here that only costs time

VOCABULARY, NUM_BATCHES = 48, 300
OPTIONS = {
    "advantage_estimator": "grpo", "allgather_cp": False, "calculate_per_token_loss": False,
    "custom_tis_function_path": None, "entropy_coef": 0.0, "eps_clip": 0.2, "eps_clip_high": 0.2,
    "get_mismatch_metrics": False, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl",
    "log_probs_chunk_size": -1, "loss_type": "policy_loss", "recompute_loss_function": False,
    "rollout_temperature": 1.0, "rollout_top_p": 1.0, "tis_clip": 2.0, "tis_clip_low": 0.0,
    "use_kl_loss": True, "use_opsm": False, "use_rollout_logprobs": False, "use_tis": False,
    "use_unbiased_kl": False,
}  # fmt: skip


def draw_options(rng: random.Random) -> dict[str, Any]:
    return OPTIONS | {
        "advantage_estimator": rng.choice(["grpo", "grpo", "grpo", "gspo", "cispo"]),
        "calculate_per_token_loss": rng.random() < 0.3,
        "entropy_coef": rng.choice([0.0, 0.0, 0.0, 0.01]),
        "eps_clip_high": rng.choice([0.2, 0.28]),
        "get_mismatch_metrics": rng.random() < 0.2,
        "kl_loss_coef": rng.choice([0.0, 0.01, 0.5]),
        "kl_loss_type": rng.choice(["k1", "k2", "k3", "low_var_kl"]),
        "log_probs_chunk_size": rng.choice([-1, -1, 3, 7]),
        "recompute_loss_function": rng.random() < 0.3,
        "rollout_temperature": rng.choice([1.0, 1.0, 0.7, 1.3]),
        "use_kl_loss": rng.random() < 0.6,
        "use_rollout_logprobs": rng.random() < 0.3,
        "use_tis": rng.random() < 0.3,
        "use_unbiased_kl": rng.random() < 0.3,
    }


def draw_batch(rng: random.Random, generator: torch.Generator) -> tuple[dict[str, Any], Any]:
    responses = [rng.randint(0, 9) for _ in range(rng.randint(1, 6))]
    lengths = [(response + rng.randint(1, 6), response) for response in responses]
    num_rows = sum(total for total, _ in lengths) + rng.choice([0, 0, 5])  # with padding at the end
    logits = torch.randn(1, num_rows, VOCABULARY, generator=generator) * rng.choice([0.5, 2.0, 6.0])
    tokens = [torch.randint(VOCABULARY, (total,), generator=generator) for total, _ in lengths]
    draws = [torch.rand(response, generator=generator) for response in responses]
    masks = [(draw < rng.choice([1.0, 0.7])).float() for draw in draws]
    if rng.random() < 0.2:
        masks[0].zero_()
    exact, position = [], 0
    for (total, response), ids in zip(lengths, tokens, strict=True):
        rows = logits[0, position + total - response - 1 : position + total - 1].log_softmax(-1)
        exact.append(rows.gather(1, ids[total - response :].unsqueeze(1)).squeeze(1))
        position += total

    def near() -> list[torch.Tensor]:
        spread = rng.choice([0.02, 0.3, 1.0])
        noise = [torch.randn(len(row), generator=generator) * spread for row in exact]
        return [row + change.clamp(-4, 4) for row, change in zip(exact, noise, strict=True)]

    batch = {
        "unconcat_tokens": tokens,
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": responses,
        "loss_masks": masks,
        "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]),
        "advantages": [torch.randn(response, generator=generator) for response in responses],
        "log_probs": near() if rng.random() < 0.8 else [],
        "ref_log_probs": near(),
        "rollout_log_probs": near(),
    }
    return batch, logits


class Trainer:
    """One microbatch through vime's own functions; this rank holds its columns of the logits."""

    def __init__(self, loss_module: Any, rank: int, world: int) -> None:
        self.module = loss_module
        self.columns = slice(rank * VOCABULARY // world, (rank + 1) * VOCABULARY // world)

    def run(self, options: dict[str, Any], batch: dict[str, Any], logits: torch.Tensor) -> dict[str, torch.Tensor]:
        args = argparse.Namespace(**options)
        leaf = logits[..., self.columns].clone().requires_grad_()
        shapes = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
        with torch.no_grad():
            _, passed = self.module.get_log_probs_and_entropy(leaf.detach(), args=args, **shapes)
        reducer = self.module.get_sum_of_sample_mean(
            batch["total_lengths"],
            batch["response_lengths"],
            batch["loss_masks"],
            batch["rollout_mask_sums"],
            options["calculate_per_token_loss"],
        )
        function = self.module.policy_loss_function
        if options["recompute_loss_function"]:  # as vime's loss_function does
            function = functools.partial(checkpoint, function, use_reentrant=False)
        loss, metrics = function(args, batch, leaf, reducer)
        (gradient,) = torch.autograd.grad(loss, leaf)
        found = {f"metric {name}": value for name, value in metrics.items()}
        return found | {"loss": loss.detach(), "log_probs": torch.cat(passed["log_probs"]), "gradient": gradient}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    pairs = [(one[name].nan_to_num(), value.nan_to_num()) for name, value in other.items()]
    return all(torch.equal(*pair) for pair in pairs)


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """Gradients as a part of their largest, log-probs absolutely, all else as |x - y| / (1 + |y|).

    Numbers that are none on either side are left out.
    """
    found: dict[str, float] = {}
    for name, value in one.items():
        distance = (value.double() - other[name].double()).abs().nan_to_num(posinf=0.0)
        if name == "gradient":
            distance = distance / other[name].abs().amax().clamp_min(1e-30)
        elif name != "log_probs":
            distance = distance / (1 + other[name].double().abs())
        kind = name if name in {"loss", "log_probs", "gradient"} else "metrics"
        found[kind] = max(found.get(kind, 0.0), float(distance.max()) if distance.numel() else 0.0)
    return found


def compare(trainer: Trainer, world: int, op: str) -> dict[str, Any]:
    """The largest differences over all batches that ``op`` may serve; all others must be vime's."""
    rng, generator = random.Random(20260701), torch.Generator().manual_seed(20260701)
    worst: dict[str, float] = {}
    same_refused = num_refused = 0
    ops = (op,) if find_conflicts(("logp", op)) else ("logp", op)
    for _ in range(NUM_BATCHES):
        options, (batch, logits) = draw_options(rng), draw_batch(rng, generator)
        if op == "grpo_loss" and rng.random() < 0.6:
            options = OPTIONS | {"use_kl_loss": False}
        expected = trainer.run(options, batch, logits)
        loss_options = dataclasses.replace(read_loss_options(options), has_no_grad_pass=True)
        case = Case(platform="cpu", tensor_parallel=world, loss=loss_options)
        is_eligible = find_refusal(op, case) is None
        if op == "grpo_loss":
            is_eligible &= bool(options["use_rollout_logprobs"] or batch["log_probs"])
        settings = Settings(mode=Mode.REQUIRE if is_eligible else Mode.AUTO, ops=ops)
        with install_into(trainer.module, settings, trainer="vime", case=case) as installation:
            found = trainer.run(options, batch, logits)
            assert installation._watch.settle() == {}
            versions = {item.op: item.version for item in installation.ledger.decisions}
        assert bool(versions[op]) is is_eligible
        if is_eligible:
            for name, value in differ(found, expected).items():
                worst[name] = max(worst.get(name, 0.0), value)
            continue
        num_refused += 1
        del expected["log_probs"]  # the pass without gradient is served all the same
        same_refused += are_equal(found, expected)
    return {"worst": worst, "num_refused": num_refused, "num_refused_and_same": same_refused}


def take_turns(trainer: Trainer, rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Whether numbers are bitwise vime's own, under timers and in each step; and the ops lines."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    options, (batch, logits) = OPTIONS | {"rollout_temperature": 0.9}, draw_batch(rng, generator)
    expected = trainer.run(options, batch, logits)
    case = Case(platform="cpu", tensor_parallel=world, loss=read_loss_options(options))
    with install_into(trainer.module, Settings(), trainer="vime", case=case) as installation:
        is_same = are_equal(trainer.run(options, batch, logits), expected)
        timers, _ = installation.profile.end_step()
    settings = Settings(mode=Mode.REQUIRE, ops=("logp",), schedule="bebs", ops_dir=folder / "ops")
    more: Any = {"args": argparse.Namespace(**options), "routes": {"logp": make_loud_route}}
    turns = []
    with install_into(trainer.module, settings, trainer="vime", case=case, **more) as installation:
        for step in range(4):
            installation.begin_step(step)
            turns.append(are_equal(trainer.run(options, batch, logits), expected))
            installation.end_step(step)
    text = (folder / "ops" / f"{rank}.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    difference = torch.cat(batch["log_probs"]) - torch.cat(batch["rollout_log_probs"])
    largest = (difference * torch.cat(batch["loss_masks"])).abs().max().item()
    return {
        "is_same": is_same,
        "is_same_by_turn": turns,
        "timers": timers,
        "shadows": [line for line in lines if line["event"] == "shadow"],
        "agreement": [line["agreement"] for line in lines if "agreement" in line],
        "largest": largest,
    }


def main() -> None:
    rank, world, folder, op = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    meeting = f"file://{folder}/group"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    from megatron.core import mpu
    from vime.backends.megatron_utils import loss as loss_module

    mpu.initialize_model_parallel(world, 1)
    trainer = Trainer(loss_module, rank, world)
    is_seam = op == "seam"
    result = take_turns(trainer, rank, world, folder) if is_seam else compare(trainer, world, op)
    if rank == 0:
        sys.stdout.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
