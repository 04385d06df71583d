"""An environment packed for a machine that has torch: what travels, what is the machine's, what the record says."""

from __future__ import annotations

import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, SpecError
from rlk_repro.base.files import load_json, sha256_file, write_json
from rlk_repro.cli import app
from rlk_repro.images import environment, packed
from rlk_repro.images.record import Base, ImageRecord, parse_record

PYTHON = ".".join(map(str, sys.version_info[:2]))
SITE = Path("lib", f"python{PYTHON}", "site-packages")
OURS = {
    "rlk-repro": ("rlk_repro/__init__.py", ["pydantic>=2", "gguf>=1 ; extra == 'gguf'"]),
    "pydantic": ("pydantic/__init__.py", ["pydantic_core==1"]),
    "pydantic-core": ("pydantic_core/core.so", []),
    "gguf": ("gguf/__init__.py", []),
    "vllm": ("vllm/nvidia/kernels.so", []),
    "cuda-bindings": ("cuda/bindings.py", []),
}
MACHINES = {
    "torch": "torch/__init__.py",
    "triton": "triton/__init__.py",
    "cuda-toolkit": None,
    "nvidia-cublas": "nvidia/cu13/libcublas.so",
}
LEFT_OUT = {"cuda-tile": "cuda/tile.py", "nvidia-cuda-nvcc": "nvidia/cu13/nvcc", "tokenspeed-triton": "speed/a.py"}


