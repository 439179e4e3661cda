"""API keys: who may match, who may change phrases.

A file of keys has one a line: `name: key`; `name: sha256:<hex>` where the file is not to hold the key itself
(`printf %s "$KEY" | sha256sum`); or a key alone. `#` begins a comment line. A name may stand on several
lines, so that an old and a new key hold at once while callers change over. The file is read again when it
changes.

Who needs a key (`guard_for`):

| auth | listens on | files | /match | phrases and /admin |
| --- | --- | --- | --- | --- |
| auto | loopback | none | anyone | anyone |
| auto | elsewhere | none | refused to start | refused to start |
| on | anywhere | none | refused to start | refused to start |
| auto, on | anywhere | API keys | API keys | nobody |
| auto, on | anywhere | admin keys | admin keys | admin keys |
| auto, on | anywhere | both | either | admin keys |
| off | anywhere | any | anyone | anyone |

One file is enough to close everything: an admin file given alone must not leave `/match` open by accident.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from bidmatch.base.console import say
from bidmatch.base.errors import ConfigError
from service.problems import ProblemError

MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 512
MAX_KEYS = 1000
_MAX_FILE_BYTES = 1 << 20
# A file changed twice within one tick of its clock may look the same; until it is this old it is read again.
_SETTLED_S = 2.0
_REMEMBERED = 1024

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH_NAME = re.compile(r"(sha|md|blake)-?\d", re.IGNORECASE)
_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
_VISIBLE = re.compile(r"[\x21-\x7e]+")

_log = logging.getLogger("bidmatch.service")


class KeyRing:
    """The keys of a file, which is read again when it changes.

    Args:
        file: the file; links are followed, so that a secret which is swapped by its link is noticed.
        look_every: seconds for which it is taken to be unchanged.

    Raises:
        ConfigError: it can't be read, has a wrong line, or no key.
    """

    def __init__(self, file: Path, look_every: float = 1.0):
        self.file = file
        self._look_every = look_every
        self._secret = secrets.token_bytes(32)
        self._keys: dict[bytes, str] = {}
        self._remembered: dict[bytes, str] = {}
        self._seen: tuple[int, ...] | None = None
        self._complaint: str | None = None
        self._look_at = time.monotonic() + look_every
        self._read()

    def __len__(self) -> int:
        return len(self._keys)

    def shares_a_key_with(self, other: KeyRing) -> bool:
        """Whether some key is in both."""
        return not self._keys.keys().isdisjoint(other._keys)

    def name(self, key: bytes) -> str | None:
        """Whose key it is, or None. How long this takes says nothing about any key."""
        if time.monotonic() >= self._look_at:
            self._look_again()
        # A dictionary's time depends on what it is asked for: here something that nobody can foresee.
        known = hashlib.blake2b(key, key=self._secret, digest_size=16).digest()
        name = self._remembered.get(known)
        if name is not None:
            return name
        digest = hashlib.sha256(key).digest()
        for each, owner in self._keys.items():
            if hmac.compare_digest(each, digest):
                name = owner
        if name is not None:
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[known] = name
        return name

    def _look_again(self) -> None:
        """Take over what changed; a file that is wrong now leaves the keys as they were."""
        self._look_at = time.monotonic() + self._look_every
        before = self._keys
        try:
            if self._signature() != self._seen:
                self._read()
        except (ConfigError, OSError) as error:
            complaint = error.reason if isinstance(error, ConfigError) else _unreadable(self.file, error)
            if complaint != self._complaint:
                _log.error("the keys stay as they were: %s", complaint)
            self._complaint = complaint
            return
        if self._complaint is not None or self._keys != before:
            _log.warning("%s was read again: %d keys", self.file, len(self._keys))
        self._complaint = None

    def _signature(self) -> tuple[int, ...]:
        status = self.file.stat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self) -> None:
        try:
            signature = self._signature()
            with self.file.open("rb") as stream:
                content = stream.read(_MAX_FILE_BYTES + 1)
            changing = self._signature() != signature
        except OSError as error:
            raise ConfigError(
                _unreadable(self.file, error), hint="Name a readable file with one key a line."
            ) from None
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(
                f"{self.file} has more than {_MAX_FILE_BYTES} bytes",
                hint=f"Keep it to one key a line, {MAX_KEYS} at most.",
            )
        keys = _parse(content, self.file)
        settled = time.time() - signature[-1] / 1e9 > _SETTLED_S
        self._seen = signature if settled and not changing else None
        if keys != self._keys:
            self._keys, self._remembered = keys, {}


def _unreadable(file: Path, error: OSError) -> str:
    return f"{file} cannot be read: {error.strerror}"


def _parse(content: bytes, file: Path) -> dict[bytes, str]:
    """SHA-256 of each key, and its name."""
    keys: dict[bytes, str] = {}
    lines: dict[bytes, int] = {}
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        line = raw.decode("latin-1").strip()
        if not line or line.startswith("#"):
            continue
        where = f"{file}, line {number}"
        digest, name = _key(line, where)
        if digest in lines:
            raise ConfigError(f"{where}: the key of line {lines[digest]} again", hint="Remove one of them.")
        if len(keys) == MAX_KEYS:
            raise ConfigError(f"{where}: more than {MAX_KEYS} keys", hint="Remove those that nobody uses.")
        keys[digest], lines[digest] = name or f"key-{len(keys) + 1}", number
    if not keys:
        raise ConfigError(
            f"{file} holds no key, so nobody could call",
            hint="Put a key into it, one a line, such as openssl rand -hex 32 makes.",
        )
    return keys


def _key(line: str, where: str) -> tuple[bytes, str | None]:
    """Digest and name of a line. What it says is not repeated in an error: it may be a secret."""
    name, value = None, line
    if not line.lower().startswith("sha256:"):
        before, colon, after = line.partition(":")
        if colon:
            name, value = before, after.strip()
            # sha512 and the like: the digest behind it would be taken for a key.
            if not _NAME.fullmatch(name) or _HASH_NAME.match(name):
                raise ConfigError(
                    f"{where}: what stands before the colon is no name",
                    hint="Write `name: key`, the name of at most 64 letters, digits, dots, dashes and "
                    "underscores, and not of a hash other than sha256.",
                )
    if value.lower().startswith("sha256:"):
        digest = value.partition(":")[2].strip()
        if not _SHA256.fullmatch(digest):
            raise ConfigError(
                f"{where}: behind sha256: are not 64 hexadecimal digits",
                hint='Make them with: printf %s "$KEY" | sha256sum',
            )
        return bytes.fromhex(digest), name
    if not MIN_KEY_CHARS <= len(value) <= MAX_KEY_CHARS:
        raise ConfigError(
            f"{where}: the key has {len(value)} characters, not {MIN_KEY_CHARS} to {MAX_KEY_CHARS}",
            hint="Make one with: openssl rand -hex 32",
        )
    if not _VISIBLE.fullmatch(value):
        raise ConfigError(
            f"{where}: the key has other characters than visible ASCII ones",
            hint="Make one with: openssl rand -hex 32",
        )
    return hashlib.sha256(value.encode()).digest(), name


class Guard:
    """Lets requests through by their key.

    Args:
        keys: keys that may match, or None for no such.
        admin: keys that may do everything, or None for no such.
        required: whether a key is needed at all.
        local: whether only this machine can reach the service.
    """

    def __init__(self, keys: KeyRing | None, admin: KeyRing | None, *, required: bool, local: bool = False):
        self.keys, self.admin_keys, self.required, self.local = keys, admin, required, local

    def match(self, scope: Mapping[str, Any]) -> str | None:
        """Who matches: the name of the key, None where none is needed.

        Args:
            scope: the request's ASGI scope; its headers' names are in lower case.

        Raises:
            ProblemError: 401, no key or an unknown one.
        """
        if not self.required:
            return None
        key = _sent_key(scope)
        name = None if self.keys is None else self.keys.name(key)
        if name is None and self.admin_keys is not None:
            name = self.admin_keys.name(key)
        if name is None:
            raise _unauthorized("The key is not known.")
        return name

    def admin(self, scope: Mapping[str, Any]) -> str | None:
        """Who administers; otherwise as `match`.

        Raises:
            ProblemError: 401, no key or an unknown one; 403, a key that may only match, or there is no admin
                key; where no key is needed, 403 of what another site's page in a browser here sends.
        """
        if not self.required:
            if _is_of_another_site(scope, local=self.local):
                raise _forbidden(
                    "This comes from a page of another site. Without keys only programs and pages of this "
                    f"service may do that; give keys: {_FILES}."
                )
            return None
        if self.admin_keys is None:
            raise _forbidden("No admin key is configured, so nobody may do this.")
        key = _sent_key(scope)
        name = self.admin_keys.name(key)
        if name is not None:
            return name
        if self.keys is not None and self.keys.name(key) is not None:
            raise _forbidden("This takes an admin key; the one sent may only match.")
        raise _unauthorized("The key is not known.")


def _is_of_another_site(scope: Mapping[str, Any], *, local: bool) -> bool:
    """Whether a browser sent this for a page that is not of this service; programs say nothing of the kind.

    Args:
        scope: the request's ASGI scope.
        local: whether the service listens on loopback only: then a name that is none of this machine's to
            itself leads here because somebody else's name server says so.
    """
    sent = dict(scope["headers"])
    site, origin = sent.get(b"sec-fetch-site"), sent.get(b"origin")
    if site is None and origin is None:
        return False
    host = sent.get(b"host", b"")
    if site not in (None, b"same-origin", b"none"):
        return True
    if origin is not None and origin.partition(b"://")[2] != host:
        return True
    name = urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    return local and not (name == "localhost" or name.endswith(".localhost") or _names_loopback(name))


def _names_loopback(name: str) -> bool:
    try:
        return _is_loopback(name)
    except ValueError:
        return False


def _sent_key(scope: Mapping[str, Any]) -> bytes:
    key: bytes | None = None
    for header, value in scope["headers"]:
        if header == b"authorization":
            scheme, _, sent = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                continue
        elif header == b"x-api-key":
            sent = value
        else:
            continue
        sent = sent.strip()
        if key is not None and sent != key:
            raise _unauthorized("Several keys were sent, and they differ.")
        key = sent
    if not key:
        raise _unauthorized("Send a key: `Authorization: Bearer KEY` or `X-API-Key: KEY`.")
    if len(key) > MAX_KEY_CHARS:
        raise _unauthorized("The key is not known.")
    return key


def _unauthorized(detail: str) -> ProblemError:
    return ProblemError(401, "unauthorized", detail, headers={"WWW-Authenticate": "Bearer"})


def _forbidden(detail: str) -> ProblemError:
    return ProblemError(403, "forbidden", detail)


_FILES = (
    "BIDMATCH_API_KEYS_FILE (--api-keys-file, for /match) and "
    "BIDMATCH_ADMIN_KEYS_FILE (--admin-keys-file, for phrases and /admin)"
)


def guard_for(
    host: str,
    auth: Literal["auto", "on", "off"],
    api_keys_file: Path | None,
    admin_keys_file: Path | None,
    say: Callable[[str], None] = say,
) -> Guard:
    """The guard that the settings ask for; says aloud what they leave open, or closed to everybody.

    Raises:
        ConfigError: keys are needed and there are none, or a file of keys is wrong.
    """
    given = api_keys_file is not None or admin_keys_file is not None
    local = is_loopback(host)
    if auth == "off":
        if given:
            say("auth is off: the files of keys are not read")
        if given or not local:
            say(f"auth is off: anyone who reaches {host} may match, add, change and remove phrases")
        return Guard(None, None, required=False, local=local)
    if not given and auth == "auto" and local:
        return Guard(None, None, required=False, local=True)
    if not given:
        reason = "auth is on" if auth == "on" else f"{host} can be reached from other machines"
        raise ConfigError(
            f"{reason}, and no API keys are given",
            hint=f"Give a file of keys: {_FILES}. Or let everybody in: BIDMATCH_AUTH=off (--auth off)"
            + (", or listen on 127.0.0.1." if auth == "auto" else "."),
        )
    keys = KeyRing(api_keys_file) if api_keys_file else None
    admin = KeyRing(admin_keys_file) if admin_keys_file else None
    if keys is not None and admin is not None and keys.shares_a_key_with(admin):
        raise ConfigError(
            f"{keys.file} and {admin.file} hold the same key",
            hint="Remove it from the first; an admin key may match anyway.",
        )
    if admin is None:
        say("no admin keys are given: phrases and /admin answer 403 to everybody")
    if keys is None:
        say("no keys for matching are given: /match takes admin keys only")
    return Guard(keys, admin, required=True)


def is_loopback(host: str) -> bool:
    """Whether all addresses of the host are those of this machine to itself; False where it has none."""
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        return False
    return all(_is_loopback(str(address[0])) for *_, address in found)


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
