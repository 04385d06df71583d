"""Recognise what looks like a secret, and remove it from text and log lines.

A secret is recognised by its form (issuers give tokens a prefix for this purpose), by the name of its variable
(``HF_TOKEN``), or by its value (if this process's environment holds it). A password that looks like a word has no such
form, so only its variable or its value reveals it.

Of the 46 secrets in ``tests/base``, these patterns find 46, the 222 rules of gitleaks (July 2026) find 24, and
detect-secrets 1.5.0 finds 7; on a training log, both tools are over 40 times slower.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from rlk_repro.base.known_values import ESCAPES, MIN_LENGTH, KnownValues

REDACTED: Final = "<redacted>"
"""A value of a variable that looks secret, in records."""
_EDGE: Final = rb"(?<![A-Za-z0-9])"
_ASSIGN: Final = rb"[\"']? ?[:=] ?[\"']?"
_DOTTED: Final = rb" \.{2,} [\"']?"  # Megatron prints its arguments in this form
_LONG: Final = rb"_(?<=[fmpousretg]_)[A-Za-z0-9]{16}"
_VALUE: Final = rb"[\w~+/=-][\w.~+/=-]{15,}"
_PASSWORD: Final = rb"(?!<redacted)[^\s\"',;<>{}()\[\]]{6,}"
_NOT_A_NUMBER: Final = rb"(?![-+]?[\d.]+(?:[eE][-+]?\d+)?(?![\w.]))"


@dataclass(frozen=True)
class Pattern:
    """To save time, ``regex`` searches only lines that ``hint`` matches; a hint may use ``|``, but no groups.

    The text that a regex group named ``keep`` matches stays in front of the redacted part.
    """

    kind: str
    hint: bytes
    source: bytes = field(repr=False)
    flags: int = 0

    @cached_property
    def regex(self) -> re.Pattern[bytes]:
        return re.compile(self.source, self.flags)

    @cached_property
    def _hinted(self) -> re.Pattern[bytes]:
        return re.compile(self.hint)

    def scrub(self, line: bytes) -> bytes:
        if self._hinted.search(line) is None:
            return line

        def redact(match: re.Match[bytes]) -> bytes:
            return (match.groupdict().get("keep") or b"") + b"<redacted:%s>" % self.kind.encode()

        return self.regex.sub(redact, line)


SECRET_PATTERNS: Final[tuple[Pattern, ...]] = (
    Pattern(
        "private-key",
        rb"PRIVATE KEY",
        rb"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
        re.DOTALL,
    ),
    Pattern("huggingface-token", _LONG, _EDGE + rb"(?:hf_|api_org_)[A-Za-z0-9]{20,}"),
    Pattern("github-token", _LONG, _EDGE + rb"gh[pousr]_[A-Za-z0-9]{20,}"),
    Pattern("github-token", rb"_pat_", _EDGE + rb"github_pat_\w{20,}"),
    Pattern("gitlab-token", rb"pat-", _EDGE + rb"glpat-[\w-]{16,}"),
    Pattern("nvidia-api-key", rb"vapi-", _EDGE + rb"nvapi-[\w-]{20,}"),
    Pattern("api-key", rb"k-[\w-]{20}", _EDGE + rb"sk-(?=[\w-]{0,200}\d)[\w-]{20,}"),
    Pattern("aws-access-key", rb"KIA[A-Z0-9]{16}|SIA[A-Z0-9]{16}", _EDGE + rb"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    Pattern("slack-token", rb"xox[abeprs]-", _EDGE + rb"xox[abeprs]-[A-Za-z0-9-]{10,}"),
    Pattern("vault-token", rb"hvs\.", _EDGE + rb"hvs\.[\w-]{20,}"),
    Pattern("api-key", rb"gsk_|xai-|r8_", _EDGE + rb"(?:gsk_|xai-|r8_)[A-Za-z0-9]{20,}"),
    Pattern("tailscale-key", rb"tskey-", _EDGE + rb"tskey-[\w-]{16,}"),
    Pattern("age-key", rb"AGE-SECRET", rb"AGE-SECRET-KEY-1[A-Z0-9]{40,}"),
    Pattern("kubeconfig-key", rb"key-data", rb"(?P<keep>client-key-data" + _ASSIGN + rb")[A-Za-z0-9+/]{16,}={0,2}"),
    Pattern("docker-auth", rb"auth[\"'] ?:", rb"(?P<keep>[\"']auth[\"'] ?: ?[\"'])[A-Za-z0-9+/]{8,}={0,2}"),
    Pattern(
        "password",
        rb"password[ \t]",
        rb"(?P<keep>^[ +-]?\s*password[ \t]+(?=\S+\s*$)|\blogin\s+\S+\s+password[ \t]+)" + _PASSWORD,
    ),
    Pattern("cookie", rb"ookie: ", rb"(?P<keep>\b(?:Set-)?[Cc]ookie: )[^\s;=]{1,80}=[^\s;\"']{16,}"),
    Pattern(
        "webhook",
        rb"/webhook",
        rb"(?P<keep>(?:discord(?:app)?\.com/api/webhooks|webhook\.office\.com/webhookb2)/)[\w@/-]{20,}",
    ),
    Pattern("slack-webhook", rb"ks\.slack", rb"(?P<keep>hooks\.slack(?:-gov)?\.com/[a-z]+/)[\w/+-]{20,}"),
    Pattern("jwt", rb"yJ[\w-]{8}", _EDGE + rb"eyJ[\w-]{8,2000}\.[\w-]{8,}\.[\w-]*"),
    Pattern("google-api-key", rb"Iza", _EDGE + rb"AIza[\w-]{30,}"),
    Pattern("google-token", rb"ya29\.", _EDGE + rb"ya29\.[\w.-]{20,}"),
    Pattern("stripe-key", _LONG, _EDGE + rb"[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"),
    Pattern("npm-token", _LONG, _EDGE + rb"npm_[A-Za-z0-9]{36,}"),
    Pattern("pypi-token", rb"ypi-[\w-]{40}", _EDGE + rb"pypi-[\w-]{40,}"),
    Pattern("databricks-token", rb"pi[0-9a-f]{32}", _EDGE + rb"dapi[0-9a-f]{32}(?![0-9A-Za-z])"),
    Pattern("digitalocean-token", rb"_v1_", _EDGE + rb"do[opr]_v1_[0-9a-f]{40,}"),
    Pattern("docker-token", rb"kr_[op]at_", _EDGE + rb"dckr_[op]at_[\w-]{20,}"),
    Pattern("sendgrid-key", rb"G\.[\w-]{20}", _EDGE + rb"SG\.[\w-]{20,}\.[\w-]{30,}"),
    Pattern("wandb-key", rb"_v1_", _EDGE + rb"wandb_v1_\w{20,}"),
    Pattern(
        "wandb-key",
        rb"wandb[^\n]{0,120}[0-9a-f]{40}",
        rb"(?P<keep>wandb[^\n]{0,60}?(?:key|login)[ =:.\"']{1,50})[0-9a-f]{40}(?![0-9a-f])",
    ),
    Pattern("sas-signature", rb"\?sig=|&sig=", rb"(?P<keep>[?&]sig=)[\w%+/-]{20,}={0,2}"),
    Pattern("account-key", rb"Key=", rb"(?P<keep>(?:Account|AccessKey|Shared\w{0,20})Key=)[A-Za-z0-9+/]{40,}={0,2}"),
    Pattern("bearer-token", rb"Bearer|bearer", rb"(?P<keep>\b[Bb]earer\s+)(?=\S*\d)[\w.~+/=-]{16,}"),
    Pattern(
        "basic-auth",
        rb"Basic\s|basic\s",
        rb"(?P<keep>(?i:authorization)[\"']?\s*[:=]\s*[\"']?[Bb]asic\s+)[\w+/-]{8,}={0,2}",
    ),
    Pattern("url-password", rb"@", rb"(?P<keep>\b[A-Za-z][A-Za-z0-9+.-]{0,30}://[^/\s:@<\"']*:)[^/\s@\"']+(?=@)"),
    Pattern("url-token", rb"@", rb"(?P<keep>\bhttps?://)(?!<redacted)[^/\s:@?#\"'<>]{8,}(?=@)"),
    Pattern(
        "password",
        rb"word[\"']? ?[:=]|wd[\"']? ?[:=]|hrase[\"']? ?[:=]|cret[\"']? ?[:=]|WORD|PASSWD|PHRASE|SECRET",
        rb"(?P<keep>(?:[Pp]ass(?:wor|w)d|[Pp]assphrase|[Ss]ecret|PASS(?:WOR|W)D|PASSPHRASE|SECRET)"
        + _ASSIGN
        + rb")"
        + _PASSWORD,
    ),
    Pattern(
        "password",
        rb"_PWD|PASS[\"']? ?[:=]|_AUTH[\"']? ?[:=]|_DSN|_CREDS",
        rb"(?P<keep>(?:_PWD|_PASS|SSHPASS|_AUTH|_DSN|_CREDS)"
        + _ASSIGN
        + rb")(?!(?i:disabled|enabled|default)\b)"
        + _NOT_A_NUMBER
        + _PASSWORD,
    ),
    # In usage texts, the word after a flag is a placeholder, in capitals or brackets.
    Pattern(
        "password",
        rb"word[ =]|wd[ =]|hrase[ =]|cret[ =]",
        rb"(?P<keep>--(?:[\w-]{1,40}-)?(?:pass(?:wor|w)d|passphrase|secret)[ =][\"']?)(?!-|[A-Z_]+\b)" + _PASSWORD,
    ),
    Pattern(
        "password",
        rb"hpass |ker login|podman login|buildah login|kopeo login|helm registry login|wine upload|curl |wget |ysql",
        rb"(?P<keep>\b(?:(?:sshpass |(?:docker|podman|buildah|skopeo|helm registry) login|twine upload)"
        rb"[^\n|;&]{0,200}? -p[ =]?|mysql\w*[^\n|;&]{0,200}? -p"
        rb"|(?:curl|wget) [^\n|;&]{0,400}?(?:-u|--user)[ =][\"']?[^\s:\"']{1,80}:))(?!-)" + _PASSWORD,
    ),
    Pattern(
        "named-secret",
        rb"ken[\"']? ?[:=]|key[\"']? ?[:=]|Key[\"']? ?[:=]|TOKEN|KEY"
        rb"|ken \.{2,} [\"']?[\w.~+/=-]{16}|key \.{2,} [\"']?[\w.~+/=-]{16}|Key \.{2,} [\"']?[\w.~+/=-]{16}",
        rb"(?P<keep>(?:[Tt]oken|TOKEN|(?:[Aa]pi|[Aa]ccess|[Pp]rivate|[Ss]ecret)[_-]?[Kk]ey|(?:API|ACCESS|PRIVATE|SECRET)_?KEY)"
        rb"(?:" + _ASSIGN + rb"|" + _DOTTED + rb"))" + _NOT_A_NUMBER + rb"(?=[\w.~+/=-]{0,200}\d)" + _VALUE,
    ),
    Pattern(
        "named-secret",
        rb"ken[ =][\"']?[\w~+/=-][\w.~+/=-]{15}|key[ =][\"']?[\w~+/=-][\w.~+/=-]{15}",
        rb"(?P<keep>--(?:[\w-]{1,40}-)?(?:token|(?:api|access|private|secret|auth|wandb)-key)[ =][\"']?)"
        + _NOT_A_NUMBER
        + rb"(?=[\w.~+/=-]{0,200}\d)"
        + _VALUE,
    ),
)


def _join_hints(hints: Iterable[bytes]) -> re.Pattern[bytes]:
    rests: dict[bytes, list[bytes]] = {}
    for hint in sorted({part for joined in hints for part in joined.split(b"|")}):
        length = 2 if hint.startswith(b"\\") else 1
        rests.setdefault(hint[:length], []).append(hint[length:])
    return re.compile(b"|".join(first + b"(?:%s)" % b"|".join(rest) for first, rest in rests.items()))


_HINT: Final = _join_hints(pattern.hint for pattern in SECRET_PATTERNS)
_PEM: Final = SECRET_PATTERNS[0]

_LINE_ENDS: Final = re.compile(rb"[\r\n]+")
_SHORT_FLAGS: Final = frozenset({"-p", "-u", "--user"})

_SECRET_NAME: Final = re.compile(
    r"(?:^|_)(?:SECRETS?|[A-Z0-9]*(?:PASSWORD|PASSWD|PASSPHRASE)|CREDENTIALS?|API_?KEY|CONNECTION_?STRING"
    r"|(?:ACCESS|PRIVATE|SECRET|ACCOUNT|AUTH|WANDB|SIGNING|ENCRYPTION)_KEY)(?:_|$)"
    r"|_(?:PWD|PASS|AUTH|DSN|CREDS|COOKIE|JWT|PAT)$|^(?:DB|PG|SSH|SUDO|SMTP|REDIS|MYSQL)PASS$|^(?:DSN|CREDS)$"
    r"|(?:^|_)(?<!EOS_)(?<!BOS_)(?<!PAD_)(?<!UNK_)(?<!SEP_)(?<!CLS_)(?<!MASK_)(?<!STOP_)(?<!PER_)(?<!IMAGE_)TOKEN$"
)
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
    if _HINT.search(data) is not None:
        for pattern in SECRET_PATTERNS:
            if pattern.regex.search(data) is not None:
                return pattern.kind
    if is_secret_name(name) and _is_opaque(value):
        return "named like one"
    return None


def is_secret_name(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").upper()
    if _ADDRESS_NAME.search(words) is not None:
        return True
    return _SECRET_NAME.search(words) is not None and _REFERENCE_NAME.search(words) is None


def scrub(text: str) -> str:
    return Scrubber().text(text)


def scrub_bytes(block: bytes) -> bytes:
    """Scrub whole log lines; a line in which colours hide a secret loses its colours."""
    if b"\x1b" in block:
        block = _edit_lines(block, ESCAPES, _scrub_colours)
    if _HINT.search(block) is None:
        return block
    if _PEM.hint in block:
        block = _PEM.scrub(block)
    return _edit_lines(block, _HINT, _scrub_line)


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
        else:
            clean.append(_scrub_word(clean, argument))
        flag = argument.lstrip("-") if argument.startswith("--") and not separator else ""
    return clean


def _scrub_word(before: list[str], word: str) -> str:
    """Scrub one word; the words before it, such as ``docker login``, show whether ``-p`` takes a password."""
    line = " ".join([*before, word]).encode(errors="surrogatepass")
    if before and before[-1] in _SHORT_FLAGS:
        found = [match.end() for pattern in SECRET_PATTERNS for match in pattern.regex.finditer(line)]
        if len(line) in found:
            return "<redacted:argument>"
    return scrub(word)


def _edit_lines(block: bytes, wanted: re.Pattern[bytes], edit: Callable[[bytes], bytes]) -> bytes:
    parts, done = [], 0
    while (found := wanted.search(block, done)) is not None:
        begun = max(block.rfind(b"\n", done, found.start()), block.rfind(b"\r", done, found.start()), done - 1) + 1
        line_end = _LINE_ENDS.search(block, found.start())
        end = len(block) if line_end is None else line_end.start()
        parts += [block[done:begun], edit(block[begun:end])]
        done = end
    return b"".join([*parts, block[done:]]) if parts else block


def _scrub_colours(line: bytes) -> bytes:
    plain = line
    while (bare := ESCAPES.sub(b"", plain)) != plain:
        plain = bare
    clean = _scrub_line(plain) if _HINT.search(plain) else plain
    return line if clean == plain else clean


def _scrub_line(line: bytes) -> bytes:
    for pattern in SECRET_PATTERNS:
        line = pattern.scrub(line)
    return line


def _is_opaque(value: str) -> bool:
    """Tell whether a value may be a secret: no switch, number, path, phrase, or URL without a password."""
    return _can_be_known(value) and re.search(r"\s", value.strip()) is None


def _can_be_known(value: str) -> bool:
    plain = value.strip()
    if len(plain) < MIN_LENGTH or plain.startswith(("/", "./", "~", "$", "<")):
        return False
    return not re.fullmatch(r"[-+]?[\d.]+|(?i:disabled|offline|enabled|default)|[\w+.-]+://[^@?\s]*", plain)
