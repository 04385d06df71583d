from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.probes import container, environment, folder, host, network
from rlk_repro.rundir.manifest import Unknown
from tests.support.probe_examples import HOST, NETWORK, write_tree


def test_a_server_is_described_from_its_files(tmp_path):
    facts = host.probe(write_tree(tmp_path, HOST))
    expected = {
        "hostname": "node-1",
        "kernel": "6.8.0-60-generic",
        "cmdline": "iommu=pt",
        "os": "Ubuntu 24.04.3 LTS",
        "clock_source": "tsc",
        "is_userns_restricted": True,
        "mounts": {"/": "overlay", "/dev/shm": "tmpfs", "network": "lustre"},
        "cpu_model": "Intel(R) Xeon(R) Platinum 8480C",
        "num_cpus": 2,
        "num_sockets": 2,
        "num_numa_nodes": 2,
        "is_smt_active": True,
        "governor": "performance,powersave",
        "numa_balancing": 1,
        "transparent_hugepages": "madvise",
        "memory_total_gib": 2016,
        "memory_available_gib": 1907.3,
        "cgroup_version": 2,
        "cgroup_cpu_max": 16.0,
        "cgroup_memory_max_gib": 64.0,
        "load_average": [0.5, 0.25, 0.1],
        "uptime_s": 86400.12,
        "trainer_processes": ["ray::IDLE", "raylet"],
    }
    assert {name: facts[name] for name in expected} == expected


def test_an_empty_machine_gives_reasons_and_no_error(tmp_path):
    facts = host.probe(tmp_path)
    assert facts["kernel"] == Unknown("/proc/sys/kernel/osrelease absent")
    assert facts["governor"] == Unknown("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor absent")
    assert facts["num_cpus"] == Unknown("/sys/devices/system/cpu absent")
    assert facts["cgroup_version"] == Unknown("/sys/fs/cgroup absent")


def test_grace_processors_are_named_by_their_core():
    assert host.parse_cpu_model("processor : 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n") == "Neoverse-V2"
    assert host.parse_cpu_model("CPU implementer : 0x4e\nCPU part : 0x004\n") == "Arm implementer 0x4e part 0x004"
    assert host.parse_cpu_model("processor : 0") == Unknown("/proc/cpuinfo names no model")


def test_limits_of_the_older_control_groups_count_too(tmp_path):
    facts = host.probe(
        write_tree(
            tmp_path,
            {
                "/proc/self/cgroup": "4:memory:/slurm/uid_1\n1:cpu,cpuacct:/slurm\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "/sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": f"{8 << 30}\n",
                "/sys/fs/cgroup/cpu/slurm/cpu.cfs_quota_us": "350000\n",
                "/sys/fs/cgroup/cpu/slurm/cpu.cfs_period_us": "100000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            },
        )
    )
    assert (facts["cgroup_version"], facts["cgroup_cpu_max"], facts["cgroup_memory_max_gib"]) == (1, 3.5, 8.0)


def test_no_limit_is_recorded_as_unlimited(tmp_path):
    facts = host.probe(write_tree(tmp_path, {"/sys/fs/cgroup/cgroup.controllers": "cpu", "/proc/self/cgroup": "0::/"}))
    assert (facts["cgroup_cpu_max"], facts["cgroup_memory_max_gib"]) == ("unlimited", "unlimited")


@settings(deadline=None)
@given(st.text())
def test_no_text_of_a_file_crashes_a_parser(text):
    for parse in (
        host.comparable_cmdline,
        host.parse_os_release,
        host.parse_cpu_model,
        host.count_cpu_list,
        host.parse_bracketed,
        host.parse_meminfo,
        host.parse_mounts,
        host.parse_cpu_max,
    ):
        assert parse(text) is not None


def test_runs_that_other_agents_have_in_hand_are_found(tmp_path: Path) -> None:
    def write(pid: int, *argv: str) -> None:
        write_tree(tmp_path, {f"/proc/{pid}/cmdline": "".join(f"{part}\0" for part in argv)})

    agent = ("/usr/bin/python3", "-m", "rlk_repro.job")
    write(1, "/sbin/init")
    write(10, *agent, "/home/x/runs/smoke/mine", "--resume")
    write(11, *agent, "/home/x/runs/smoke/mine", "--node", "b")
    write(12, *agent, "/home/y/runs/smoke/theirs", "--resume")
    write(14, "python", "-m", "rlk_repro.bench.module", "/home/y/runs/smoke/theirs")
    write(15, "vi", "rlk_repro.job")
    write(16)
    assert host.find_other_runs(tmp_path, 10) == ["theirs"]
    assert host.find_other_runs(tmp_path, 99) == ["mine", "theirs"]


# Facts of the run directory's file system, and of the kernel's clock.

MOUNTS = "overlay / overlay rw 0 0\nfs:/x /lustre lustre rw 0 0\nnas:/y /lustre/my\\040runs nfs4 rw 0 0\n"


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/home/x", "overlay"),
        ("/lustre/y/z", "lustre"),
        ("/lustre/my runs/a", "nfs4"),
        ("/lustre-old", "overlay"),
    ],
)
def test_the_deepest_mount_point_above_a_folder_decides(path: str, filesystem: str) -> None:
    assert folder.find_filesystem(MOUNTS, Path(path)) == filesystem


