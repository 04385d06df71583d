"""Run by test_integration_agreement with vime, Megatron-LM and RL-Kernel on the path: vime's own policy loss, bare and
with RL-Kernel routed in, on random batches and options; float64 says which of the two is nearer where they differ.

``python -m tests.support.vime_agreement RANK WORLD FOLDER NUM SEED KIND [OP]`` with KIND realistic or wild, and OP,
ratio_kl if not given, what the differentiated log-probs, all of them or the whole loss go to; rank 0 prints one JSON
object.  The vocabulary is split over the ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

torch._dynamo.config.disable = True  # vime compiles two functions; here that only costs time

VOCABULARY = 48
PLAIN = {"advantage_estimator": "grpo", "entropy_coef": 0.0, "eps_clip_high": 0.2, "get_mismatch_metrics": False,
         "use_kl_loss": False, "use_tis": False, "use_unbiased_kl": False}  # fmt: skip
ESTIMATORS = ("grpo", "grpo", "grpo", "gspo", "cispo")


def draw_options(rng: random.Random) -> dict[str, Any]:
    return {
        "advantage_estimator": rng.choice(ESTIMATORS),
        "allgather_cp": False,
        "calculate_per_token_loss": rng.random() < 0.3,
        "custom_tis_function_path": None,
        "entropy_coef": rng.choice([0.0, 0.0, 0.0, 0.01]),
        "eps_clip": 0.2,
        "eps_clip_high": rng.choice([0.2, 0.28]),
        "get_mismatch_metrics": rng.random() < 0.2,
        "kl_loss_coef": rng.choice([0.0, 0.01, 0.5]),
        "kl_loss_type": rng.choice(["k1", "k2", "k3", "low_var_kl"]),
        "log_probs_chunk_size": rng.choice([-1, -1, 3, 7]),
        "recompute_loss_function": rng.random() < 0.3,
        "rollout_temperature": rng.choice([1.0, 1.0, 0.7, 1.3]),
        "rollout_top_p": 1.0,
        "tis_clip": 2.0,
        "tis_clip_low": 0.0,
        "use_kl_loss": rng.random() < 0.6,
        "use_opsm": False,
        "use_rollout_logprobs": rng.random() < 0.3,
        "use_tis": rng.random() < 0.3,
        "use_unbiased_kl": rng.random() < 0.3,
    }


def draw_batch(rng: random.Random, generator: torch.Generator, *, is_wild: bool) -> tuple[dict[str, Any], torch.Tensor]:
    lengths = [(prompt + response, response) for prompt, response in
               ((rng.randint(1, 6), rng.randint(0, 9)) for _ in range(rng.randint(1, 6)))]  # fmt: skip
    num_rows = sum(total for total, _ in lengths) + rng.choice([0, 0, 5])  # with padding at the end
    scale = rng.choice([10.0, 30.0]) if is_wild else rng.choice([0.5, 2.0, 6.0])
    logits = torch.randn(1, num_rows, VOCABULARY, generator=generator) * scale
    tokens = [torch.randint(VOCABULARY, (total,), generator=generator) for total, _ in lengths]
    masks = [(torch.rand(response, generator=generator) < rng.choice([1.0, 0.7])).float() for _, response in lengths]
    if rng.random() < 0.2:
        masks[0].zero_()
    exact, position = [], 0
    for (total, response), ids in zip(lengths, tokens, strict=True):
        rows = logits[0, position + total - response - 1 : position + total - 1].log_softmax(-1)
        exact.append(rows.gather(1, ids[total - response :].unsqueeze(1)).squeeze(1))
        position += total

    def near() -> list[torch.Tensor]:
        spread = rng.choice([3.0, 20.0, 90.0]) if is_wild else rng.choice([0.02, 0.3, 1.0])
        noise = [torch.randn(len(row), generator=generator) * spread for row in exact]
        limit = 1e9 if is_wild else 4.0
        return [row + change.clamp(-limit, limit) for row, change in zip(exact, noise, strict=True)]

    batch = {
        "unconcat_tokens": tokens,
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": [response for _, response in lengths],
        "loss_masks": masks,
        "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]),
        "advantages": [torch.randn(response, generator=generator) for _, response in lengths],
        "log_probs": near() if rng.random() < 0.8 else [],
        "ref_log_probs": near(),
        "rollout_log_probs": near(),
    }
    return batch, logits


def to_double(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    return [to_double(item) for item in value] if isinstance(value, list) else value


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

    def run_exactly(
        self, options: dict[str, Any], batch: dict[str, Any], logits: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The same with the log-probs, and all that follows from them, in float64."""
        name = "calculate_log_probs_and_entropy"
        original = getattr(self.module, name)
        setattr(self.module, name, calculate_exactly)
        try:
            return self.run(options, {key: to_double(value) for key, value in batch.items()}, logits)
        finally:
            setattr(self.module, name, original)


