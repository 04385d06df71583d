"""Renew a stack file: replace tags by their present digests and refs by commits, and add published images.

The file's text is edited in place, so comments and order stay.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from rlk_repro.base import git
from rlk_repro.base.disk import temporary_folder
from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.images.registry import resolve_tag
from rlk_repro.images.stacks import list_platforms
from rlk_repro.spec import Stack
from rlk_repro.spec.load import load_bytes

GIT_TIMEOUT_S: Final = 600.0


@dataclass
class PinnedText:
    """The lines of a YAML file; ``set`` and ``remove`` change single keys and keep all other lines."""

    lines: list[str]

    def find(self, *path: str) -> tuple[yaml.Node, yaml.Node] | None:
        """Return the YAML nodes of a key and its value; None if the key is absent."""
        node: Any = yaml.compose("".join(self.lines), Loader=yaml.SafeLoader)
        found = None
        for name in path:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            found = next(((key, value) for key, value in pairs if str(key.value) == name), None)
            if found is None:
                return None
            node = found[1]
        return found

    def set(self, path: tuple[str, ...], text: str) -> None:
        """Replace the value of a key; if the key is absent, add it to its mapping."""
        value = text if isinstance(yaml.safe_load(text), str) else f'"{text}"'
        found = self.find(*path)
        if found is None:
            self._add(path, value)
            return
        key, old = found
        head = self.lines[key.start_mark.line][: key.start_mark.column]
        rest = self.lines[_last_line(old)][old.end_mark.column :] if old.end_mark.column else "\n"
        self.lines[key.start_mark.line : _last_line(old) + 1] = [f"{head}{path[-1]}: {value}{rest}"]

    def remove(self, path: tuple[str, ...]) -> None:
        """Remove a key, and also its mapping if the mapping is then empty."""
        found = self.find(*path)
        if found is None:
            return
        key, value = found
        del self.lines[key.start_mark.line : _last_line(value) + 1]
        parent = self.find(*path[:-1])
        if parent is not None and not isinstance(parent[1], yaml.MappingNode):
            del self.lines[parent[0].start_mark.line]

    def insert_before(self, name: str, block: list[str]) -> None:
        found = self.find(name)
        line = found[0].start_mark.line if found else len(self.lines)
        self.lines[line:line] = block

    def _add(self, path: tuple[str, ...], value: str) -> None:
        parent = self.find(*path[:-1])
        if parent is None or not isinstance(parent[1], yaml.MappingNode):
            raise SpecError(Problem(".".join(path), "not added", expected=f"{'.'.join(path[:-1])} to be a mapping"))
        first = parent[1].value[0][0]
        if parent[1].flow_style:
            line, column = parent[1].end_mark.line, parent[1].end_mark.column - 1
            text = self.lines[line]
            self.lines[line] = f"{text[:column]}, {path[-1]}: {value}{text[column:]}"
            return
        indent = " " * first.start_mark.column
        line = _last_line(parent[1].value[0][1])
        self.lines.insert(line + 1, f"{indent}{path[-1]}: {value}\n")


def _last_line(node: yaml.Node) -> int:
    # PyYAML puts the end mark of a block at the start of the next node, which may be indented.
    mark, is_block = node.end_mark, isinstance(node, yaml.CollectionNode) and not node.flow_style
    return mark.line - 1 if (is_block or mark.column == 0) and mark.line > node.start_mark.line else mark.line


def renew(text: str, stack: Stack, refs: Mapping[str, str], images: Mapping[str, str]) -> str:
    """Return the text of a stack file with these refs and images.

    If neither refs nor images are given, each tagged base image gets its tag's present digest.
    """
    edited = PinnedText(text.splitlines(keepends=True))
    for platform, base in stack.bases.items():
        if base.tag is not None and not refs and not images:
            digest = resolve_tag(f"{base.reference}:{base.tag}")
            if digest != base.digest:
                edited.set(("bases", platform, "digest"), digest)
    for name, ref in refs.items():
        _renew_pin(edited, stack, name, ref)
    for name, image in images.items():
        _publish(edited, stack, name, image)
    after = "".join(edited.lines)
    load_bytes(Stack, f"updated stack {stack.stack}", after.encode())
    return after


def diff(before: str, after: str, name: str) -> Iterator[str]:
    names = (f"{name} (now)", f"{name} (updated)")
    return iter(difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm=""))


def resolve_ref(repository: str, ref: str) -> tuple[str, str]:
    """Return the commit to which a branch, tag or commit id resolves now, and the hash of that commit's git tree."""
    with temporary_folder("rlk-repro-pin-") as folder:
        git.require("git init", git.ask_git(folder, "init", "--quiet", "--bare", timeout_s=GIT_TIMEOUT_S))
        git.require(f"git fetch {repository}", git.fetch(folder, repository, ref, timeout_s=GIT_TIMEOUT_S))
        names = ("FETCH_HEAD^{commit}", "FETCH_HEAD^{tree}")
        found = git.ask_git(folder, "rev-parse", *names, timeout_s=GIT_TIMEOUT_S)
        commit, tree = git.require("git rev-parse", found).split()
    return commit, tree


def _renew_pin(edited: PinnedText, stack: Stack, name: str, ref: str) -> None:
    pins = {str(known): pin for known, pin in stack.pins.items()}
    if name not in pins:
        raise SpecError(Problem(f"--ref {name}", "no such pin", got=name, expected=" or ".join(pins) or "(none)"))
    commit, tree = resolve_ref(pins[name].repository, ref)
    if commit == pins[name].commit:
        return
    edited.set(("pins", name, "commit"), commit)
    edited.set(("pins", name, "tree"), tree)
    if pins[name].evidence is not None:
        edited.set(("pins", name, "confidence"), "certain")
        found = ref.replace(":", " ")
        edited.set(("pins", name, "evidence"), f"commit of {found} in the repository, found by `rlk-repro images pin`")


def _publish(edited: PinnedText, stack: Stack, platform: str, image: str) -> None:
    reference, _, digest = image.partition("@")
    known = [str(name) for name in list_platforms(stack)]
    if platform not in known or not digest.startswith("sha256:"):
        expected = f"{' or '.join(known) or 'PLATFORM'}=REPOSITORY@sha256:<64 hex digits>"
        raise SpecError(Problem("--image", "no such image", got=f"{platform}={image}", expected=expected))
    if edited.find("images", platform) is not None:
        edited.set(("images", platform, "reference"), reference)
        edited.set(("images", platform, "digest"), digest)
        return
    edited.remove(("unpublished", platform))
    block = [f"  {platform}:\n", f"    reference: {reference}\n", f"    digest: {digest}\n"]
    found = edited.find("images")
    if found is None:
        first = "unpublished" if edited.find("unpublished") else "pins"
        edited.insert_before(first, ["images:\n", *block])
    else:
        edited.lines[_last_line(found[1]) + 1 : _last_line(found[1]) + 1] = block
