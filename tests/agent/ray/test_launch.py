"""How Ray is started on a node: its share of the shared memory."""

from __future__ import annotations

from rlk_repro.agent.ray.launch import RaySeat, find_store_bytes, render_start


def test_ray_s_object_store_gets_half_of_the_shared_memory_and_no_more_than_ray_would_take() -> None:
    gib = 1 << 30
    assert find_store_bytes(64 * gib, 2000 * gib) == 32 * gib
    assert find_store_bytes(1000 * gib, 100 * gib) == 30 * gib
    assert find_store_bytes(1000 * gib, 2000 * gib) == 200 * 10**9
    assert find_store_bytes(64 << 20, gib) == 80 << 20
    seat = RaySeat(index=1, node="n1", address="192.0.2.2", head="192.0.2.1:6379", num_gpus=8, first_port=6379,
                   has_client=True, store_bytes=5 * gib)  # fmt: skip
    argv = render_start(seat, "/tmp/x")
    assert argv[argv.index("--object-store-memory") + 1] == str(5 * gib)