def test_a_folder_that_is_absent_gives_reasons(tmp_path: Path) -> None:
    assert set(folder.probe_folder(tmp_path)) == {"filesystem", "free_gib", "free_inodes"}
    facts = folder.probe_folder(tmp_path / "absent")
    assert facts["free_gib"] == Unknown("statvfs: No such file or directory")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0x2001, {"clock_is_synchronized": True, "clock_max_error_s": 0.25}),
        (0x40, {"clock_is_synchronized": False, "clock_max_error_s": Unknown("this clock is not synchronized")}),
    ],
)
def test_the_kernel_reports_whether_its_clock_is_synchronized(status: int, expected: dict[str, object]) -> None:
    data = struct.pack("@i4xqqqqi", 0, 0, 0, 250_000, 100, status)
    assert host.read_timex(data + bytes(100)) == expected


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


TOKEN = "hf_" + "aB3" * 11


def test_only_variables_that_steer_a_run_are_recorded():
    found = environment.select(
        {
            "NCCL_DEBUG": "INFO",
            "VLLM_HOST_IP": "10.0.0.7",
            "RAY_ADDRESS": "10.0.0.7:6379",
            "RAY_HEAD_SVC_SERVICE_HOST": "10.0.0.8",
            "RAY_HEAD_PORT_6379_TCP_ADDR": "10.0.0.8",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_USER": "me",
            "SLURM_JOB_ACCOUNT": "mine",
            "SLURM_SUBMIT_DIR": "/home/me",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": "/home/me",
            "HOME": "/home/me",
            "AWS_SECRET_ACCESS_KEY": "x" * 40,
        }
    )
    assert found == {"NCCL_DEBUG": "INFO", "PYTHONHASHSEED": "0", "SLURM_JOB_ID": "17"}


def test_values_that_look_like_secrets_are_redacted_and_their_names_stay():
    found = environment.select(
        {"VLLM_API_KEY": "x9Y8" * 5, "VIME_EXTRA": f"a {TOKEN}", "RAY_URL": "redis://me:" + "tulips@host"}
    )
    assert found == {"RAY_URL": "<redacted>", "VIME_EXTRA": "<redacted>", "VLLM_API_KEY": "<redacted>"}


@pytest.mark.parametrize(
    ("files", "variables", "runtime"),
    [
        ({}, {}, "none"),
        ({"/.dockerenv": ""}, {}, "docker"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"/run/.containerenv": ""}, {}, "podman"),
        ({"/.lock": ""}, {}, "enroot"),
        ({"/.lock": ""}, {"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
        ({"/proc/self/cgroup": "0::/kubepods.slice/cri-containerd-1.scope"}, {}, "kubernetes"),
        ({"/proc/self/cgroup": "0::/system.slice/docker-1.scope"}, {}, "docker"),
        ({"/proc/self/cgroup": "0::/"}, {"container": "lxc"}, "lxc"),
    ],
)
def test_the_runtime_is_recognised_by_its_marks(tmp_path, files, variables, runtime):
    facts = container.probe(write_tree(tmp_path, files), variables)
    assert (facts["runtime"], facts["is_container"]) == (runtime, runtime != "none")


def test_the_digest_comes_from_the_launcher_first(tmp_path):
    write_tree(tmp_path, {container.PROVENANCE: '{"image_digest": "sha256:aa"}'})
    assert container.probe(tmp_path, {"RLK_REPRO_IMAGE_DIGEST": "sha256:bb"})["image_digest"] == "sha256:bb"
    assert container.probe(tmp_path, {})["image_digest"] == "sha256:aa"


@pytest.mark.parametrize("record", ["{", "[]", '{"image_digest": null}', '{"image_digest": 3}'])
def test_an_image_without_a_digest_says_why(tmp_path, record):
    write_tree(tmp_path, {container.PROVENANCE: record, "/.dockerenv": ""})
    reason = "RLK_REPRO_IMAGE_DIGEST is not set and /opt/rlk-repro/provenance.json names no image_digest"
    assert container.probe(tmp_path, {})["image_digest"] == Unknown(reason)


def test_an_environments_record_is_named_by_its_own_path(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    write_tree(tmp_path, {"/lock.txt": "", "/provenance.json": "{"})
    assert container.load_provenance(Path("/")) == Unknown(f"{tmp_path}/provenance.json is not JSON")


def test_the_kernel_counts_its_kills_for_memory() -> None:
    assert host.count_oom_kills() is not None
