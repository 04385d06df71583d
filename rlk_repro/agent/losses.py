"""Find the nodes whose agents have ended, or have shown no sign of life for too long."""

from __future__ import annotations

from rlk_repro.agent.node import POLL_S, has_ended
from rlk_repro.agent.parts import NodePlace
from rlk_repro.agent.pulse import Listener
from rlk_repro.agent.stop import Stop
from rlk_repro.rundir.paths import RunDir


class Followers:
    """The agents of the other nodes; an agent counts as lost after ``lost_s`` seconds without a sign of life."""

    def __init__(self, run_dir: RunDir, place: NodePlace, lost_s: float, stop: Stop) -> None:
        self._run_dir, self._place, self._lost_s, self._stop = run_dir, place, lost_s, stop
        self._pulses = self._listen()

    def find_loss(self, node: str) -> str:
        """Return why a node is lost; an empty text if it is not."""
        if has_ended(self._run_dir, node, self._place.allocation):
            return "the node's agent has ended"
        silence_s = self._pulses[node].measure_silence_s()
        return f"no sign of life for {silence_s:.0f} s" if silence_s > self._lost_s else ""

    def find_lost(self) -> dict[str, str]:
        return {node: reason for node in self._place.followers if (reason := self.find_loss(node))}

    def wait_for_signs(self) -> None:
        """Wait until every node is lost or gave a new sign of life, because Ray notices a dead node much earlier."""
        waiting = self._listen()
        while waiting := {node: pulse for node, pulse in waiting.items() if not self._is_decided(node, pulse)}:
            if self._stop.wait(POLL_S):
                return

    def _is_decided(self, node: str, pulse: Listener) -> bool:
        pulse.measure_silence_s()
        return pulse.has_heard or bool(self.find_loss(node))

    def _listen(self) -> dict[str, Listener]:
        return {node: Listener(self._run_dir.pulse(node)) for node in self._place.followers}
