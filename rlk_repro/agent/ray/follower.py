"""Start and stop Ray on a follower node as the leader's latest order says."""

from __future__ import annotations

from typing import Self

from rlk_repro.agent.ray.marks import Condition, RayOrder, Report, Want, read_order, write_mark
from rlk_repro.agent.ray.member import RayMember
from rlk_repro.agent.ray.node import RayNode


class RayFollower:
    """Run Ray on a follower node; at the end of the ``with`` block, stop Ray on this node."""

    def __init__(self, member: RayMember) -> None:
        self._member = member
        self._node: RayNode | None = None
        self._order: RayOrder | None = None
        self._told: Report | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._take_down(Condition.LEFT)

    @property
    def session(self) -> int | None:
        return None if self._node is None else self._node.session

    def step(self) -> None:
        place = self._member.place
        order = read_order(self._member.run_dir.ray_order, place.allocation)
        if order is None:
            return
        if self._order is not None and order.number != self._order.number:
            self._take_down()
        if order.want is Want.DOWN:
            self._order = order
            self._take_down()
            return
        if self._node is None:
            self._node = self._make_node(order)
        self._order = order
        self._node.keep(is_joining=order.want is Want.JOIN)
        self._report(order, Condition.UP if self._node.is_up else Condition.ENDED, self._node.reason)

    def _make_node(self, order: RayOrder) -> RayNode:
        member = self._member
        head = order.head.rpartition(":")[0]
        address = member.parts.find_address(member.place.node, (head,), member.plan.profile.ray.interface)
        return member.make_node(member.make_seat(address, order.head), order.use)

    def _take_down(self, condition: Condition = Condition.DOWN) -> None:
        """Report that Ray is down even if Ray was never up: the leader waits for the report."""
        if self._order is None:
            return
        reason, busy = "", tuple[str, ...]()
        if self._node is not None:
            self._node.keep(is_joining=False)
            reason = "" if self._node.is_up else self._node.reason
            busy = self._member.put_away(self._node, self._order)
            self._node = None
        elif self._told is not None and self._told.number == self._order.number:
            return
        self._report(self._order, condition, reason, busy)

    def _report(self, order: RayOrder, condition: Condition, reason: str, busy: tuple[str, ...] = ()) -> None:
        report = Report(allocation=order.allocation, number=order.number, condition=condition, reason=reason, busy=busy)
        if report != self._told:
            write_mark(self._member.run_dir.ray_report(self._member.place.node), report)
            self._told = report
