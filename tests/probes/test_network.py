from pathlib import Path

from rlk_repro.probes import network
from rlk_repro.rundir.manifest import Unknown
from tests.support.probe_examples import NETWORK, write_tree


def test_interfaces_and_rdma_devices_are_described_without_addresses(tmp_path):
    root = write_tree(tmp_path, NETWORK)
    driver = root / "sys/class/net/ens1/device/driver"
    driver.symlink_to(Path("/sys/bus/pci/drivers/mlx5_core"))
    facts = network.probe(root)
    assert facts["interfaces"] == {
        "ens1": {"mtu": 9000, "speed_mbps": 200000, "driver": "mlx5_core", "state": "up", "numa_node": 1}
    }
    assert facts["rdma_devices"] == {
        "mlx5_0": {
            "firmware": "28.39.3560",
            "board": "MT_0000000838",
            "model": "MT4129",
            "numa_node": 0,
            "ports": {
                "1": {
                    "state": "ACTIVE",
                    "physical_state": "LinkUp",
                    "rate": "400 Gb/sec (4X NDR)",
                    "link_layer": "InfiniBand",
                }
            },
        }
    }
    assert "aa:bb" not in str(facts)


def test_a_verbs_device_opens_or_says_why_not(tmp_path):
    sysfs = "/sys/class/infiniband/mlx5_{}/device/infiniband_verbs/uverbs{}/dev"
    files = {sysfs.format(0, 0): "231:192\n", sysfs.format(1, 1): "231:193\n", "/dev/infiniband/uverbs0": ""}
    root = write_tree(tmp_path, {**NETWORK, **files, "/sys/class/infiniband/mlx5_2/fw_ver": "1\n"})
    assert network.probe(root)["rdma_verbs"] == {
        "mlx5_0": "opens",
        "mlx5_1": "/dev/infiniband/uverbs1: No such file or directory",
        "mlx5_2": "no verbs device",
    }
    assert network.probe(tmp_path / "none")["rdma_verbs"] == Unknown("/sys/class/infiniband has no device")


def test_modules_are_absent_loaded_or_a_version(tmp_path):
    modules = network.probe(write_tree(tmp_path, NETWORK))["modules"]
    assert isinstance(modules, dict)
    assert {modules[name] for name in ("mlx5_core", "efa")} == {"absent"}
    assert (modules["gdrdrv"], modules["nvidia_peermem"]) == ("loaded", "580.159.04")
