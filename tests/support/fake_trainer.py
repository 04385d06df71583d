"""A trainer in a file: does what its arguments say, in order, in vime's log dialect.  Starts in 15 ms.

An argument is ``name`` or ``name:value``; the names are the functions of ``ACTIONS``.
"""

import os
import signal
import subprocess
import sys
import time


def say(text: str) -> None:
    """A line of output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def steps(value: str) -> None:
    """COUNT:SECONDS"""
    count, seconds = value.split(":")
    for number in range(int(count)):
        time.sleep(float(seconds))
        times = f"{{'perf/train_time': {seconds}, 'perf/step_time': {seconds}}}"
        say(f"[2026-11-20 13:45:12] train_metric_utils.py:50 - perf {number}: {times}")


def child(path: str) -> None:
    """A child that outlives the trainer; its pid into a file."""
    process = subprocess.Popen(["sleep", "300"])
    write(path, f"{process.pid}\n")


def daemon(path: str) -> None:
    """One in a session of its own, which holds the output open; its pid into a file."""
    process = subprocess.Popen(["sleep", "300"], start_new_session=True)
    write(path, f"{process.pid}\n")


def save(value: str) -> None:
    """TEMPLATE:COUNT rollouts."""
    template, count = value.rsplit(":", 1)
    for number in range(int(count)):
        write(template.replace("{rollout_id}", str(number)), f"rollout {number}")


def note(value: str) -> None:
    """PATH:TEXT"""
    path, _, text = value.partition(":")
    write(path, text)


def record(value: str) -> None:
    """PATH:TEXT, all at once, as rlk_repro.integration writes its records."""
    path, _, text = value.partition(":")
    write(f"{path}.part", text)
    os.rename(f"{path}.part", path)  # noqa: PTH104


def write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, text.encode())
    os.close(handle)


ACTIONS = {
    "begin": lambda _: say(f"begin {os.getpid()}"),
    "end": lambda _: say(f"end {os.getpid()}"),
    "print": say,
    "flood": lambda size: say("x" * (int(size) - 1)),
    "env": lambda name: say(f"{name}={os.environ.get(name)}"),
    "steps": steps,
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "exit": lambda code: sys.exit(int(code)),
    "kill": lambda name: os.kill(os.getpid(), signal.Signals[name]),
    "ignore-term": lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "child": child,
    "daemon": daemon,
    "save": save,
    "note": note,
    "record": record,
}

if __name__ == "__main__":
    for action in sys.argv[1:]:
        name, _, value = action.partition(":")
        ACTIONS[name](value)