def calculate_exactly(logits: torch.Tensor, tokens: torch.Tensor, tp_group: Any, **_: Any) -> Any:
    shards = [torch.empty_like(logits) for _ in range(dist.get_world_size(tp_group))]
    dist.all_gather(shards, logits.detach().contiguous(), group=tp_group)
    shards[dist.get_rank(tp_group)] = logits
    full = torch.cat([shard.double() for shard in shards], dim=-1).log_softmax(dim=-1)
    return full.gather(1, tokens.unsqueeze(1)), -(full.exp() * full).sum(dim=-1).detach()


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, is_wild: bool) -> dict[str, float]:
    """Gradients as a part of their largest; all else as |x - y| / (1 + |y|), but realistic log-probs absolutely.

    Numbers that are none on either side are left out; that they are the same ones is asserted elsewhere.
    """
    found: dict[str, float] = {}
    for name, value in one.items():
        distance = (value.double() - other[name].double()).abs().nan_to_num(posinf=0.0)
        if name == "gradient":
            distance = distance / other[name].abs().amax().clamp_min(1e-30)
        elif name != "log_probs" or is_wild:
            distance = distance / (1 + other[name].double().abs())
        kind = name if name in {"loss", "log_probs", "gradient"} else "metrics"
        found[kind] = max(found.get(kind, 0.0), float(distance.max()) if distance.numel() else 0.0)
    return found


def main() -> None:
    rank, world, folder, number, seed, kind, *rest = sys.argv[1:]
    op = rest[0] if rest else "ratio_kl"
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=int(rank), world_size=int(world))
    from megatron.core import mpu
    from vime.backends.megatron_utils import loss as loss_module

    from rlk_repro.integration.switch import Mode, Settings, install_into
    from rlk_repro.loss_options import read_loss_options
    from rlk_repro.operators import Case, find_conflicts, find_refusal

    mpu.initialize_model_parallel(int(world), 1)
    trainer, rng, generator = Trainer(loss_module, int(rank), int(world)), random.Random(int(seed)), torch.Generator()
    generator.manual_seed(int(seed))
    worst: dict[str, float] = {}
    ratios: list[float] = []
    same_refused = num_refused = 0
    ops = (op,) if find_conflicts(("logp", op)) else ("logp", op)
    for _ in range(int(number)):
        options, (batch, logits) = draw_options(rng), draw_batch(rng, generator, is_wild=kind == "wild")
        if op == "grpo_loss" and rng.random() < 0.6:
            options |= PLAIN
        expected = trainer.run(options, batch, logits)
        loss_options = dataclasses.replace(read_loss_options(options), has_no_grad_pass=True)
        case = Case(platform="cpu", tensor_parallel=int(world), loss=loss_options)
        is_eligible = find_refusal(op, case) is None and (op != "grpo_loss" or has_old_log_probs(options, batch))
        settings = Settings(mode=Mode.REQUIRE if is_eligible else Mode.AUTO, ops=ops)
        with install_into(loss_module, settings, trainer="vime", case=case) as installation:
            found = trainer.run(options, batch, logits)
            odd = installation._watch.settle()
            decisions = {item.op: item for item in installation.ledger.decisions}
        assert not odd, odd
        assert all(decisions[name].is_rl_kernel for name in ops if name != op)
        assert decisions[op].is_rl_kernel == is_eligible
        if not is_eligible:
            num_refused += 1
            del expected["log_probs"], found["log_probs"]  # the pass without gradient is served all the same
            same_refused += all(
                torch.equal(found[key].nan_to_num(), value.nan_to_num()) for key, value in expected.items()
            )
            continue
        if kind == "wild":
            exact = trainer.run_exactly(options, batch, logits)
            ours, theirs = differ(found, exact, is_wild=True), differ(expected, exact, is_wild=True)
            assert all(torch.equal(found[name].isfinite(), value.isfinite()) for name, value in expected.items())
            ratios += [ours[name] / max(theirs[name], 2e-6) for name in ours]
        else:
            for name, value in differ(found, expected, is_wild=False).items():
                worst[name] = max(worst.get(name, 0.0), value)
    if int(rank) == 0:
        result = {"worst": worst, "largest_ratio": max(ratios, default=0.0), "num_refused": num_refused,
                  "num_refused_and_same": same_refused}  # fmt: skip
        sys.stdout.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


def has_old_log_probs(options: dict[str, Any], batch: dict[str, Any]) -> bool:
    return bool(options["use_rollout_logprobs"] or batch["log_probs"])


if __name__ == "__main__":
    main()
