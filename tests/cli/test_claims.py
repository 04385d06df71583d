from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlk_repro import __version__
from rlk_repro.claims.files import load_claims
from rlk_repro.claims.results import Word


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLK_SRC", raising=False)
    monkeypatch.setattr("rlk_repro.claims.check.gpu.probe", lambda: {"vendor": "none", "count": 0, "devices": []})


def test_the_list_has_two_lines_for_each_claim(call) -> None:
    code, out, err = call("claims", "list")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 2 * len(load_claims())


def test_the_list_as_json_holds_the_files(call) -> None:
    code, out, _ = call("claims", "list", "--json")
    assert code == 0
    assert all(claim["claim"] and claim["rows"] for claim in json.loads(out))


def test_without_a_gpu_a_check_says_what_follows_from_shapes_and_that_nothing_was_measured(call) -> None:
    code, out, _ = call("claims", "check", "ratio-kl-forward")
    assert code == 3
    assert out.splitlines()[-1] == (
        "0 reproduced, 0 reproduced in part, 0 not reproduced, 2 arithmetic only, 0 not runnable here (rows)"
    )
    assert "  here:      a CPU" in out.splitlines()
    assert "other hardware" not in out


def test_a_check_that_could_measure_nothing_exits_with_3(call) -> None:
    code, out, _ = call("claims", "check", "vime-smoke-8xh100", "sampling-readme")
    assert code == 3
    assert "  not runnable here (needs a training run on 8 GPUs and a fork of vime; run it as a pair with" in out


def test_a_claim_that_is_not_reproduced_exits_with_1(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlk_repro.claims.judge._is_near_bytes", lambda *_: False)
    assert call("claims", "check", "ratio-kl-forward")[0] == 1


def test_an_unknown_id_is_a_wrong_argument(call) -> None:
    code, out, err = call("claims", "check", "ratio-kl")
    assert (code, out) == (2, "")
    assert err == "rlk-repro: ID: no claim of this name, got 'ratio-kl'\n  hint: did you mean 'ratio-kl-forward'?\n"


def test_a_folder_without_rl_kernel_is_a_wrong_argument(call, tmp_path: Path) -> None:
    code, _, err = call("claims", "check", "ratio-kl-forward", "--rl-kernel-src", str(tmp_path))
    assert code == 2
    assert err.startswith("rlk-repro: --rl-kernel-src or RLK_SRC: holds no package rl_engine")


def test_where_nothing_was_measured_no_file_and_no_folder_is_left(call, tmp_path: Path) -> None:
    file = tmp_path / "new" / "claims.json"
    code, _, err = call("claims", "check", "ratio-kl-forward", "-o", str(file))
    assert (code, list(tmp_path.iterdir())) == (3, [])
    assert err == f"{file}: not written, because no claim could be checked by a measurement here\n"


def test_a_record_of_measurements_is_written(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlk_repro.claims.results.ClaimsCheck.has_measured", True)
    file = tmp_path / "new" / "claims.json"
    code, out, err = call("claims", "check", "-o", str(file), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(file.read_text())


def test_the_record_satisfies_its_schema(call) -> None:
    code, out, _ = call("claims", "check", "--json")
    assert code == 3
    record = json.loads(out)
    assert (record["schema"], record["version"]) == (1, __version__)
    assert set(record["environment"]) == {"gpu", "code"}
    words = {row["word"] for result in record["results"] for row in result["rows"]}
    assert words == {Word.ARITHMETIC.value, Word.NOT_RUNNABLE.value}


def test_a_record_that_cannot_be_written_is_named(call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = call("claims", "check", "ratio-kl-forward", "-o", str(tmp_path / "file" / "claims.json"))
    assert code == 3
    assert "cannot be written" in err
