"""Recognise what looks like a secret, and remove it from text and log lines.

A secret is recognised by its form (issuers give tokens a prefix for this purpose), by the words before it
(``--password``), by the name of its variable (``HF_TOKEN``), or by its value (if this process's environment holds it).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from rlk_repro.base.known_values import ESCAPES, MIN_LENGTH, KnownValues

REDACTED: Final = "<redacted>"
"""A value of a variable that looks secret, in records."""
_ASSIGN: Final = rb"[\"']? ?[:=] ?[\"']?"
_DOTTED: Final = rb" \.{2,} [\"']?"  # Megatron prints its arguments in this form
_NOT_A_NUMBER: Final = rb"(?![-+]?[\d.]+(?:[eE][-+]?\d+)?(?![\w.]))"
_VALUE: Final = _NOT_A_NUMBER + rb"(?=[\w.~+/=-]{0,200}\d)[\w~+/=-][\w.~+/=-]{15,}"
_PASSWORD: Final = rb"(?!<redacted)[^\s\"',;<>{}()\[\]]{6,}"
_BASE64: Final = rb"[A-Za-z0-9+/]{8,}={0,2}"


@dataclass(frozen=True)
class Pattern:
    """A kind of secret: what it looks like, behind what stands ``before`` it and stays in the text.

    Only a block that holds one of ``words`` (in lower case) is searched, because a regex takes much longer.
    """

    kind: str
    words: tuple[bytes, ...]
    before: bytes
    secret: bytes = field(repr=False)

    @cached_property
    def regex(self) -> re.Pattern[bytes]:
        return re.compile(b"(?ms)(%s)(?:%s)" % (self.before, self.secret))

    def may_match(self, lowered: bytes) -> bool:
        return any(word in lowered for word in self.words)

    def scrub(self, block: bytes) -> bytes:
        return self.regex.sub(rb"\g<1><redacted:%s>" % self.kind.encode(), block)


# how the tokens of an issuer begin, and how they go on
TOKENS: Final = (
    ("huggingface-token", b"hf_|api_org_", rb"[A-Za-z0-9]{20,}"),
    ("github-token", b"ghp_|gho_|ghu_|ghs_|ghr_", rb"[A-Za-z0-9]{20,}"),
    ("github-token", b"github_pat_", rb"\w{20,}"),
    ("gitlab-token", b"glpat-", rb"[\w-]{16,}"),
    ("nvidia-api-key", b"nvapi-", rb"[\w-]{20,}"),
    ("api-key", b"sk-", rb"(?=[\w-]{0,200}\d)[\w-]{20,}"),
    ("api-key", b"gsk_|xai-|r8_", rb"[A-Za-z0-9]{20,}"),
    ("aws-access-key", b"AKIA|ASIA", rb"[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("slack-token", b"xoxa-|xoxb-|xoxe-|xoxp-|xoxr-|xoxs-", rb"[A-Za-z0-9-]{10,}"),
    ("vault-token", b"hvs.", rb"[\w-]{20,}"),
    ("tailscale-key", b"tskey-", rb"[\w-]{16,}"),
    ("age-key", b"AGE-SECRET-KEY-1", rb"[A-Z0-9]{40,}"),
    ("jwt", b"eyJ", rb"[\w-]{8,2000}\.[\w-]{8,}\.[\w-]*"),
    ("google-api-key", b"AIza", rb"[\w-]{30,}"),
    ("google-token", b"ya29.", rb"[\w.-]{20,}"),
    ("stripe-key", b"sk_live_|sk_test_|rk_live_|rk_test_", rb"[A-Za-z0-9]{16,}"),
    ("npm-token", b"npm_", rb"[A-Za-z0-9]{36,}"),
    ("pypi-token", b"pypi-", rb"[\w-]{40,}"),
    ("databricks-token", b"dapi", rb"[0-9a-f]{32}(?![0-9A-Za-z])"),
    ("digitalocean-token", b"doo_v1_|dop_v1_|dor_v1_", rb"[0-9a-f]{40,}"),
    ("docker-token", b"dckr_oat_|dckr_pat_", rb"[\w-]{20,}"),
    ("sendgrid-key", b"SG.", rb"[\w-]{20,}\.[\w-]{30,}"),
    ("wandb-key", b"wandb_v1_", rb"\w{20,}"),
)
# kind, words of which one is near the secret, what stands before it, the secret
NEAR_WORDS: Final = (
    ("kubeconfig-key", b"key-data", rb"client-key-data" + _ASSIGN, _BASE64),
    ("docker-auth", b"auth", rb"[\"']auth[\"'] ?: ?[\"']", _BASE64),
    ("cookie", b"ookie: ", rb"\b(?:Set-)?[Cc]ookie: ", rb"[^\s;=]{1,80}=[^\s;\"']{16,}"),
    ("webhook", b"/webhook", rb"(?:discord(?:app)?\.com/api/webhooks|webhook\.office\.com/webhookb2)/",
     rb"[\w@/-]{20,}"),
    ("slack-webhook", b"hooks.slack", rb"hooks\.slack(?:-gov)?\.com/[a-z]+/", rb"[\w/+-]{20,}"),
    ("wandb-key", b"wandb", rb"wandb[^\r\n]{0,60}?(?:key|login)[ =:.\"']{1,50}", rb"[0-9a-f]{40}(?![0-9a-f])"),
    ("sas-signature", b"sig=", rb"[?&]sig=", rb"[\w%+/-]{20,}={0,2}"),
    ("account-key", b"key=", rb"(?:Account|AccessKey|Shared\w{0,20})Key=", rb"[A-Za-z0-9+/]{40,}={0,2}"),
    ("bearer-token", b"bearer", rb"[Bb]earer[ \t]+", rb"(?=\S*\d)[\w.~+/=-]{16,}"),
    ("basic-auth", b"basic", rb"(?i:authorization)[\"']?[ \t]*[:=][ \t]*[\"']?[Bb]asic[ \t]+", rb"[\w+/-]{8,}={0,2}"),
    ("url-password", b"@", rb"://[^/\s:@<\"']*:", rb"[^/\s@\"']+(?=@)"),
    ("url-token", b"@", rb"https?://", rb"(?!<redacted)[^/\s:@?#\"'<>]{8,}(?=@)"),
    ("password", b"passw|passphrase|secret", rb"(?i:pass(?:wor|w)d|passphrase|secret)" + _ASSIGN, _PASSWORD),
    # in usage texts, the word after a flag is a placeholder, in capitals or brackets
    ("password", b"passw|passphrase|secret", rb"--(?:[\w-]{1,40}-)?(?:pass(?:wor|w)d|passphrase|secret)[ =][\"']?",
     rb"(?!-|[A-Z_]+\b)" + _PASSWORD),
    ("password", b"_pwd|_pass|sshpass|_auth|_dsn|_creds", rb"(?:_PWD|_PASS|SSHPASS|_AUTH|_DSN|_CREDS)" + _ASSIGN,
     rb"(?!(?i:disabled|enabled|default)\b)" + _NOT_A_NUMBER + _PASSWORD),
    # of a netrc
    ("password", b"password", rb"^[ +-]?[ \t]*password[ \t]+(?=\S+[ \t\r]*$)|\blogin[ \t]+\S+[ \t]+password[ \t]+",
     _PASSWORD),
    ("password", b"login|sshpass|twine", rb"\b(?:sshpass |(?:docker|podman|buildah|skopeo|helm registry) login"
     rb"|twine upload)[^\r\n|;&]{0,200}? -p[ =]?", rb"(?!-)" + _PASSWORD),
    ("password", b"mysql", rb"mysql\w*[^\r\n|;&]{0,200}? -p", rb"(?!-)" + _PASSWORD),
    ("password", b"curl|wget", rb"\b(?:curl|wget) [^\r\n|;&]{0,400}?(?:-u|--user)[ =][\"']?[^\s:\"']{1,80}:",
     rb"(?!-)" + _PASSWORD),
    ("named-secret", b"token|key", rb"(?i:token|(?:api|access|private|secret)[_-]?key)(?:%s|%s)" % (_ASSIGN, _DOTTED),
     _VALUE),
    ("named-secret", b"token|-key",
     rb"--(?:[\w-]{1,40}-)?(?:token|(?:api|access|private|secret|auth|wandb)-key)[ =][\"']?", _VALUE),
)  # fmt: skip

_PEM: Final = Pattern(
    "private-key", (b"private key",), b"",
    rb"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
)  # fmt: skip


def _make_token(kind: str, begins: bytes, rest: bytes) -> Pattern:
    secret = b"(?:%s)%s" % (b"|".join(map(re.escape, begins.split(b"|"))), rest)
    return Pattern(kind, tuple(begins.lower().split(b"|")), rb"(?<![A-Za-z0-9])", secret)


SECRET_PATTERNS: Final = (
    _PEM,
    *(_make_token(*row) for row in TOKENS),
    *(Pattern(kind, tuple(words.split(b"|")), before, secret) for kind, words, before, secret in NEAR_WORDS),
)

_SHORT_FLAGS: Final = frozenset({"-p", "-u", "--user"})

# a name's words, in capitals and joined by ``_``
_SECRET_NAME: Final = re.compile(
    r"(?:^|_)(?:SECRETS?|[A-Z0-9]*(?:PASSWORD|PASSWD|PASSPHRASE)|CREDENTIALS?|API_?KEY|CONNECTION_?STRING"
    r"|(?:ACCESS|PRIVATE|SECRET|ACCOUNT|AUTH|WANDB|SIGNING|ENCRYPTION)_KEY)(?:_|$)"
    r"|_(?:PWD|PASS|AUTH|DSN|CREDS|COOKIE|JWT|PAT)$|^(?:DB|PG|SSH|SUDO|SMTP|REDIS|MYSQL)PASS$|^(?:DSN|CREDS)$"
    r"|(?:^|_)TOKEN$"
)
_TOKEN_OF_TEXT: Final = re.compile(r"(?:^|_)(?:EOS|BOS|PAD|UNK|SEP|CLS|MASK|STOP|PER|IMAGE)_TOKEN$")
# By convention, variables with these names hold an address that contains a password.
_ADDRESS_NAME: Final = re.compile(
    r"(?:^|_)(?:DATABASE|DB|REDIS|MONGO(?:DB)?|POSTGRES(?:QL)?|PG|MYSQL|AMQP|BROKER)_UR[IL]$"
)
# ``AWS_SHARED_CREDENTIALS_FILE`` and ``image_pull_secret`` say where a secret is, but hold no secret.
_REFERENCE_NAME: Final = re.compile(r"_(?:FILE|PATH|DIR|NAME|REF|ENV|URL|TTL|LENGTH)$|PULL_SECRETS?$|^FROM_ENV$")
_USER_INFO: Final = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")


def looks_secret(name: str, value: str) -> str | None:
    """Return why a setting looks like a secret, such as ``github-token``; None if it does not."""
    data = value.encode(errors="replace")
    lowered = data.lower()
    for pattern in SECRET_PATTERNS:
        if pattern.may_match(lowered) and pattern.regex.search(data) is not None:
            return pattern.kind
    if is_secret_name(name) and _is_opaque(value):
        return "named like one"
    return None


def is_secret_name(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").upper()
    if _ADDRESS_NAME.search(words) is not None:
        return True
    harmless = (_REFERENCE_NAME, _TOKEN_OF_TEXT)
    return _SECRET_NAME.search(words) is not None and not any(name.search(words) for name in harmless)


def scrub(text: str) -> str:
    return Scrubber().text(text)


def scrub_bytes(block: bytes) -> bytes:
    """Scrub whole log lines; a line in which colours hide a secret loses its colours."""
    if b"\x1b" in block and _scrub_plain(plain := ESCAPES.sub(b"", block)) != plain:
        lines = block.split(b"\n")
        for number, line in enumerate(lines):
            plain = ESCAPES.sub(b"", line)
            clean = _scrub_plain(plain)
            if clean != plain:
                lines[number] = clean
        block = b"\n".join(lines)
    return _scrub_plain(block)


def _scrub_plain(block: bytes) -> bytes:
    lowered = block.lower()
    for pattern in SECRET_PATTERNS:
        if pattern.may_match(lowered):
            block = pattern.scrub(block)
    return block


class Scrubber:
    def __init__(self, values: Iterable[str] = ()) -> None:
        self._known = KnownValues(values)
        self.find_open = self._known.find_open

    @classmethod
    def from_environment(cls, named: Iterable[str] = ()) -> Scrubber:
        """Hide values of variables in ``named`` or named like a secret, and passwords in the URLs of any variable."""
        secret = {*named, *filter(is_secret_name, os.environ)}
        values = [os.environ[name] for name in secret & os.environ.keys() if _can_be_known(os.environ[name])]
        return cls([*values, *(found for value in os.environ.values() for found in _USER_INFO.findall(value))])

    def bytes(self, block: bytes) -> bytes:
        """Remove secrets from whole lines; a value that spans lines is removed only if one call has all its lines."""
        return scrub_bytes(self._known.scrub(block))

    def text(self, text: str) -> str:
        return self.bytes(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")


def scrub_argv(argv: Iterable[str]) -> list[str]:
    """Remove secrets from a command line, also the values in ``--api-key VALUE`` and ``--api-key=VALUE``."""
    clean: list[str] = []
    flag = ""
    for argument in argv:
        name, separator, value = argument.partition("=")
        if flag and looks_secret(flag, argument):
            clean.append("<redacted:argument>")
        elif separator and looks_secret(name.lstrip("-"), value):
            clean.append(f"{name}=<redacted:argument>")
        elif clean and clean[-1] in _SHORT_FLAGS and not scrub(" ".join([*clean, argument])).endswith(argument):
            clean.append("<redacted:argument>")  # the words before it, such as ``docker login``, tell what -p takes
        else:
            clean.append(scrub(argument))
        flag = argument.lstrip("-") if argument.startswith("--") and not separator else ""
    return clean


def _is_opaque(value: str) -> bool:
    """Tell whether a value may be a secret: no switch, number, path, phrase, or URL without a password."""
    return _can_be_known(value) and re.search(r"\s", value.strip()) is None


def _can_be_known(value: str) -> bool:
    plain = value.strip()
    if len(plain) < MIN_LENGTH or plain.startswith(("/", "./", "~", "$", "<")):
        return False
    return not re.fullmatch(r"[-+]?[\d.]+|(?i:disabled|offline|enabled|default)|[\w+.-]+://[^@?\s]*", plain)
