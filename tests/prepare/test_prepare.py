"""``prepare`` against a real hub on loopback, mirrors and the files it makes itself."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base.files import sha256_file
from rlk_repro.prepare.contents import load_contents
from rlk_repro.prepare.steps import describe_growth, measure_folder
from tests.support.prepare_examples import COMMIT, LATER, HubServer, fill_hub, from_hub, words

Call = Callable[..., tuple[int, str, str]]
MODEL = f"models/acme--tiny@{COMMIT[:12]}"
WANTED = {"config.json", "tokenizer.json", "model.safetensors.index.json",
          *(f"model-{number:05}.safetensors" for number in range(3))}  # fmt: skip


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return tmp_path / "prepared"


def run(call: Call, prepared: Path, *more: str) -> dict[str, Any]:
    code, out, error = call(*words("--cache", str(prepared), "--json", *more))
    assert (code, error) == (0, "")
    value: dict[str, Any] = json.loads(out)
    return value


def list_all(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_pinned_model_and_data_set_are_fetched_whole_and_recorded(hub: HubServer, call: Call, prepared: Path) -> None:
    answer = run(call, prepared, *from_hub())
    assert answer["unpinned"] == []
    assert [part["kind"] for part in answer["parts"]] == ["data", "model"]
    assert set(list_all(prepared / MODEL)) == WANTED
    served = hub.repositories["models/acme/tiny"][COMMIT]
    for name in WANTED:
        assert (prepared / MODEL / name).read_bytes() == served[name]
    contents = load_contents(prepared / MODEL)
    assert contents is not None
    assert contents.source == {"repository": "acme/tiny", "revision": COMMIT, "is_pinned": True}
    assert {name: item.sha256 for name, item in contents.files.items()} == {
        name: sha256_file(prepared / MODEL / name) for name in WANTED
    }
    assert list_all(prepared / "datasets") == [
        f".acme--sums@{COMMIT[:12]}.lock",
        f"acme--sums@{COMMIT[:12]}.json",
        f"acme--sums@{COMMIT[:12]}/data/train.jsonl",
    ]


def test_existing_files_are_not_fetched_again(hub: HubServer, call: Call, prepared: Path) -> None:
    first = run(call, prepared, *from_hub())
    asked = dict(hub.gets)
    assert run(call, prepared, *from_hub(), "--verify") == first
    assert hub.gets == asked
    assert run(call, prepared, *from_hub(), "--offline") == first


def test_an_unpinned_revision_is_resolved_and_reported(hub: HubServer, call: Call, prepared: Path) -> None:
    answer = run(call, prepared, *from_hub(None))
    assert answer["unpinned"] == [
        {"path": "workload.data.source.revision", "revision": COMMIT},
        {"path": "workload.model.source.revision", "revision": COMMIT},
    ]
    fill_hub(hub, LATER)
    code, out, _ = call(*words("--cache", str(prepared), *from_hub(None)))
    assert code == 0
    assert (
        f"not pinned: the hub served {COMMIT}; review this revision, then write it to workload.model.source.revision\n"
        in out
    )


def test_a_file_that_is_not_what_the_hub_announced_is_refused(hub: HubServer, call: Call, prepared: Path) -> None:
    hub.damaged = {"model-00001.safetensors"}
    code, _, error = call(*words("--cache", str(prepared), *from_hub()))
    assert code == 5
    assert (
        "acme/tiny@111111111111 model-00001.safetensors: differs from its expected size or hash, also when fetched"
        in error
    )
    assert hub.gets["model-00001.safetensors"] == 2
    assert not (prepared / MODEL).exists()
    hub.damaged = set()
    run(call, prepared, *from_hub())
    assert hub.gets["model-00000.safetensors"] == 1


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        (from_hub("3" * 40), 2, "hub acme/sums: has no such commit, got '3333"),
        (
            ["--set", "workload.model.source={kind: hub, repository: acme/none}"],
            2,
            "acme/none: the repository does not exist",
        ),
        (["--set", "workload.data.source={kind: hub, repository: acme/sums, file: no.jsonl}"], 2, "lacks the files"),
        ([*from_hub(), "--offline"], 3, "is not in the mirror, and --offline forbids the hub"),
        ([*from_hub(), "--mirror", "/nowhere/at/all"], 2, "--mirror: no such folder"),
        (["--set", "workload.model.arguments.vocab-size=100"], 2, "is too small for the byte tokenizer, got 100"),
        (["--hardware", "cpu"], 2, "--hardware: run vime-smoke has no layout of this name, got 'cpu'"),
    ],
)
def test_each_failed_download_is_reported(
    hub: HubServer, call: Call, prepared: Path, more: list[str], code: int, text: str
) -> None:
    found, _, error = call(*words("--cache", str(prepared), *more))
    assert (found, text in error) == (code, True), error


def test_a_hub_outage_keeps_existing_files(
    hub: HubServer, call: Call, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    code, _, error = call(*words("--cache", str(prepared), *from_hub()))
    assert code == 3
    assert error.endswith("hint: try again: files that were fetched are kept\n")


def test_without_the_client_of_the_hub_the_error_says_how_to_get_it(
    call: Call, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub.errors", None)
    code, _, error = call(*words("--cache", str(prepared), *from_hub()))
    assert code == 3
    assert error == (
        "rlk-repro: python module huggingface_hub: missing, expected the hub's client, or --mirror DIR --offline\n"
        "  hint: python -m pip install 'rlk-repro[prepare]'\n"
    )


@pytest.mark.parametrize("revision", [COMMIT, None])
def test_a_copy_of_a_prepared_directory_is_a_mirror(
    hub: HubServer, call: Call, prepared: Path, tmp_path: Path, revision: str | None
) -> None:
    first = run(call, prepared, *from_hub())
    mirror = tmp_path / "mirror"
    shutil.copytree(prepared, mirror)
    hub.repositories.clear()
    again = run(call, tmp_path / "other", *from_hub(revision), "--mirror", str(mirror), "--offline")
    assert [part["digest"] for part in again["parts"]] == [part["digest"] for part in first["parts"]]


def test_the_cache_of_the_hubs_own_library_is_a_mirror(
    hub: HubServer, call: Call, prepared: Path, tmp_path: Path
) -> None:
    from huggingface_hub import hf_hub_download

    wanted = [("model", "acme/tiny", name) for name in WANTED] + [("dataset", "acme/sums", "data/train.jsonl")]
    for kind, name, file in wanted:
        cache = tmp_path / "cache"
        hf_hub_download(name, file, repo_type=kind, revision="main", cache_dir=cache, endpoint=hub.url)
    hub.repositories.clear()
    answer = run(call, prepared, *from_hub(), "--mirror", str(tmp_path / "cache"), "--offline")
    assert [part["num_files"] for part in answer["parts"]] == [1, len(WANTED)]
    run(call, tmp_path / "unpinned", *from_hub(None), "--mirror", str(tmp_path / "cache"), "--offline")


def test_a_mirror_is_not_believed(hub: HubServer, call: Call, prepared: Path, tmp_path: Path) -> None:
    run(call, prepared, *from_hub())
    weights = prepared / MODEL / "model-00002.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    code, _, error = call(
        *words("--cache", str(tmp_path / "other"), *from_hub(), "--mirror", str(prepared), "--offline")
    )
    assert code == 5
    assert "model-00002.safetensors: differs from its expected size or hash, also when fetched again" in error


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "200071 bytes, got '200070 bytes'"),
        (lambda path: path.unlink(), "a readable file"),
        (lambda path: path.write_bytes(b"?" + path.read_bytes()[1:]), "sha256 of its ends"),
    ],
    ids=["cut off", "gone", "changed"],
)
def test_damaged_files_are_named(
    hub: HubServer, call: Call, prepared: Path, damage: Callable[[Path], object], text: str
) -> None:
    run(call, prepared, *from_hub())
    damage(prepared / MODEL / "model-00001.safetensors")
    code, _, error = call(*words("--cache", str(prepared), *from_hub()))
    assert code == 1
    assert "prepared.model.model-00001.safetensors: differs from its record" in error
    assert f"hint: remove {prepared / MODEL} and prepare again" in error


def test_a_folder_without_a_record_does_not_count_as_complete(call: Call, prepared: Path) -> None:
    (prepared / MODEL).mkdir(parents=True)
    (prepared / MODEL / "config.json").write_text("{}")
    code, _, error = call(*words("--cache", str(prepared), *from_hub()[:2]))
    assert code == 2
    assert "exists without a record, so it may be incomplete" in error


def test_too_little_space_is_reported_before_anything_is_written(
    hub: HubServer, call: Call, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlk_repro.prepare.steps.SPARE_BYTES", 1 << 60)
    code, _, error = call(*words("--cache", str(prepared), *from_hub()))
    assert code == 3
    assert "does not have enough space" in error
    assert "expected 587.8 KiB for the files and" in error
    assert not prepared.exists()


def test_a_dry_run_shows_sizes_and_writes_nothing(hub: HubServer, call: Call, prepared: Path) -> None:
    code, out, _ = call(*words("--cache", str(prepared), *from_hub(), "--dry-run"))
    assert code == 0
    assert out == (
        f"data       missing  {prepared}/datasets/acme--sums@111111111111  (1.3 KiB)\n"
        f"model      missing  {prepared}/{MODEL}  (586.5 KiB)\n"
    )
    assert not prepared.exists()
    assert hub.gets["config.json"] == 0


def test_runs_that_make_everything_themselves_need_nothing(call: Call, prepared: Path) -> None:
    code, out, _ = call("prepare", "smoke", "--hardware", "cpu", "--cache", str(prepared))
    assert (code, out) == (0, "nothing to prepare: the workload makes everything itself\n")


def test_a_link_to_nothing_is_no_place_for_prepared_files(call: Call, tmp_path: Path) -> None:
    """For example a link to a file system that is not mounted."""
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    code, _, err = call("prepare", "qwen3-4b-random-live", "--hardware", "h200", "--cache", str(tmp_path / "link"))
    assert code == 3
    assert "link" in err
    assert err.endswith("cannot be written (File exists)\n  hint: --cache DIR names another folder\n")


# The size of a growing folder, which others change while it is measured.


def test_a_folder_that_vanishes_during_the_measurement_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "incoming"
    for folder in (tmp_path / "kept", gone):
        folder.mkdir()
        (folder / "part").write_bytes(b"x" * 100)
    listed = os.scandir

    def list_after_removal(folder: Any) -> Any:
        if str(folder) == str(gone):
            gone.joinpath("part").unlink(missing_ok=True)
            gone.rmdir()
        return listed(folder)

    assert measure_folder(tmp_path) == 200
    monkeypatch.setattr(os, "scandir", list_after_removal)
    assert measure_folder(tmp_path) == 100


def test_a_folder_that_is_absent_has_no_size(tmp_path: Path) -> None:
    assert measure_folder(tmp_path / "absent") == 0


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B of 976.6 KiB"), (9_000, "8.8 KiB of 976.6 KiB, 4.4 KiB/s"),
     (10_000, "9.8 KiB of 976.6 KiB, 4.9 KiB/s, 3 min 18 s left"), (1_000_000, "976.6 KiB of 976.6 KiB, 488.3 KiB/s")],
)  # fmt: skip
def test_the_time_left_is_given_from_one_percent_on(size_bytes: int, text: str) -> None:
    assert describe_growth(size_bytes, 0, 1_000_000, 2.0) == text
