"""Lines that hold a secret, and lines that only look like it.  The secrets are built from parts, for scanners."""

from __future__ import annotations

import base64
from typing import Final

HEX32: Final = "0123456789abcdef" * 2
MIXED: Final = "aB3x9Y8kQ2mZ7wE5rT1u"
AZURE: Final = "k7Jx" * 21 + "pQ=="
BASIC: Final = base64.b64encode(b"someone:tulips-and-9").decode()

SECRETS: Final[dict[str, tuple[str, str]]] = {
    # The shape that the issuer chose shows these secrets.
    "google api key": ("call https://maps.example/json?key=", "AI" + "za" + "Sy" + MIXED + "dEf45gHi6jKlm"),
    "google oauth": ("got ", "ya" + "29." + "a0AfB_" + MIXED + "-" + MIXED),
    "stripe": ("charge with ", "sk_" + "live_" + MIXED),
    "stripe restricted": ("charge with ", "rk_" + "live_" + MIXED),
    "npm": ("//registry.example/:_authToken=", "np" + "m_" + MIXED + "4vB6nM8aS2dF3gH5"),
    "pypi": ("twine upload -u __token__ ", "py" + "pi-AgEIcHlwaS5vcmc" + MIXED * 3),
    "databricks": ("connect with ", "da" + "pi" + HEX32),
    "slack webhook": ("post to ", "https://hooks.sl" + "ack.com/services/" + "T0AB12CD3/B0EF45GH6/" + MIXED + "4vB6"),
    "hugging face": ("login ", "hf" + "_" + "aB3" * 11),
    "hugging face organisation": ("login ", "api" + "_org_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH"),
    "github": ("clone with ", "gh" + "p_" + "aB3" * 12),
    "gitlab": ("clone with ", "gl" + "pat-" + MIXED),
    "nvidia": ("ngc ", "nv" + "api-" + MIXED * 2),
    "openai": ("ask ", "sk" + "-proj-" + MIXED * 2),
    "anthropic": ("ask ", "sk" + "-ant-api03-" + MIXED * 3),
    "aws id": ("as ", "AK" + "IA" + "ABCDEFGH12345678"),
    "slack": ("bot ", "xo" + "xb-" + "1234567890-1234567890123-" + MIXED),
    "jwt": ("session ", "ey" + "JhbGciOiJIUzI1NiJ9.ey" + "JzdWIiOiIxMjM0In0." + MIXED),
    "wandb": ("WANDB_API_KEY=", HEX32 + "01234567"),
    "digitalocean": ("doctl ", "do" + "p_v1_" + HEX32 * 2),
    "docker hub": ("docker login ", "dc" + "kr_pat_" + MIXED + "abcdefg"),
    "sendgrid": ("mail by ", "S" + "G." + MIXED + "ab." + MIXED * 2 + "abc"),
    "azure storage": ("DefaultEndpointsProtocol=https;AccountName=a;Account" + "Key=", AZURE),
    "azure sas": ("GET https://a.blob.example/c/f?sv=2024-11-04&se=2026-12-01&si" + "g=", "aB3%2Fx9Y8kQ2mZ7wE5rT1u%3D"),
    "private key": ("", "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA " + "PRIVATE KEY-----"),
    "pgp key": ("", "-----BEGIN PGP " + "PRIVATE KEY BLOCK-----\nlQIG\n-----END PGP " + "PRIVATE KEY BLOCK-----"),
    "vault": ("vault login ", "hv" + "s.CAES" + MIXED),
    "groq": ("ask ", "gs" + "k_" + MIXED * 2),
    "xai": ("ask ", "xa" + "i-" + MIXED * 2),
    "replicate": ("ask ", "r8" + "_" + MIXED * 2),
    "tailscale": ("up ", "ts" + "key-auth-" + MIXED),
    "age": ("", "AGE-SECRET" + "-KEY-1" + "Q7JX" * 14),
    "discord webhook": ("post to https://discord.com/api/webhooks/", "123456789012345678/" + MIXED * 3),
    "github fine-grained": ("clone with ", "github" + "_pat_" + "11ABC_" + "x9" * 20),
    "aws session": ("as ", "AS" + "IA" + "ABCDEFGH12345678"),
    "wandb of its own form": ("wandb ", "wandb" + "_v1_" + MIXED * 2),
    # The text around these secrets shows them.
    "kubeconfig key": ("+    client-key-data: ", base64.b64encode(b"-----BEGIN EC KEY-----" * 3).decode()),
    "docker auth": ('+\t\t\t"auth": "', BASIC),
    "netrc": ("+machine api.example login someone password ", "tulips9roses"),
    "cookie": ("Cookie: session=", MIXED * 2),
    "basic header": ("Authorization: Basic ", BASIC),
    "basic header of curl": ("curl -H 'authorization: basic ", BASIC),
    "bearer header": ("Authorization: Bearer ", MIXED),
    "url with password": ("git clone https://me:", "not-a-word-9"),
    "url with token alone": ("git clone https://", MIXED + "4vB6nM8aS2"),
    "redis url": ("redis://:", "tulips-and-9"),
    "word password": ("mysql --host db --password ", "tulips9roses"),
    "word token": ("hf auth login --token ", MIXED),
    "word api key": ("vllm serve --api-key ", MIXED),
    "word passphrase": ("unlock --passphrase ", "tulips9roses"),
    "equals password": ("mysql --password=", "tulips9roses"),
    "curl user": ("curl --user someone:", "tulips9roses"),
    "assigned pgpassword": ("PGPASSWORD=", "tulips9roses"),
    "assigned mysql": ("MYSQL_PWD=", "tulips9roses"),
    "assigned redis": ("REDIS_AUTH=", "tulips9roses"),
    "assigned pass": ("export DB_PASS=", "tulips9roses"),
    "assigned client secret": ('{"client_secret": "', MIXED),
    "assigned json password": ('{"password": "', "tulips9roses"),
    "assigned api key": ("MY_API_KEY=", MIXED),
    "assigned json token": ('{"access_token": "', MIXED),
    "aws secret": ("aws_secret_access_key = ", MIXED * 2),
}

