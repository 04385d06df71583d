"""``prepare`` against a real hub on loopback, mirrors and the files it makes itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base.errors import RlkReproError
from rlk_repro.base.files import sha256_file
from rlk_repro.prepare.contents import load_contents
from rlk_repro.prepare.model_checks import check_model
from rlk_repro.spec import VimeWorkload
from rlk_repro.spec.load import load_run
from tests.support.prepare_examples import COMMIT, LATER, HubServer, fill_hub, from_hub, serve_hub, words

Call = Callable[..., tuple[int, str, str]]
MODEL = f"models/acme--tiny@{COMMIT[:12]}"
WANTED = {"config.json", "tokenizer.json", "model.safetensors.index.json",
          *(f"model-{number:05}.safetensors" for number in range(3))}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    with serve_hub() as server:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        fill_hub(server)
        yield server


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
    assert "acme/tiny@111111111111 model-00001.safetensors: differs from its expected size or hash" in error
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
        (["--hardware", "cpu"], 2, "--hardware: run vime-smoke has no layout for this hardware, got 'cpu'"),
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
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    code, _, error = call(*words("--cache", str(prepared), *from_hub()))
    assert code == 3
    assert error == (
        "rlk-repro: python module huggingface_hub: missing, expected the hub's client, or --mirror DIR --offline\n"
        "  hint: python -m pip install 'rlk-repro[prepare]'\n"
    )


def test_a_copy_of_a_prepared_directory_is_a_mirror_but_is_not_believed(
    hub: HubServer, call: Call, prepared: Path, tmp_path: Path
) -> None:
    first = run(call, prepared, *from_hub())
    mirror = tmp_path / "mirror"
    shutil.copytree(prepared, mirror)
    hub.repositories.clear()
    more = ("--mirror", str(mirror), "--offline")
    for number, revision in enumerate((COMMIT, None)):
        again = run(call, tmp_path / str(number), *from_hub(revision), *more)
        assert [part["digest"] for part in again["parts"]] == [part["digest"] for part in first["parts"]]
    weights = mirror / MODEL / "model-00002.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    code, _, error = call(*words("--cache", str(tmp_path / "other"), *from_hub(), *more))
    assert code == 5
    assert "model-00002.safetensors: differs from its expected size or hash" in error


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


DENSE, MOE = "qwen3-4b", "qwen3-30b-a3b"
QWEN3_4B = {
    "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 36, "intermediate_size": 9728,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_30B = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 48, "intermediate_size": 1,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    "rope_parameters": {"rope_theta": 1e6}, "rope_theta": 10000, "tie_word_embeddings": False,
}  # fmt: skip
OTHER = "differs from the run's"


# a configuration, and what it says that the run does not
@pytest.mark.parametrize(
    ("run", "config", "problem"),
    [
        (DENSE, QWEN3_4B, ""),
        (DENSE, {"text_config": QWEN3_4B}, ""),
        (DENSE, {"architectures": ["Qwen3ForCausalLM"]}, ""),
        (DENSE, {**QWEN3_4B, "rope_theta": 5000000}, f"rope_theta: {OTHER} rotary-base"),
        (DENSE, {**QWEN3_4B, "rope_parameters": {"rope_theta": 5e6}}, f"rope_theta: {OTHER} rotary-base"),
        (DENSE, {**QWEN3_4B, "num_experts": 128}, f"num_experts: {OTHER} num-experts"),
        (DENSE, {**QWEN3_4B, "num_key_value_heads": 4}, f"num_key_value_heads: {OTHER} num-query-groups"),
        (DENSE, {**QWEN3_4B, "tie_word_embeddings": False}, f"tie_word_embeddings: {OTHER} untie"),
        (DENSE, {"text_config": {**QWEN3_4B, "rms_norm_eps": 1e-5}}, f"rms_norm_eps: {OTHER} norm-epsilon"),
        (MOE, QWEN3_30B, ""),  # no layer is dense, so that the size of a dense one does not matter
        (MOE, {**QWEN3_30B, "num_experts": 64}, f"num_experts: {OTHER} num-experts"),
        (MOE, {**QWEN3_30B, "num_experts": None}, f"num_experts: {OTHER} num-experts"),
        (MOE, [], "config.json: is no JSON object"),
    ],
)
def test_the_configuration_is_compared_with_the_run_s_arguments(
    tmp_path: Path, run: str, config: Any, problem: str
) -> None:
    workload = load_run(run).model.workload
    assert isinstance(workload, VimeWorkload)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RlkReproError, match=problem) if problem else nullcontext():
        check_model(tmp_path, workload.model, needs_template=True)


PARTS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


# files of a model, what its index names, and what is wrong
@pytest.mark.parametrize(
    ("files", "index", "problem"),
    [
        (PARTS, {"weight_map": dict.fromkeys(PARTS, PARTS[0])}, ""),
        (["model.safetensors"], None, ""),
        (PARTS[:2], {"weight_map": {"a": PARTS[0], "b": PARTS[2]}}, rf"{PARTS[2]}: missing, but .*json names"),
        (["a.safetensors"], {"weight_map": {"x": "b.safetensors"}}, r"b\.safetensors: missing"),
        (["a.safetensors"], {"metadata": {}}, "names no shards"),
        ([], None, r"weights: missing, expected files \*\.safetensors"),
        (["model.safetensors", "tokenizer_config.json"], None, "chat template: missing, but the run applies one"),
        (["model.safetensors", "tokenizer_config.json", "chat_template.jinja"], None, ""),
    ],
)
def test_a_model_is_whole_by_its_own_index(
    tmp_path: Path, files: list[str], index: dict[str, Any] | None, problem: str
) -> None:
    workload = load_run(DENSE).model.workload
    assert isinstance(workload, VimeWorkload)
    for name in (*files, "config.json"):
        (tmp_path / name).write_text("{}")
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RlkReproError, match=problem) if problem else nullcontext():
        check_model(tmp_path, workload.model, needs_template=True)


def test_damaged_files_are_named(hub: HubServer, call: Call, prepared: Path) -> None:
    run(call, prepared, *from_hub())
    cut, gone, changed = (prepared / MODEL / f"model-{number:05}.safetensors" for number in range(3))
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    changed.write_bytes(b"?" + changed.read_bytes()[1:])
    code, _, error = call(*words("--cache", str(prepared), *from_hub()))
    assert (code, error.count("differs from its record")) == (1, 3)
    for text in ("got '2000", "expected a readable file", "expected sha256 of its ends"):
        assert text in error
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


def test_a_link_to_nothing_is_no_place_for_prepared_files(call: Call, tmp_path: Path) -> None:
    """For example a link to a file system that is not mounted."""
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    code, _, err = call("prepare", "qwen3-4b-random-live", "--hardware", "h200", "--cache", str(tmp_path / "link"))
    assert code == 3
    assert "link" in err
    assert err.endswith("cannot be written (File exists)\n  hint: --cache DIR names another folder\n")
