"""A real control plane on loopback: etcd, kube-apiserver and, where they lie beside it, kube-controller-manager and
kube-scheduler.

``RLK_KUBE_APISERVER`` names the binary of kube-apiserver, as setup-envtest installs it beside etcd (docs/testing.md).
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.kube.client import CUSTOM, ApiStore, Client, Refused, path_of
from tests.support.kube.cluster import make_kubeconfig
from tests.support.kube.exec import KubeletServer
from tests.support.kube.kubelet import Faults, RunningPod, end_process
from tests.support.kube.store import Object, Resource, has_condition
from tests.support.kube.validate import CRD_DIR
from tests.support.ports import find_port

APISERVER: Final = os.environ.get("RLK_KUBE_APISERVER", "")
START_S: Final = 120.0
USER: Final = "me"
# those that a run meets; the node lifecycle's would want heartbeats
CONTROLLERS: Final = (
    "garbage-collector-controller", "job-controller", "namespace-controller", "persistentvolume-binder-controller",
    "persistentvolume-protection-controller", "persistentvolumeclaim-protection-controller",
    "pod-garbage-collector-controller", "resourceclaim-controller", "resourcequota-controller",
    "root-ca-certificate-publisher-controller", "serviceaccount-controller", "ttl-after-finished-controller",
)  # fmt: skip
_CRDS: Final = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions", "", is_namespaced=False)


class ControlPlane:
    """``close`` ends what it started.  ``pods`` is in whom commands run, set by who runs them."""

    def __init__(self, folder: Path, *, has_operators: bool = True) -> None:
        self.folder = folder
        self.pods: Mapping[str, RunningPod] = {}
        self.faults = Faults()
        self.has_operators = has_operators
        self._binaries = Path(APISERVER).parent
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd, self.port = (f"http://127.0.0.1:{find_port()}", find_port())
        self.tokens = {"admin": secrets.token_hex(16), USER: secrets.token_hex(16)}
        self.ca = folder / "certificates" / "apiserver.crt"
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def has(self, name: str) -> bool:
        return name in self._processes

    def close(self) -> None:
        for name in reversed([*self._processes]):
            end_process(self._processes.pop(name), 0.0)
        if hasattr(self, "client"):
            self.client.close()
        if hasattr(self, "kubelet"):
            self.kubelet.close()

    @property
    def is_api_there(self) -> bool:
        return self._processes["kube-apiserver"].poll() is None

    def stop_api(self) -> None:
        """As when its machine is lost; etcd and the controllers go on."""
        end_process(self._processes["kube-apiserver"], 0.0)
        self.client.close()

    def start_api(self) -> None:
        self._start("kube-apiserver", self._api_options())
        self._wait("kube-apiserver", self._is_ready)
        self._wait("custom resources", self._serves_operators)

    def _start_all(self) -> None:
        (self.folder / "certificates").mkdir(parents=True)
        self._start("etcd", self._etcd_options())
        self._write_files()
        self._start("kube-apiserver", self._api_options())
        self._wait("the certificate of kube-apiserver", self._has_certificate)
        self._wait("kube-apiserver", self._is_ready)
        self.store = ApiStore(self.client)
        if self.has_operators:
            self._install_operators()
            for name, options in self._helpers().items():
                if (self._binaries / name).is_file():
                    self._start(name, options)
        if not self.has("kube-controller-manager"):
            self._make_account()
        self._wait("custom resources", self._serves_operators)
        self._wait("the service account", self._has_account)

    def _start(self, name: str, options: Sequence[str]) -> None:
        binary = self._binaries / name
        if not binary.is_file():
            raise FileNotFoundError(f"{binary} is missing beside {APISERVER}")
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(binary), *options], stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )  # fmt: skip

    def _write_files(self) -> None:
        openssl = shutil.which("openssl")
        if openssl is None:
            raise FileNotFoundError("openssl, which makes the key of service accounts")
        key = ["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", "accounts.key"]
        subprocess.run([openssl, *key], cwd=self.folder, check=True, capture_output=True)
        rows = [f'{self.tokens["admin"]},admin,admin,"system:masters"', f"{self.tokens[USER]},{USER},{USER}"]
        (self.folder / "tokens.csv").write_text("\n".join(rows) + "\n")
        certificate = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kubelet"]
        files = ["-keyout", "kubelet.key", "-out", "kubelet.crt"]
        subprocess.run([openssl, *certificate, *files], cwd=self.folder, check=True, capture_output=True)
        self.kubelet = KubeletServer(self.folder, lambda: (self.faults, self.pods))
        (self.folder / "admin.kubeconfig").write_text(yaml.safe_dump(self.make_kubeconfig("admin")))

    def make_kubeconfig(self, user: str) -> Object:
        cluster = {"server": self.url, "certificate-authority": str(self.ca)}
        return make_kubeconfig(cluster, {"token": self.tokens[user]})

    def _etcd_options(self) -> list[str]:
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            "--listen-peer-urls=http://127.0.0.1:0",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _api_options(self) -> list[str]:
        accounts = self.folder / "accounts.key"
        return [
            f"--etcd-servers={self._etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={self.port}",
            f"--cert-dir={self.ca.parent}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={accounts}",
            f"--service-account-signing-key-file={accounts}",
            "--service-cluster-ip-range=10.0.0.0/24",
        ]

    def _helpers(self) -> dict[str, list[str]]:
        common = [f"--kubeconfig={self.folder / 'admin.kubeconfig'}", "--leader-elect=false", "--secure-port=0"]
        accounts = f"--service-account-private-key-file={self.folder / 'accounts.key'}"
        controllers = f"--controllers={','.join(CONTROLLERS)}"
        manager = [*common, controllers, accounts, f"--root-ca-file={self.ca}"]
        return {"kube-controller-manager": manager, "kube-scheduler": common}

    def _has_certificate(self) -> bool:
        """A whole one: the file is there before it is written."""
        with contextlib.suppress(OSError):
            self.client = Client(self.port, self.tokens["admin"], self.ca)
            return True
        return False

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException, Refused):
            self.client.ask("GET", "/readyz")
            return True
        return False

    def _serves_operators(self) -> bool:
        """Ready or not: it reads the objects of each custom resource first."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            for plural in CUSTOM:
                self.store.list(plural)
            return True
        return False

    def _install_operators(self) -> None:
        paths = sorted(Path(CRD_DIR).glob("*.yaml.gz")) if CRD_DIR else []
        if not paths:
            raise FileNotFoundError("RLK_CRD_DIR names no folder with CRDs, which a real API server needs")
        for path in paths:
            value: Any = yaml.load(gzip.decompress(path.read_bytes()), yaml.CSafeLoader)
            self.client.ask("POST", path_of(_CRDS), value)
        self._wait("custom resources", self._are_operators_there)

    def _are_operators_there(self) -> bool:
        return all(has_condition(item, "Established") for item in self.client.ask("GET", path_of(_CRDS))["items"])

    def _make_account(self) -> None:
        self._wait("namespace default", lambda: self.store.find("namespaces", "", "default") is not None)
        self.store.create("serviceaccounts", {"metadata": {"name": "default", "namespace": "default"}})

    def _has_account(self) -> bool:
        return self.store.find("serviceaccounts", "default", "default") is not None

    def _wait(self, what: str, is_there: Callable[[], bool]) -> None:
        """Raises RuntimeError with the last words of who ended instead."""

        def look() -> bool:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    log = (self.folder / f"{name}.log").read_text(errors="replace")
                    raise RuntimeError(f"{name} ended with {process.returncode}: {log[:2000]}")
            return is_there()

        wait_until(what, look)


def wait_until(what: str, is_there: Callable[[], bool]) -> None:
    until = time.monotonic() + START_S
    while not is_there():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not there after {START_S:g} s")
        time.sleep(0.1)
