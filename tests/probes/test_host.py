from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.probes import host
from rlk_repro.rundir.manifest import Unknown
from tests.support.probe_examples import HOST, write_tree


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
