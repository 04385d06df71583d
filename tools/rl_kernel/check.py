"""Print facts of the GPU and of RL-Kernel, as the trainer's Python finds them: one JSON object as the last output line.

The examined Python runs this script, because the import is part of the check.  The script judges nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NUM_ROWS, VOCAB = 64, 1000
BATCH_INVARIANT = "batch_invariant_logp"


def describe_machine() -> dict[str, Any]:
    """Return torch's facts of this machine; RL-Kernel's setup and its registry also ask torch for the platform."""
    import torch

    has_gpu = torch.cuda.is_available()
    platform = "cpu" if not has_gpu else "rocm" if torch.version.hip else "cuda"
    capability = torch.cuda.get_device_capability() if has_gpu else None
    return {
        "platform": platform,
        "device": torch.cuda.get_device_name() if has_gpu else "",
        "device_capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "torch": torch.__version__,
        "toolkit": torch.version.hip or torch.version.cuda,
    }


def describe_rl_kernel() -> dict[str, Any]:
    """Return RL-Kernel's folder, the symbols of its extension, and the class and largest error of each operator."""
    import rl_engine
    import torch  # noqa: F401 the extension finds torch's libraries only where torch has loaded them

    try:
        from rl_engine import _C
    except ImportError as error:
        symbols, reason = [], str(error)
    else:
        symbols, reason = sorted(name for name in dir(_C) if not name.startswith("_")), ""
    return {
        "folder": str(Path(rl_engine.__path__[0]).resolve()),
        "symbols": symbols,
        "extension_error": reason,
        "operators": run_operators(),
    }


def run_operators() -> dict[str, dict[str, Any]]:
    """Run each operator once on this device, and compare its result with float64.

    Where the registry has ``batch_invariant_logp``, it serves the calls of both operators.
    """
    import torch
    from rl_engine.kernels import registry

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_ROWS, VOCAB, generator=generator).to(device).requires_grad_()
    tokens = torch.randint(VOCAB, (NUM_ROWS,), generator=generator).to(device)
    exact = torch.log_softmax(logits.detach().double(), dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    newer = BATCH_INVARIANT if hasattr(registry.OpBackend, f"PYTORCH_{BATCH_INVARIANT.upper()}") else ""

    logp, ratio_kl = (registry.kernel_registry.get_op(newer or name) for name in ("logp", "ratio_kl"))
    with torch.no_grad():
        found = logp(logits, tokens) if newer else logp.apply_fp32(logits, tokens)
    if newer:
        value = ratio_kl(logits, tokens)
    else:  # the ratio is 1, so its gradient is that of the log-prob
        every = torch.ones(NUM_ROWS, dtype=torch.bool, device=device)
        value, _ = ratio_kl(logits, logits.detach(), tokens, every, exact.float())
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    expected = -torch.softmax(logits.detach().double(), dim=-1)
    expected[torch.arange(NUM_ROWS, device=device), tokens] += 1
    errors = {"logp": (logp, found - exact), "ratio_kl": (ratio_kl, gradient - expected)}
    return {
        name: {"class_name": type(op).__name__, "registered": newer, "error": error.abs().max().item()}
        for name, (op, error) in errors.items()
    }


QUESTIONS = {"machine": describe_machine, "rl_kernel": describe_rl_kernel}

if __name__ == "__main__":
    print(json.dumps(QUESTIONS[sys.argv[1]]()))
