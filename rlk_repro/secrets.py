"""What looks like a secret, and taking it out of text and log lines.

Recognising is by shape (the prefixes that token issuers chose for this purpose) and by name (``HF_TOKEN``).  It is a
net against accidents, not a proof: a password that looks like a word passes unless its variable is known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

MIN_KNOWN_LENGTH: Final = 6
_EDGE: Final = rb"(?<![A-Za-z0-9])"
_ASSIGN: Final = rb"[\"']? ?[:=] ?[\"']?"
_NOT_A_NUMBER: Final = rb"(?![-+]?[\d.]+(?:[eE][-+]?\d+)?(?![\w.]))"


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One kind of secret.

    ``hint`` is found wherever ``regex`` matches, and begins with a literal, uncommon letter: that keeps the scan of
    ordinary lines, which looks for hints only, fast.  A group named ``keep`` stays in front of the redacted part.
    """

    kind: str
    hint: bytes
    regex: re.Pattern[bytes] = field(repr=False)

    def scrub(self, line: bytes) -> bytes:
        def redact(match: re.Match[bytes]) -> bytes:
            return (match.groupdict().get("keep") or b"") + marker(self.kind)

        return self.regex.sub(redact, line)


def marker(kind: str) -> bytes:
    return b"<redacted:%s>" % kind.encode()


def _pattern(kind: str, hint: bytes, regex: bytes, flags: int = 0) -> Pattern:
    return Pattern(kind=kind, hint=hint, regex=re.compile(regex, flags))