NEAR_MISSES: Final = (
    "AIzaSyTooShort ya29 sk_live_ sk_live_short rk_live npm_config_cache npm_lifecycle_event=test pypi-server dapi",
    "dapi-v1",
    "dapi0123456789abcdef and dapixyz0123456789abcdef0123456789abcdeg,"
    " npm_package_dependencies_typescript_version_abcdefgh",
    "https://hooks.slack.com/services/ and https://api.slack.com/messaging/webhooks",
    "Basic statistics: 12345678 samples, Authorization: Basic realm, basic auth is off, basic_block_1234567890",
    "(RolloutManager pid=77) connect to http://10.0.0.3:8000 and tcp://127.0.0.1:29500, nccl://node-0@rack",
    "mail someone@example.com, ssh://git@github.com/x/y.git,"
    " git+https://github.com/x/y@0123456789abcdef0123456789abcdef01234567",
    "@torch.compile, A @ B, user@node-12, https://example.com/@scope/package@1.2.3,"
    " https://x.example/a?at=user@b.example",
    "docker run image@sha256:" + HEX32 * 2 + ", pip install 'x @ https://files.example/x-1.0.whl'",
    "--password-file /run/secrets/x --token-budget 4096 --max-tokens 8192 --eos-token '<|im_end|>'",
    "--pad-token-id 151643",
    "-p 8000 -p 0.95 mkdir -p /data/models/Qwen3-30B-A3B, top_p 0.95, docker run -p 127.0.0.1:8000:8000, -pthread",
    "--tokenizer Qwen/Qwen3-30B-A3B --token-parallel-size 16 --key-value-cache-dtype fp8_e4m3 --sort-key length",
    "options: --password TEXT, --token TOKEN, --api-key KEY, --password PASSWORD, --password <password>, --user NAME",
    "signature=none, sig=0.5, &sig=3, config=1234567890abcdefgh, big=abcdefghijklmnopqrstuvwx",
    "a password is needed, password protected",
    "AccountKey=none AccountName=storage0123456789",
    "perf 3: {'perf/tokens_per_sec': 12345.678901234567, 'rollout/pass_rate': 0.5, 'pass@1': 0.75, 'pass': 123456.0}",
    "passed=123456 compass=123456789 bypass=12345678 PASSED=1234567 multipass: 1234567, author=someone, AUTHOR=someone",
    "OAUTH=disabled, COMPASS=12345678, pass=forward, backward pass: 12345678 us, pass_at_k=0.123456,"
    " PASS: 123456 tests",
    "{'train/loss': 1.2345678901234567e-05, 'token': 151643, 'num_tokens': 1234567890123456789, 'key': 'value'}",
    "eos_token='<|im_end|>', pad_token: '<|endoftext|>', special_tokens_map.json, tokenizer.json, key.weight,"
    " api_key=EMPTY",
    "sk-learn-contrib-package-name, task-0123456789, hf_to_megatron_distributed_conversion, api_org_name, SG.weight",
    "vllm_config: NCCL_DEBUG=INFO PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, dtype=torch.bfloat16",
    "model-00001-of-00016.safetensors " + HEX32 + "01234567 " + HEX32 * 2 + " 550e8400-e29b-41d4-a716-446655440000",
    "\x1b[36m(MegatronTrainRayActor pid=99)\x1b[0m \x1b[32mstep 3\x1b[0m: {'train/loss': 0.125}",
)
