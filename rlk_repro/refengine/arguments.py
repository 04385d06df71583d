"""Define the reference trainer's flags, named as in vime and Megatron-LM; all are checked before torch loads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.refengine.task import NUM_TOKENS, PLACEHOLDER


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags and fill in defaults that follow from other flags.

    Raises:
        SpecError: flags contradict each other; the error lists all contradictions.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rlk_repro.refengine",
        description="Reference GRPO trainer, for smoke runs, first tests of machines and automated tests.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for add in (_add_model, _add_rollout, _add_loss, _add_optimizer, _add_stored_rollouts, _add_machine):
        add(parser)
    args = parser.parse_args(argv)
    problems = [*_complete_model(args), *_complete_batch(args), *_complete_lane(args)]
    if problems:
        raise SpecError(*problems)
    return args


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {value}, expected a number above 0")
    return value


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=_positive_int, default=2, help="decoder blocks")
    group.add_argument("--hidden-size", type=_positive_int, default=64, help="width of the residual stream")
    group.add_argument("--num-attention-heads", type=_positive_int, default=4, help="query heads")
    group.add_argument("--num-query-groups", type=_positive_int, help="key/value heads (None: as many as query heads)")
    group.add_argument("--kv-channels", type=_positive_int, help="size of a head (None: hidden size / heads)")
    group.add_argument("--ffn-hidden-size", type=_positive_int, help="SwiGLU width (None: 3 x hidden size)")
    group.add_argument("--vocab-size", type=_positive_int, default=16, help="rows of the embedding")
    group.add_argument(
        "--untie-embeddings-and-output-weights", action="store_true", help="give the output layer a weight of its own"
    )
    group.add_argument("--rotary-base", type=_positive_float, default=10000.0, help="base of the rotary angles")
    group.add_argument("--init-method-std", type=_positive_float, default=0.1, help="standard deviation of weights")
    group.add_argument("--norm-epsilon", type=_positive_float, default=1e-6, help="epsilon of RMSNorm")


def _add_rollout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rollout")
    group.add_argument("--num-rollout", type=_positive_int, default=400, help="number of rollouts")
    group.add_argument("--rollout-batch-size", type=_positive_int, default=16, help="prompts per rollout")
    group.add_argument("--n-samples-per-prompt", type=_positive_int, default=8, help="responses per prompt, at least 2")
    group.add_argument("--rollout-max-response-len", type=_positive_int, default=4, help="tokens per response")
    group.add_argument("--rollout-temperature", type=_positive_float, default=1.0, help="sampling temperature")
    group.add_argument("--max-operand", type=_positive_int, default=9, help="largest number to add in a prompt")


def _add_loss(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loss")
    group.add_argument("--eps-clip", type=float, default=0.2, help="lower clip of the ratio")
    group.add_argument("--eps-clip-high", type=float, help="upper clip of the ratio (None: as --eps-clip)")
    group.add_argument("--entropy-coef", type=float, default=0.15, help="weight of the entropy bonus")
    group.add_argument("--use-kl-loss", action="store_true", help="add the KL between policy and reference to the loss")
    group.add_argument("--kl-loss-coef", type=float, default=0.0, help="weight of the KL term in the loss")
    group.add_argument(
        "--kl-loss-type", choices=("k1", "k2", "k3", "low_var_kl"), default="k1", help="estimator of the KL term"
    )
    group.add_argument("--calculate-per-token-loss", action="store_true", help="average over tokens, not over samples")
    group.add_argument(
        "--log-probs-chunk-size", type=int, default=-1, help="rows of logits computed at a time (-1: all)"
    )


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--num-steps-per-rollout", type=_positive_int, help="optimizer steps per rollout")
    group.add_argument("--global-batch-size", type=_positive_int, help="samples per optimizer step")
    group.add_argument("--micro-batch-size", type=_positive_int, help="samples per pass (None: the whole step)")
    group.add_argument("--lr", type=_positive_float, default=1e-3, help="constant learning rate")
    group.add_argument("--weight-decay", type=float, default=0.01, help="decay of matrices")
    group.add_argument("--adam-beta1", type=float, default=0.9, help="decay of the first moment")
    group.add_argument("--adam-beta2", type=float, default=0.98, help="decay of the second moment")
    group.add_argument("--clip-grad", type=float, default=1.0, help="largest gradient norm, 0 for no limit")


def _add_stored_rollouts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("stored rollouts")
    template = f"file template holding {PLACEHOLDER}"
    group.add_argument("--save-debug-rollout-data", metavar="TEMPLATE", help=f"store each rollout: {template}")
    group.add_argument("--load-debug-rollout-data", metavar="TEMPLATE", help=f"train on stored rollouts: {template}")
    group.add_argument("--debug-rollout-only", action="store_true", help="generate, never train")
    group.add_argument("--debug-train-only", action="store_true", help="train only; set if stored rollouts are loaded")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument("--seed", type=int, default=1234, help="seed of weights, task and sampling")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda also means AMD GPUs")
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of activations, and of the weights that generate rollouts",
    )
    group.add_argument("--num-threads", type=_positive_int, help="CPU threads (None: torch's choice)")
    group.add_argument(
        "--custom-megatron-init-path", metavar="MODULE.FUNCTION", help="function called with all flags before training"
    )


def _complete_model(args: argparse.Namespace) -> list[Problem]:
    args.num_query_groups = args.num_query_groups or args.num_attention_heads
    args.ffn_hidden_size = args.ffn_hidden_size or 3 * args.hidden_size
    problems = []
    if args.kv_channels is None:
        if args.hidden_size % args.num_attention_heads:
            problems.append(_problem("--hidden-size", args.hidden_size, "a multiple of --num-attention-heads"))
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.num_attention_heads % args.num_query_groups:
        problems.append(_problem("--num-attention-heads", args.num_attention_heads, "a multiple of --num-query-groups"))
    if args.kv_channels % 2:
        problems.append(_problem("--kv-channels", args.kv_channels, "an even number, because RoPE rotates pairs"))
    if args.vocab_size < NUM_TOKENS:
        problems.append(_problem("--vocab-size", args.vocab_size, f"at least the {NUM_TOKENS} tokens of the task"))
    return problems


def _complete_batch(args: argparse.Namespace) -> list[Problem]:
    problems = []
    args.eps_clip_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    if args.n_samples_per_prompt < 2:
        expected = "at least 2, because advantages compare the samples of a prompt"
        problems.append(_problem("--n-samples-per-prompt", 1, expected))
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    steps = args.num_steps_per_rollout or (samples // args.global_batch_size if args.global_batch_size else 1)
    args.num_steps_per_rollout = max(steps, 1)
    args.global_batch_size = args.global_batch_size or samples // args.num_steps_per_rollout
    args.micro_batch_size = args.micro_batch_size or args.global_batch_size
    if args.global_batch_size * args.num_steps_per_rollout != samples:
        expected = f"{samples} samples per rollout divided by {args.num_steps_per_rollout} steps"
        problems.append(_problem("--global-batch-size", args.global_batch_size, expected))
    return problems


def _complete_lane(args: argparse.Namespace) -> list[Problem]:
    problems = []
    for flag in ("save_debug_rollout_data", "load_debug_rollout_data"):
        template = getattr(args, flag)
        if template is not None and PLACEHOLDER not in template:
            problems.append(_problem(f"--{flag.replace('_', '-')}", template, f"a template with {PLACEHOLDER}"))
    if args.load_debug_rollout_data is None and args.debug_train_only:
        problems.append(Problem("--debug-train-only", "no rollouts to train on", hint="add --load-debug-rollout-data"))
    args.debug_train_only = args.load_debug_rollout_data is not None
    if args.debug_train_only and (args.debug_rollout_only or args.save_debug_rollout_data):
        problems.append(
            Problem("--load-debug-rollout-data", "excludes --debug-rollout-only and --save-debug-rollout-data")
        )
    return problems


def _problem(flag: str, got: object, expected: str) -> Problem:
    return Problem(flag, "does not fit", got=got, expected=expected)
