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


def test_a_machine_without_a_network_has_reasons(tmp_path):
    facts = network.probe(tmp_path)
    assert facts["interfaces"] == Unknown("/sys/class/net has no interface")
    assert facts["rdma_devices"] == Unknown("/sys/class/infiniband has no device")
    assert facts["ephemeral_ports"] == Unknown("/proc/sys/net/ipv4/ip_local_port_range absent")
    assert facts["modules"] == dict.fromkeys(network.MODULES, Unknown("/sys/module absent"))


def test_a_speed_that_the_driver_does_not_know_is_unknown(tmp_path):
    facts = network.probe(write_tree(tmp_path, {"/sys/class/net/eth0/speed": "-1\n", "/sys/class/net/eth0/mtu": "x"}))
    interfaces = facts["interfaces"]
    assert isinstance(interfaces, dict)
    assert interfaces["eth0"]["speed_mbps"] == Unknown("the driver reports no speed")
    assert interfaces["eth0"]["mtu"] == Unknown("/sys/class/net/eth0/mtu: 'x' is not a whole number")
