from __future__ import annotations

import json
import os
import random
import string
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from rlk_repro.base.errors import SpecError
from rlk_repro.base.files import dump_json
from rlk_repro.base.resources import data_dir, profile_folders
from rlk_repro.base.yamlfile import parse_yaml
from rlk_repro.clusters.registry import BACKENDS
from rlk_repro.spec import Hardware, Preflight, Profile, ReferenceWorkload, Run, Stack, run_problems
from rlk_repro.spec.layers import LayerCount, read_layer_pattern
from rlk_repro.spec.load import load_bytes, load_profile, load_run, parse_overrides
from rlk_repro.spec.values import GrowingModel
from tests import ROOT

SMOKE = (data_dir("jobs") / "smoke.yaml").read_text()


def load_text(text: str) -> Run:
    return load_bytes(Run, "jobs/x.yaml", text.encode(), (), run_problems).model


def problems_of(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_text(text)
    return [str(problem) for problem in caught.value.problems]


def assert_located(data: bytes) -> None:
    """Require a valid run, or problems that all name the file."""
    places = ["jobs/x.yaml"]
    try:
        load_bytes(Run, "jobs/x.yaml", data, (), run_problems)
    except SpecError as error:
        places = [problem.where for problem in error.problems]
    assert all(place.startswith("jobs/x.yaml") for place in places)


def test_all_errors_of_a_file_are_listed_with_line_path_and_nearest_key() -> None:
    text = SMOKE.replace("warmup_steps:", "warmup_step:").replace("pairs: 6", "pairs: six")
    text = text.replace("lane: live", "lane: lvie").replace("kl_loss_coef: 0.001", "kl_loss_coef: -1")
    line = {key: number for number, row in enumerate(text.splitlines(), start=1) for key in row.split(":")[:1]}
    found = problems_of(text)
    assert found == [
        f"jobs/x.yaml:{line['lane']}: lane: wrong value, got 'lvie', expected 'live', 'fixed-rollout' or 'train-only'"
        "\n  hint: did you mean 'live'?",
        f"jobs/x.yaml:{line['  pairs']}: measure.pairs: wrong value, got 'six', expected a whole number",
        f"jobs/x.yaml:{line['  warmup_step']}: measure.warmup_step: unknown key, expected one of design, rules, pairs, "
        "control_pairs, warmup_steps, scored_steps, seed, alpha, smallest_effect_pct, replay_margin_pct, "
        "expected_pair_sd_pct, max_dropped_fraction, margins, sessions, blocks, control_blocks, period_steps, "
        "expected_block_sd_pct, shadow_steps\n  hint: did you mean 'warmup_steps'?",
        next(row for row in found if "kl_loss_coef" in row),
    ]
    assert "workload.grpo.kl_loss_coef: wrong value, got -1, expected greater than or equal to 0" in found[-1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("purpose: >-", "purpos: >-", "purpose: missing, expected a value"),
        ("run: smoke", "run: 7", 'run: wrong value, got 7, expected text\n  hint: quote it: "7"'),
        ("ops: [logp, ratio_kl]", "ops: []", "rl_kernel.ops: wrong value, got [], expected at least 1 entry"),
        ("ops: [logp, ratio_kl]", "ops: [logp, kl]", "rl_kernel.ops[1]: no such operator, got 'kl', expected one of "
         "logp, ratio_kl, grpo_loss, linear_logp"),
        ("ops: [logp, ratio_kl]", "ops: [logp, linear_logp]", "two operators would serve the same call"),
        ("kind: reference", "kind: referenc", "workload.kind: wrong value, got 'referenc', expected 'reference', "
         "'module', 'operators' or 'vime'\n  hint: did you mean 'reference'?"),
        ("num_steps_per_rollout: 2", "num_steps_per_rollout: 5", "workload.grpo.num_steps_per_rollout: does not divide "
         "the samples of a rollout, got 5, expected a divisor of 256"),
        ("kind: reference", "kind: 7", "workload.kind: wrong value, got 7, expected 'reference', "
         "'module', 'operators' or 'vime'"),
        ("kind: reference", "knd: reference", "workload.kind: missing, expected a value"),
        ("kind: reference", "kind: module", "workload.grpo.lr: unknown key, expected one of num_steps_per_rollout, "),
        ("lane: live", "lane: fixed-rollout", "lane: the reference trainer has no inference server, which "
        "lane fixed-rollout needs"),
    ],
)  # fmt: skip
def test_each_mistake_names_its_place(old: str, new: str, message: str) -> None:
    assert old in SMOKE
    assert any(
        message in problem and problem.startswith("jobs/x.yaml:") for problem in problems_of(SMOKE.replace(old, new))
    )