SECRET_PATTERNS: Final[tuple[Pattern, ...]] = (
    _pattern(
        "private-key",
        rb"PRIVATE KEY",
        rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        re.DOTALL,
    ),
    _pattern("huggingface-token", rb"f_[A-Za-z0-9]{20}", _EDGE + rb"hf_[A-Za-z0-9]{20,}"),
    _pattern("github-token", rb"h[pousr]_", _EDGE + rb"gh[pousr]_[A-Za-z0-9]{20,}"),
    _pattern("github-token", rb"b_pat_", _EDGE + rb"github_pat_\w{20,}"),
    _pattern("gitlab-token", rb"pat-", _EDGE + rb"glpat-[\w-]{16,}"),
    _pattern("nvidia-api-key", rb"vapi-", _EDGE + rb"nvapi-[\w-]{20,}"),
    _pattern("api-key", rb"k-[\w-]{20}", _EDGE + rb"sk-(?=[\w-]*\d)[\w-]{20,}"),
    _pattern("aws-access-key", rb"KIA", _EDGE + rb"AKIA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _pattern("aws-access-key", rb"SIA", _EDGE + rb"ASIA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _pattern("slack-token", rb"xox[abeprs]-", _EDGE + rb"xox[abeprs]-[A-Za-z0-9-]{10,}"),
    _pattern("jwt", rb"yJ[\w-]{8}", _EDGE + rb"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
    _pattern("wandb-key", rb"b_v1_", _EDGE + rb"wandb_v1_\w{20,}"),
    _pattern(
        "wandb-key",
        rb"wandb[^\n]{0,90}[0-9a-f]{40}",
        rb"(?P<keep>wandb[^\n]{0,60}?(?:key|login)[ =:\"']{1,6})[0-9a-f]{40}(?![0-9a-f])",
    ),
    _pattern("bearer-token", rb"Bearer", rb"(?P<keep>\bBearer\s+)(?=\S*\d)[\w.~+/=-]{16,}"),
    _pattern("bearer-token", rb"bearer", rb"(?P<keep>\bbearer\s+)(?=\S*\d)[\w.~+/=-]{16,}"),
    _pattern("url-password", rb"@", rb"(?P<keep>\b[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@\"']*:)[^/\s@\"']+(?=@)"),
    _pattern(
        "password",
        rb"word[\"']? ?[:=]|wd[\"']? ?[:=]|hrase[\"']? ?[:=]|cret[\"']? ?[:=]|WORD|PASSWD|PHRASE|SECRET",
        rb"(?P<keep>(?:[Pp]ass(?:wor|w)d|[Pp]assphrase|[Ss]ecret|PASS(?:WOR|W)D|PASSPHRASE|SECRET)"
        + _ASSIGN
        + rb")(?!<redacted)[^\s\"',;<>{}()\[\]]{6,}",
    ),
    _pattern(
        "named-secret",
        rb"ken[\"']? ?[:=]|key[\"']? ?[:=]|Key[\"']? ?[:=]|TOKEN|KEY",
        rb"(?P<keep>(?:[Tt]oken|TOKEN|(?:[Aa]pi|[Aa]ccess|[Pp]rivate|[Ss]ecret)[_-]?[Kk]ey|(?:API|ACCESS|PRIVATE|SECRET)_?KEY)"
        + _ASSIGN
        + rb")"
        + _NOT_A_NUMBER
        + rb"(?=[\w.~+/=-]*\d)[\w.~+/=-]{16,}",
    ),
)

_HINT: Final = re.compile(b"|".join(pattern.hint for pattern in SECRET_PATTERNS))
_PEM: Final = SECRET_PATTERNS[0]

_SECRET_NAME: Final = re.compile(
    r"(?:^|_)(?:SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|(?:ACCESS|PRIVATE|SECRET|ACCOUNT)_KEY)(?:_|$)"
    r"|(?:^|_)(?<!EOS_)(?<!BOS_)(?<!PAD_)(?<!UNK_)(?<!SEP_)(?<!CLS_)(?<!MASK_)(?<!STOP_)(?<!PER_)(?<!IMAGE_)TOKEN$"
)
# ``AWS_SHARED_CREDENTIALS_FILE`` and ``image_pull_secret`` say where a secret is; they are none.
_REFERENCE_NAME: Final = re.compile(r"_(?:FILE|PATH|DIR|NAME|REF|ENV|URL|TTL|LENGTH)$|PULL_SECRETS?$|^FROM_ENV$")


def looks_secret(name: str, value: str) -> str | None:
    """Why a setting looks like a secret (``github-token``, ``named like one``), or None.

    ``name`` may be any case and style: ``hfToken``, ``hf-token`` and ``HF_TOKEN`` are one name.
    """
    data = value.encode(errors="replace")
    if _HINT.search(data) is not None:
        for pattern in SECRET_PATTERNS:
            if pattern.regex.search(data) is not None:
                return pattern.kind
    if is_secret_name(name) and _is_opaque(value):
        return "named like one"
    return None


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret by convention; ``eos_token`` and ``MAX_TOKENS`` do not."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").upper()
    return _SECRET_NAME.search(words) is not None and _REFERENCE_NAME.search(words) is None


def scrub(text: str) -> str:
    """``text`` with every secret-looking token replaced by ``<redacted:kind>``."""
    return Scrubber().text(text)


def scrub_bytes(line: bytes) -> bytes:
    """The same for whole lines of a log; a line without a secret is returned as it is, after one regex scan."""
    if _HINT.search(line) is None:
        return line
    if _PEM.hint in line:
        line = _PEM.scrub(line)
    return b"".join(_scrub_line(part) for part in line.splitlines(keepends=True))


class Scrubber:
    """Also removes known values literally, wherever they appear.  Values under 6 characters are ignored."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = {value.encode(errors="surrogateescape") for value in values if len(value) >= MIN_KNOWN_LENGTH}
        self._known = tuple(sorted(known, key=lambda value: (-len(value), value)))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Scrubber:
        """Knows the values of the secret-named variables of ``environ``, by default this process's."""
        variables = os.environ if environ is None else environ
        return cls(value for name, value in variables.items() if is_secret_name(name) and _is_opaque(value))

    def bytes(self, line: bytes) -> bytes:
        """Scrub whole lines; a private key is removed whole only when all its lines come in one call."""
        for value in self._known:
            if value in line:
                line = line.replace(value, marker("known-value"))
        return scrub_bytes(line)

    def text(self, text: str) -> str:
        return self.bytes(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")


def scrub_argv(argv: Iterable[str]) -> list[str]:
    """A command line for the record: also ``--api-key VALUE`` and ``--api-key=VALUE`` lose their value."""
    clean: list[str] = []
    flag = ""
    for argument in argv:
        name, separator, value = argument.partition("=")
        if flag and looks_secret(flag, argument):
            clean.append("<redacted:argument>")
        elif separator and looks_secret(name.lstrip("-"), value):
            clean.append(f"{name}=<redacted:argument>")
        else:
            clean.append(scrub(argument))
        flag = argument.lstrip("-") if argument.startswith("--") and not separator else ""
    return clean


def _scrub_line(line: bytes) -> bytes:
    if _HINT.search(line) is None:
        return line
    for pattern in SECRET_PATTERNS:
        line = pattern.scrub(line)
    return line


def _is_opaque(value: str) -> bool:
    """Not a switch, a number, a path or a phrase: the values under which a secret-like name means something else."""
    plain = value.strip()
    if len(plain) < MIN_KNOWN_LENGTH or plain.startswith(("/", "./", "~", "$", "<")):
        return False
    return not re.search(r"\s", plain) and not re.fullmatch(r"[-+]?[\d.]+|(?i:disabled|offline|enabled|default)", plain)
