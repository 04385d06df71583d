"""Reading sources runs nothing from them: no filter, hook, monitor, pager or transport."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlk_repro.base import proc
from rlk_repro.base.trees import hash_tree
from rlk_repro.probes.checkout import probe_checkout
from rlk_repro.rundir.manifest import Unknown
from tests.security.strangers import pack_stranger, write_program

AUTHOR = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str, is_expected: bool = True) -> str:
    done = proc.run(["git", *AUTHOR, *words], cwd=folder)
    assert done.is_ok or not is_expected, done.stderr
    return done.stdout.strip()


def make_checkout(folder: Path) -> Path:
    """Make a clean checkout with a package of vime's name."""
    (folder / "vime").mkdir(parents=True)
    (folder / "vime" / "__init__.py").write_text("x = 1\n")
    (folder / ".gitignore").write_text("*.so\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "all")
    return folder


def make_hostile(folder: Path, program: Path) -> Path:
    """Make a checkout that uses every program setting of git, and a changed file for the filters."""
    make_checkout(folder)
    (folder / ".gitattributes").write_text("* filter=evil diff=evil\n")
    settings = {
        "filter.evil.clean": program,
        "filter.evil.smudge": program,
        "filter.evil.process": program,
        "filter.evil.required": "true",
        "diff.evil.command": program,
        "diff.evil.textconv": program,
        "diff.external": program,
        "core.fsmonitor": program,
        "core.pager": program,
        "core.editor": program,
        "core.sshCommand": program,
        "core.askPass": program,
        "core.gitProxy": program,
        "core.alternateRefsCommand": program,
        "gpg.program": program,
        "log.showSignature": "true",
        "credential.helper": f"!{program}",
        "uploadpack.packObjectsHook": program,
        "pager.ls-files": program,
        "pager.ls-tree": program,
        "pager.rev-parse": program,
        "alias.ls-files": f"!{program}",
        "alias.ls-tree": f"!{program}",
        "alias.rev-parse": f"!{program}",
        # Git would fetch missing objects by any transport.
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{program}",
        "protocol.allow": "always",
        "protocol.ext.allow": "always",
        "core.hooksPath": folder / "hooks",
    }
    included = folder / ".git" / "included"
    for name, value in settings.items():
        git(folder, "config", "--file", str(included), name, str(value))
    hooks = folder / "hooks"
    hooks.mkdir()
    for name in ("post-index-change", "reference-transaction", "post-checkout", "fsmonitor-watchman", "pre-commit"):
        (hooks / name).symlink_to(program)
    (folder / "vime" / "__init__.py").write_text("x = 2\n")
    with (folder / ".git" / "config").open("a") as stream:
        stream.write(f'[include]\n\tpath = "{included}"\n')
    return folder


def test_a_dry_run_of_a_bundle_runs_nothing_of_its_author(call, tmp_path: Path) -> None:
    program, mark = write_program(tmp_path)
    hostile = make_hostile(tmp_path / "theirs", program)
    bundle = pack_stranger(tmp_path / "id", profile={"cluster": "local", "env": {"PYTHONPATH": str(hostile)}})
    code, out, err = call("replay", str(bundle), "--dry-run")
    assert code == 0, err
    assert not mark.exists()
    assert "PYTHONPATH" not in out + err


def test_a_hostile_checkout_is_described_and_runs_nothing(tmp_path: Path) -> None:
    program, mark = write_program(tmp_path)
    hostile = make_hostile(tmp_path / "theirs", program)
    head = (hostile / ".git" / (hostile / ".git/HEAD").read_text().split()[1]).read_text().strip()
    facts = probe_checkout(hostile / "vime")
    assert not mark.exists()
    assert (facts["commit"], facts["is_dirty"]) == (head, True)
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


@pytest.mark.parametrize("head", ["ref: ../../secret", "ref: refs/../../../secret", "x" * 10_000, "ref: refs/heads/a"])
def test_a_head_that_leads_elsewhere_is_no_commit(tmp_path: Path, head: str) -> None:
    folder = make_checkout(tmp_path / "theirs")
    for path in (tmp_path / "secret", folder / "secret"):
        path.write_text("a" * 40)
    (folder / ".git" / "HEAD").write_text(head)
    assert isinstance(probe_checkout(folder)["commit"], Unknown)


def test_a_reference_that_leads_to_itself_comes_to_an_end(tmp_path: Path) -> None:
    folder = make_checkout(tmp_path / "theirs")
    name = (folder / ".git" / "HEAD").read_text().split()[1]
    (folder / ".git" / name).write_text(f"ref: {name}\n")
    assert isinstance(probe_checkout(folder)["commit"], Unknown)


def test_a_pipe_in_the_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    folder = make_checkout(tmp_path / "theirs")
    (folder / "vime" / "__init__.py").unlink()
    os.mkfifo(folder / "vime" / "__init__.py")
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


def test_a_repository_in_another_makes_that_one_dirty(tmp_path: Path) -> None:
    outer = make_checkout(tmp_path / "outer")
    make_checkout(outer / "nested")
    assert probe_checkout(outer)["is_dirty"] is True


def test_the_tree_is_that_of_the_files(tmp_path: Path) -> None:
    folder = make_checkout(tmp_path / "a")
    (folder / "new ünï\n").write_text("")
    (folder / "built.so").write_text("ignored")
    (folder / ".git" / "info" / "exclude").write_text("notes\n")
    (folder / "notes").write_text("mine")
    facts = probe_checkout(folder)
    assert facts["is_dirty"] is True
    assert facts["tree"] == hash_tree(folder, (".git", "*.so", "notes"))