MODULE = (data_dir("jobs") / "module-smoke.yaml").read_text()
OPERATORS = (data_dir("jobs") / "operators-smoke.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        (MODULE, "lane: train-only", "lane: live", "lane: the module tier makes its batches itself, got 'live', "
         "expected train-only"),
        (MODULE, "num_tokens: 512", "num_tokens: 15", "workload.batch.num_tokens: allows fewer than two "
         "tokens per sample, got 15, expected at least 16"),
        (MODULE, "num_tokens: 512", "num_token: 512", "workload.batch.num_token: unknown key, expected one of "
         "num_samples, num_tokens, prompt_fraction, num_microbatches, vocab_size\n  hint: did you mean 'num_tokens'?"),
        (OPERATORS, "pairs: 0", "pairs: 6", "measure.pairs: this workload has no enabled variant, got 6, expected 0; "
         "set control_pairs"),
        (OPERATORS, "hidden_size: [64]", "hidden_size: []", "workload.grids[3].hidden_size: does not fit linear_logp, "
         "got [], expected one size or more"),
        (OPERATORS, "operator: logp,", "operator: logp, hidden_size: [8],", "workload.grids[0].hidden_size: does not "
         "fit logp, got [8], expected none"),
    ],
)  # fmt: skip
def test_operator_and_module_runs_have_their_own_rules(text: str, old: str, new: str, message: str) -> None:
    assert old in text
    assert any(message in problem for problem in problems_of(text.replace(old, new, 1)))


def test_a_list_whose_entries_are_all_wrong_is_not_called_too_short() -> None:
    start = OPERATORS.index("  grids:")
    text = OPERATORS[:start] + "  grids: [{operator: logp, num_tokens: [1], vocab_size: [2], passes: [up]}]\n"
    assert [problem.partition(": ")[2] for problem in problems_of(text)] == [
        "workload.grids[0].passes[0]: wrong value, got 'up', expected 'forward' or 'forward_backward'"
    ]


def test_a_value_may_be_text_or_the_name_of_a_variable() -> None:
    text = b"schema: 1\nprofile: x\ncluster: local\nenv: {A: b, C: {from_env: D}}\n"
    assert set(load_bytes(Profile, "p.yaml", text).model.env) == {"A", "C"}
    with pytest.raises(SpecError) as caught:
        load_bytes(Profile, "p.yaml", b"schema: 1\nprofile: x\ncluster: local\nenv: {A: 1, B: {from_evn: X}}\n")
    assert [str(problem) for problem in caught.value.problems] == [
        'p.yaml:4: env.A: wrong value, got 1, expected text\n  hint: quote it: "1"',
        "p.yaml:4: env.B.from_env: missing, expected a value",
        "p.yaml:4: env.B.from_evn: unknown key, expected one of from_env\n  hint: did you mean 'from_env'?",
    ]


@pytest.mark.parametrize("name", ["my-token", "5", "[A]", ""])
def test_a_wrong_name_of_a_variable_is_reported(name: str) -> None:
    text = f"schema: 1\nprofile: x\ncluster: local\nenv: {{B: {{from_env: {name}}}}}\n"
    with pytest.raises(SpecError, match=r"^p\.yaml:4: env\.B\.from_env: wrong value"):
        load_bytes(Profile, "p.yaml", text.encode())


def test_a_secret_in_a_file_is_refused_with_its_line() -> None:
    token = "hf_" + "a1" * 17
    with pytest.raises(SpecError) as caught:
        load_bytes(Profile, "p.yaml", f"schema: 1\nprofile: x\ncluster: local\nenv:\n  A: {token}\n".encode())
    assert str(caught.value).startswith("p.yaml:5: env.A: looks like a secret")
    assert token not in str(caught.value)


def test_settings_are_typed_and_name_the_flag_when_wrong() -> None:
    run = load_run("smoke", parse_overrides(["measure.pairs=8", "workload.grpo.lr=3e-4"])).model
    assert run.measure.pairs == 8
    assert isinstance(run.workload, ReferenceWorkload)
    assert run.workload.grpo.lr == 3e-4
    with pytest.raises(SpecError) as caught:
        load_run("smoke", parse_overrides(["measure.pairs=x", "measure.pirs=3", "foo.bar=1"]))
    where = [problem.where for problem in caught.value.problems]
    assert where == ["--set measure.pairs", "--set measure.pirs", "--set foo.bar"]