def install(site: Path, name: str, file: str | None, requires: list[str], version: str = "1.0") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", *(f"Requires-Dist: {r}\n" for r in requires)]
    (folder / "METADATA").write_text("".join(lines))
    names = [f"{folder.name}/METADATA,,", f"{folder.name}/RECORD,,", f"../../../bin/{name},,"]
    if file is not None:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(name)
        names.append(f"{file},,")
    (folder / "RECORD").write_text("\n".join(names))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """An environment as `env create` leaves it, in small."""
    folder = tmp_path / "made"
    site = folder / SITE
    for name, (file, requires) in OURS.items():
        install(site, name, file, requires)
    for name, top in {**MACHINES, **LEFT_OUT}.items():
        install(site, name, top, [])
    (site / "nvidia" / "cu13" / "libcublas-link.so").symlink_to("libcublas.so")
    (site / "vllm" / "__pycache__").mkdir()
    (site / "vllm" / "__pycache__" / "old.pyc").touch()
    (site / "sources.pth").write_text(f"{folder}/src/megatron\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "vllm").write_text(f"#!{folder}/bin/python\nimport vllm\n")
    (folder / "bin" / "torch").write_text(f"#!{folder}/bin/python\nimport torch\n")
    (folder / "bin" / "vllm").chmod(0o755)
    (folder / "src" / "vime" / ".git" / "refs").mkdir(parents=True)
    (folder / "src" / "vime" / ".git" / "config").touch()
    for name in ("steps.json", "pyvenv.cfg", "sbom.json", "lock.txt"):
        (folder / name).touch()
    packages: dict[str, Any] = dict.fromkeys([*OURS, *MACHINES, *LEFT_OUT], "1.0")
    base = Base(reference="lock.txt", digest="sha256:0")
    record = ImageRecord(stack="s", platform="cuda-amd64", base=base, commits={}, code={"packages": packages}, build={})
    write_json(folder / "provenance.json", record.to_json())
    return folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    packed.export(made, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site-packages of this process's Python, with torch and NVIDIA's libraries of the same versions."""
    site = tmp_path / "machine"
    for name, file in MACHINES.items():
        install(site, name, file, [], "1.0+cu130" if name == "torch" else "1.0")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    return site


def list_members(bundle: Path) -> set[str]:
    names: set[str] = set()
    for archive in bundle.glob("env-*.tar.gz"):
        with tarfile.open(archive) as members:
            names |= set(members.getnames())
    return names


def test_what_the_machine_has_and_what_no_run_imports_stays_behind(bundle: Path) -> None:
    names = list_members(bundle)
    files = {name for name in names if not name.endswith(("METADATA", "RECORD"))}
    own = {file for file, _ in OURS.values()} | {"sources.pth"}
    assert {name for name in files if name.startswith("lib/")} == {str(SITE / file) for file in own}
    assert files - {str(SITE / file) for file in own} == {
        *("bin/vllm", "lock.txt", "provenance.json", "src", "src/vime", "src/vime/.git"),
        *("src/vime/.git/refs", "src/vime/.git/config"),
    }
    value = load_json(bundle / packed.FILE)
    assert value["reused"] == dict.fromkeys(MACHINES, "1.0")
    assert value["left_out"] == sorted(LEFT_OUT)


def test_the_tool_beside_the_archives_is_this_package_and_what_it_needs(bundle: Path) -> None:
    tops = {path.name for path in (bundle / "tool").iterdir()}
    needed = {"pydantic", "pydantic_core", "rlk_repro"}
    assert tops == needed | {f"{name}-1.0.dist-info" for name in needed}


def test_an_unpacked_environment_links_the_machines_packages_and_states_them(
    bundle: Path, machine: Path, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "env"
    for _ in range(2):  # a repeated call gives the same
        packed.create(folder, bundle)
        site = folder / SITE
        assert (site / "torch").resolve() == machine / "torch"
        assert (site / "nvidia" / "cu13" / "libcublas.so").read_text() == "nvidia-cublas"
        assert (folder / "bin" / "vllm").read_text() == f"#!{folder}/bin/python\nimport vllm\n"
        assert (folder / "bin" / "vllm").stat().st_mode & 0o100
        assert (site / "sources.pth").read_text() == f"{folder}/src/megatron\n"
        assert (folder / "src" / "vime" / ".git" / "refs").is_dir()
        record = parse_record((folder / "provenance.json").read_bytes())
        found = {item.name: item.version for item in metadata.distributions(path=[str(site)])}
        assert record.code["packages"] == found == dict.fromkeys([*OURS, *MACHINES], "1.0") | {"torch": "1.0+cu130"}
        assert record.build["left_out"] == sorted(LEFT_OUT)
        assert set(record.build["reused"]) == set(MACHINES)
    done = proc.run([str(folder / "bin" / "python"), "-c", "import sys; print(sys.prefix)"])
    assert done.stdout.strip() == str(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reused": {"torch": "2.0"}}, "package torch: cannot be reused, got '1.0+cu130', expected 2.0"),
        ({"reused": {"nvidia-cufft": "3"}}, "package nvidia-cufft: cannot be reused, got 'absent', expected 3"),
        ({"python": "3.9"}, f"is another version of Python, got '{PYTHON}', expected 3.9"),
    ],
)
def test_other_versions_are_refused_before_anything_is_unpacked(
    bundle: Path, machine: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    write_json(bundle / packed.FILE, load_json(bundle / packed.FILE) | change)
    with pytest.raises(EnvironmentMissing) as caught:
        packed.create(tmp_path / "env", bundle)
    assert words in str(caught.value)
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_an_archive_that_was_not_packed_is_refused(bundle: Path, machine: Path, tmp_path: Path, is_there: bool) -> None:
    archive = next(bundle.glob("env-*.tar.gz"))
    archive.write_bytes(b"other") if is_there else archive.unlink()
    with pytest.raises(CheckFailed, match="is not the archive that was packed"):
        packed.create(tmp_path / "env", bundle)


def test_archives_end_at_their_size(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ARCHIVE_BYTES", 1)
    packed.export(made, tmp_path / "bundle")
    value = load_json(tmp_path / "bundle" / packed.FILE)
    assert len(value["archives"]) > 5
    assert value["archives"] == {path.name: sha256_file(path) for path in (tmp_path / "bundle").glob("env-*")}


def test_unfinished_environments_and_folders_in_use_are_refused(made: Path, bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is there already"):
        packed.export(made, bundle)
    (made / "provenance.json").unlink()
    with pytest.raises(EnvironmentMissing, match="is not finished"):
        packed.export(made, tmp_path / "other")


def test_the_command_takes_no_stack_for_a_packed_folder(bundle: Path, machine: Path, tmp_path: Path) -> None:
    argv = ["env", "create", str(tmp_path / "env"), "--from", str(bundle)]
    refused = CliRunner().invoke(app, [*argv, "--stack", "2026-11"])
    assert isinstance(refused.exception, SpecError)
    assert CliRunner().invoke(app, argv).exit_code == 0
    assert (tmp_path / "env" / "provenance.json").is_file()


def test_an_export_that_reuses_torch_has_checksums(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_require_lock", lambda *_: None)
    environment.export(None, made, tmp_path / "bundle", reuse_torch=True)  # type: ignore[arg-type]
    listed = (tmp_path / "bundle" / "SHA256SUMS").read_text()
    assert packed.FILE in listed
    assert "tool/rlk_repro/__init__.py" in listed