def test_a_malformed_setting_shows_the_right_form() -> None:
    with pytest.raises(SpecError) as caught:
        parse_overrides(["abc", "a..b=1", "m=[1"])
    assert [str(problem) for problem in caught.value.problems] == [
        "--set 'abc': not of the form path=value, expected for example measure.pairs=8",
        "--set 'a..b=1': not of the form path=value, expected for example measure.pairs=8",
        "--set m: not YAML (did not find expected ',' or ']'), expected one YAML document",
    ]


def test_a_user_profile_wins_over_a_shipped_one(tmp_path: Path) -> None:
    folder = tmp_path / "config" / "rlk-repro" / "profiles"
    folder.mkdir(parents=True)
    (folder / "local.yaml").write_text("schema: 1\nprofile: mine\ncluster: local\n")
    assert load_profile("local", profile_folders("local")).model.profile == "mine"


@pytest.mark.parametrize(("block", "cluster"), [("slurm", "k8s"), ("kubernetes", "slurm"), ("slurm", "local")])
def test_a_block_of_another_cluster_is_an_error(block: str, cluster: str, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(f"schema: 1\nprofile: site\ncluster: {cluster}\n{block}: {{}}\n")
    with pytest.raises(SpecError, match=f"site.yaml:4: {block}: has no effect, got 'cluster: {cluster}'"):
        load_profile(str(file), [])


ATOMS = [*string.ascii_lowercase, *":-[]{}#&*!|>'\"%@`\n \t0123456789.~", "\u00e9", "\x00", "- ", ": ", "null", "1e5"]


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_any_mutated_file_gives_a_located_error_or_a_run(seed: int) -> None:
    """Any mutated YAML gives a located error or a valid plan, never a traceback."""
    rng = random.Random(seed)
    text = SMOKE
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(ATOMS) * rng.randint(0, 2) + text[at + rng.randint(0, 5) :]
    assert_located(text.encode())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
PATHS = [
    *("schema", "run", "lane", "layouts", "layouts.cpu", "measure", "measure.margins", "measure.pairs", "rl_kernel"),
    *("rl_kernel.ops", "workload", "workload.kind", "workload.model", "workload.grpo.lr", "expected_trial_minutes"),
]


@settings(max_examples=60)
@given(st.sampled_from(PATHS), VALUES)
def test_any_value_anywhere_gives_a_located_error_or_a_run(path: str, value: Any) -> None:
    import yaml

    data = yaml.safe_load(SMOKE)
    target = data
    for part in path.split(".")[:-1]:
        target = target[part]
    target[path.rsplit(".", 1)[-1]] = value
    assert_located(yaml.safe_dump(data, allow_unicode=True).encode())


@pytest.mark.parametrize("model", [Run, Stack, Hardware, Profile])
@pytest.mark.parametrize("data", [b"", b"3", b"[]", b"a", b"{}"])
def test_an_empty_or_shapeless_file_is_a_located_error(model: type[Any], data: bytes) -> None:
    with pytest.raises(SpecError) as caught:
        load_bytes(model, "f.yaml", data)
    assert all(problem.where.startswith("f.yaml") for problem in caught.value.problems)


# Keys that were added after plans had been recorded do not change their hashes, which test_evidence checks.


def test_a_key_that_came_later_is_left_out_while_it_has_its_default() -> None:
    for model in GrowingModel.__subclasses__():
        assert model.added_later <= model.model_fields.keys()
    old = {"min_free_disk_gib": 1.0, "min_free_memory_gib": 1.0, "on_blocking": "stop"}
    assert Preflight().model_dump(mode="json") == old
    assert Preflight(policy={"load": "fail"}).model_dump(mode="json") == {**old, "policy": {"load": "fail"}}


# New hardware needs only a YAML file: the plan is made and rendered for both clusters, and no Python names it.

HARDWARE = """\
schema: 1
hardware: b300
title: NVIDIA B300 288 GB (8 per node, x86-64)
platform: cuda
machine: x86_64
gpus_per_node: 8
gpu_memory_gib: 275
name_part: B300
refused_name_parts: [SHARED, MIG]
driver_floor: "580"
links_per_gpu: 18
node_labels:
  nvidia.com/gpu.product: [NVIDIA-B300-SXM6-AC]
"""
LAYOUT = "layouts:\n  b300: {num_nodes: 1, gpus_per_node: 1}\n"
SLURM = """\
profile: site
cluster: slurm
hardware: b300
slurm: {account: rl, gres: "gpu:b300"}
container: {runtime: pyxis, image_dir: /images}
"""
K8S = """\
profile: site
cluster: k8s
hardware: b300
kubernetes: {namespace: rl, cpu: "8", memory: 128Gi, results: {claim: results, path: /results}}
"""


@pytest.mark.parametrize(("cluster", "profile"), [("slurm", SLURM), ("k8s", K8S)])
def test_hardware_that_no_code_names_is_planned_and_rendered(
    tmp_path: Path, call: Any, cluster: str, profile: str
) -> None:
    files = {"b300": HARDWARE, "site": profile, "smoke": SMOKE.replace("layouts:\n", LAYOUT)}
    paths = {name: tmp_path / f"{name}.yaml" for name in files}
    for name, text in files.items():
        paths[name].write_text(text)
    words = ("--cluster", cluster, "--hardware", str(paths["b300"]), "--profile", str(paths["site"]))
    code, out, err = call("submit", str(paths["smoke"]), *words, "--stack", "example", "--dry-run", "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert shown["plan"]["experiment"]["hardware"]["title"].startswith("NVIDIA B300")
    (job,) = (text for name, text in shown["job"]["files"].items() if name in {"job.sbatch", "objects.yaml"})
    wanted = {"slurm": ("gpu:b300:1",), "k8s": ("NVIDIA-B300-SXM6-AC", "nvidia.com/gpu: 1", "amd64")}
    for text in wanted[cluster]:
        assert text in job.replace("'", "").replace('"', "")


@pytest.mark.parametrize("value", [
        "no", '"[1"', '"[1]]*48"', '"[1]*400000000"', f'"[1]*{10**400}"', '"((("', '"[1]*48*[1]"', '"[1]+1"',
        '"[x]*48"', '"[2]*48"', '"[1]*47"', "true", "1.5", "0", "-1", '"[1].__class__"', '"[1]*-48"', "[1, 1]",
        f'"{"[1]+" * 390}[1]"',
])  # fmt: skip
def test_an_invalid_layer_pattern_is_refused_uncounted(value: str) -> None:
    place = "workload.model.arguments.moe-layer-freq"
    with pytest.raises(SpecError, match=f"--set {place}: "):
        load_run("qwen3-30b-a3b", parse_overrides([f"{place}={value}"]))


def test_layers_are_counted() -> None:
    counts = {"[0]*1+[1]*45": (46, 45), "([0]*3+[1])*12": (48, 12), " [0, 1]*24": (48, 24), "[]": (0, 0),
              "[1]*400000000": (400_000_000, 400_000_000)}  # fmt: skip
    for text, found in counts.items():
        assert read_layer_pattern(text) == LayerCount(*found)
    for text in ("[1]**2", "[True]", "[1]*1.5", "[1" * 400, "(" * 1000, ""):
        assert read_layer_pattern(text) is None


# The JSON Schemas by which editors complete authors' files; ``make goldens`` rewrites them.


AUTHORED: Final[dict[str, type[BaseModel]]] = {"run": Run, "stack": Stack, "hardware": Hardware, "profile": Profile}
FILES = [
    *(("run", path) for path in ROOT.glob("jobs/*.yaml")),
    *(("hardware", path) for path in ROOT.glob("jobs/hardware/*.yaml")),
    *(("profile", path) for path in ROOT.glob("*/profiles/*.yaml")),
    *(("stack", path) for path in ROOT.glob("manifests/stacks/*.yaml")),
]


def make_schema(kind: str) -> dict[str, Any]:
    schema = TypeAdapter(AUTHORED[kind]).json_schema(by_alias=True)
    if kind == "profile":  # the model takes any name, because a user may add clusters
        schema["properties"]["cluster"]["enum"] = list(BACKENDS)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"rlk-repro {kind}", **schema}


@pytest.mark.parametrize("kind", AUTHORED)
def test_a_schema_is_that_of_the_model_and_refuses_an_unknown_key(kind: str) -> None:
    schema, file = make_schema(kind), data_dir("manifests") / "schema" / f"{kind}.schema.json"
    if os.environ.get("RLK_REPRO_GOLDENS") == "write":
        file.write_bytes(dump_json(schema))
    assert file.read_bytes() == dump_json(schema), "make goldens"
    errors = jsonschema.Draft202012Validator(schema).iter_errors({"no_such_key": 1})
    assert any("no_such_key" in error.message for error in errors)


@pytest.mark.parametrize(("kind", "path"), FILES, ids=lambda value: getattr(value, "name", value))
def test_a_shipped_file_satisfies_its_schema(kind: str, path: Path) -> None:
    value = parse_yaml(path.name, path.read_bytes()).value
    jsonschema.Draft202012Validator(make_schema(kind)).validate(value)
    assert value[kind] == path.stem
