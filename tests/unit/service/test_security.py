from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bidmatch.base.errors import ConfigError
from service.problems import ProblemError
from service.security import MAX_KEYS, Guard, KeyRing, guard_for, is_loopback

AUCTION, OTHER, ADMIN = "auction-key-0123456789", "other-key-9876543210", "admin-key-0123456789"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def ring(file: Path, *lines: str) -> KeyRing:
    file.write_text("\n".join((*lines, "")))
    return KeyRing(file, look_every=0)


def replace(file: Path, content: str) -> None:
    """As an editor or `mv` does: the whole file at once."""
    other = file.with_suffix(".new")
    other.write_text(content)
    other.replace(file)


def scope(*headers: tuple[str, str]) -> dict[str, object]:
    return {"headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]}


def bearer(key: str) -> dict[str, object]:
    return scope(("Host", "a"), ("Authorization", f"Bearer {key}"))


def refused(call: Callable[[dict], object], request: dict[str, object]) -> ProblemError:
    with pytest.raises(ProblemError) as raised:
        call(request)
    return raised.value


# Files


def test_lines_of_a_file(file: Path) -> None:
    digest = hashlib.sha256(b"hashed-key-0123456789").hexdigest()
    keys = ring(
        file,
        "# comment",
        "",
        f"auction: {AUCTION}",
        f"  scoring:{OTHER}  ",
        "lonely-key-0123456789",
        f"hashed: sha256:{digest.upper()}",
        "sha256: " + hashlib.sha256(b"nameless-key-0123456789").hexdigest(),
        "odd: a:b!#$~{}\"'\\|:0123456789",
    )
    assert len(keys) == 6
    assert keys.name(AUCTION.encode()) == "auction"
    assert keys.name(OTHER.encode()) == "scoring"
    assert keys.name(b"lonely-key-0123456789") == "key-3"
    assert keys.name(b"hashed-key-0123456789") == "hashed"
    assert keys.name(b"nameless-key-0123456789") == "key-5"
    assert keys.name(b"a:b!#$~{}\"'\\|:0123456789") == "odd"
    for unknown in (
        b"",
        b"auction",
        AUCTION[:-1].encode(),
        AUCTION.encode() + b"x",
        digest.encode(),
        b"\xff",
    ):
        assert keys.name(unknown) is None


def test_two_keys_of_one_name(file: Path) -> None:
    keys = ring(file, f"auction: {AUCTION}", f"auction: {OTHER}")
    assert keys.name(AUCTION.encode()) == keys.name(OTHER.encode()) == "auction"


def test_windows_lines_and_byte_order_mark(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbfauction: " + AUCTION.encode() + b"\r\n" + OTHER.encode() + b"\r\n")
    keys = KeyRing(file)
    assert keys.name(AUCTION.encode()) == "auction"
    assert keys.name(OTHER.encode()) == "key-2"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("short", "the key has 5 characters, not 16 to 512"),
        ("auction: short", "the key has 5 characters"),
        ("auction:", "the key has 0 characters"),
        ("x" * 513, "the key has 513 characters"),
        ("a key with spaces in it", "visible ASCII"),
        ("schlüssel-0123456789", "visible ASCII"),
        ("auction: key\x7fkey-0123456789", "visible ASCII"),
        ("two words: 0123456789abcdef", "no name"),
        (f"{'n' * 65}: {AUCTION}", "no name"),
        (f": {AUCTION}", "no name"),
        ("sha512: " + "0" * 128, "no name"),
        ("SHA-1:" + "0" * 40, "no name"),
        ("sha256: 1234", "64 hexadecimal digits"),
        ("auction: sha256:" + "g" * 64, "64 hexadecimal digits"),
        ("SHA256:" + "0" * 65, "64 hexadecimal digits"),
        (f"again: {OTHER}", "the key of line 1 again"),
        (f"again: sha256:{hashlib.sha256(OTHER.encode()).hexdigest()}", "the key of line 1 again"),
    ],
)
def test_a_wrong_line(file: Path, line: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ring(file, f"first: {OTHER}", "# comment", line)
    assert f"{file}, line 3: " in raised.value.reason
    assert reason in raised.value.reason
    assert raised.value.hint


@pytest.mark.parametrize("line", ["two words: KEY", "KEY with words", "sha256:KEY", "sha512:KEY", "KEY"])
def test_an_error_does_not_repeat_what_may_be_a_secret(file: Path, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ring(file, line.replace("KEY", "s3cret"))
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("content", ["", "\n\n", "# only a comment\n"])
def test_a_file_without_keys(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match="holds no key") as raised:
        KeyRing(file)
    assert str(file) in raised.value.reason


def test_a_file_that_is_not_there(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        KeyRing(file)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        KeyRing(tmp_path)


def test_too_much(file: Path) -> None:
    assert len(ring(file, *(f"key-0123456789-{number}" for number in range(MAX_KEYS)))) == MAX_KEYS
    with pytest.raises(ConfigError, match=rf"line {MAX_KEYS + 1}: more than {MAX_KEYS} keys"):
        ring(file, *(f"key-0123456789-{number}" for number in range(MAX_KEYS + 1)))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        ring(file, "#" * (1 << 20))


# Files that change


def test_a_key_that_is_added_and_one_that_is_removed(file: Path) -> None:
    keys = ring(file, f"auction: {AUCTION}")
    assert keys.name(AUCTION.encode()) == "auction"
    replace(file, f"auction: {OTHER}\n")
    assert keys.name(AUCTION.encode()) is None
    assert keys.name(OTHER.encode()) == "auction"


def test_a_file_written_in_place_within_one_tick_of_its_clock(file: Path) -> None:
    keys = ring(file, AUCTION[:18])
    before = file.stat()
    file.write_text(OTHER[:18] + "\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert keys.name(OTHER[:18].encode()) == "key-1"
    assert keys.name(AUCTION[:18].encode()) is None


def test_an_old_file_that_is_replaced_by_an_older_one(file: Path) -> None:
    file.write_text(f"{AUCTION}\n")
    os.utime(file, (1_700_000_000, 1_700_000_000))
    keys = KeyRing(file, look_every=0)
    other = file.with_suffix(".new")
    other.write_text(f"{OTHER}\n")
    os.utime(other, (1_600_000_000, 1_600_000_000))
    other.replace(file)
    assert keys.name(OTHER.encode()) == "key-1"


def test_a_secret_that_is_swapped_by_its_link(tmp_path: Path) -> None:
    """As Kubernetes does: keys -> ..data/keys, ..data -> ..version."""
    for version, key in (("..1", AUCTION), ("..2", OTHER)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys").write_text(f"auction: {key}\n")
        os.utime(tmp_path / version / "keys", (1_700_000_000, 1_700_000_000))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys").symlink_to("..data/keys")
    keys = KeyRing(tmp_path / "keys", look_every=0)
    assert keys.name(AUCTION.encode()) == "auction"
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    assert keys.name(AUCTION.encode()) is None
    assert keys.name(OTHER.encode()) == "auction"


def test_a_file_is_not_looked_at_for_every_request(file: Path) -> None:
    file.write_text(f"{AUCTION}\n")
    keys = KeyRing(file, look_every=3600)
    replace(file, f"{OTHER}\n")
    assert keys.name(AUCTION.encode()) == "key-1"


@pytest.mark.parametrize("broken", ["short\n", "", None])
def test_a_file_that_becomes_wrong_keeps_the_keys_and_is_said_once(
    file: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    keys = ring(file, f"auction: {AUCTION}")
    if broken is None:
        file.unlink()
    else:
        replace(file, broken)
    for _ in range(3):
        assert keys.name(AUCTION.encode()) == "auction"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert str(file) in record.getMessage()
    assert broken != "short\n" or "line 1" in record.getMessage()
    replace(file, f"auction: {OTHER}\n")
    assert keys.name(AUCTION.encode()) is None
    assert keys.name(OTHER.encode()) == "auction"
    assert "was read again: 1 keys" in caplog.records[-1].getMessage()
    replace(file, broken or "")
    assert keys.name(OTHER.encode()) == "auction"
    assert [each.levelno for each in caplog.records].count(logging.ERROR) == 2


def test_a_file_that_comes_back_as_it_was_is_said(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(f"{AUCTION}\n")
    os.utime(file, (1_700_000_000, 1_700_000_000))
    keys = KeyRing(file, look_every=0)
    for _ in range(2):
        file.rename(file.with_suffix(".away"))
        keys.name(b"x")
        file.with_suffix(".away").rename(file)
        keys.name(b"x")
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING] * 2


# Requests


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    return Guard(
        ring(tmp_path / "keys", f"auction: {AUCTION}", f"other: {OTHER}"),
        ring(tmp_path / "admins", f"operations: {ADMIN}"),
        required=True,
    )


@pytest.mark.parametrize(
    "request_",
    [
        scope(("Authorization", f"Bearer {AUCTION}")),
        scope(("Authorization", f"bearer   {AUCTION} ")),
        scope(("X-API-Key", AUCTION)),
        scope(("X-Api-Key", AUCTION), ("Authorization", f"Bearer {AUCTION}")),
        scope(("Authorization", "Basic YTpi"), ("X-API-Key", AUCTION)),
    ],
)
def test_ways_to_send_a_key(guard: Guard, request_: dict) -> None:
    for _ in range(2):
        assert guard.match(request_) == "auction"


@pytest.mark.parametrize(
    "request_",
    [
        scope(),
        scope(("Authorization", AUCTION)),
        scope(("Authorization", "Bearer")),
        scope(("Authorization", "Bearer ")),
        scope(("Authorization", f"Basic {AUCTION}")),
        scope(("X-API-Key", "")),
        scope(("X-API-Key", "unknown-key-0123456789")),
        scope(("X-API-Key", "é" * 20)),
        scope(("X-API-Key", "x" * 60_000)),
        scope(("X-API-Key", f"Bearer {AUCTION}")),
        scope(("X-API-Key", AUCTION), ("X-API-Key", OTHER)),
        scope(("X-API-Key", AUCTION), ("Authorization", f"Bearer {OTHER}")),
        scope(("X-API-Key", ""), ("Authorization", f"Bearer {AUCTION}")),
        scope(("Authorization", f"Bearer {AUCTION}"), ("Authorization", f"Bearer {ADMIN}")),
        scope(("Cookie", AUCTION)),
    ],
)
def test_requests_without_a_known_key(guard: Guard, request_: dict) -> None:
    for call in (guard.match, guard.admin):
        problem = refused(call, request_)
        assert (problem.status, problem.kind) == (401, "unauthorized")
        assert problem.headers == {"WWW-Authenticate": "Bearer"}
        assert AUCTION not in problem.detail


def test_who_may_do_what(guard: Guard) -> None:
    assert guard.match(bearer(OTHER)) == "other"
    assert guard.match(bearer(ADMIN)) == guard.admin(bearer(ADMIN)) == "operations"
    problem = refused(guard.admin, bearer(AUCTION))
    assert (problem.status, problem.kind) == (403, "forbidden")


def test_a_key_that_was_used_and_is_removed(guard: Guard) -> None:
    assert guard.keys is not None
    assert guard.match(bearer(AUCTION)) == "auction"
    replace(guard.keys.file, f"other: {OTHER}\n")
    assert refused(guard.match, bearer(AUCTION)).status == 401


def test_more_keys_than_are_remembered(tmp_path: Path) -> None:
    texts = [f"key-0123456789-{number}" for number in range(MAX_KEYS)]
    keys = ring(tmp_path / "keys", *texts)
    os.utime(keys.file, (1_700_000_000, 1_700_000_000))
    for _ in range(2):
        assert [keys.name(text.encode()) for text in texts] == [f"key-{n + 1}" for n in range(MAX_KEYS)]


# Settings


class Said(list):
    def __call__(self, line: str) -> None:
        self.append(line)

    @property
    def text(self) -> str:
        return "\n".join(self)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "keys").write_text(f"auction: {AUCTION}\n")
    (tmp_path / "admins").write_text(f"operations: {ADMIN}\n")
    return {"keys": tmp_path / "keys", "admins": tmp_path / "admins"}


def test_on_loopback_nothing_is_required(files: dict[str, Path]) -> None:
    said = Said()
    guard = guard_for("127.0.0.1", "auto", None, None, said)
    assert guard.match(scope()) is None
    assert guard.admin(scope()) is None
    assert said == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1"])
def test_elsewhere_keys_are(host: str) -> None:
    with pytest.raises(ConfigError) as raised:
        guard_for(host, "auto", None, None, Said())
    for setting in ("BIDMATCH_API_KEYS_FILE", "BIDMATCH_ADMIN_KEYS_FILE", "BIDMATCH_AUTH=off"):
        assert setting in str(raised.value)


def test_on_needs_keys_everywhere(files: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="auth is on"):
        guard_for("127.0.0.1", "on", None, None, Said())
    assert guard_for("127.0.0.1", "on", files["keys"], None, Said()).required


def test_off_is_said_aloud(files: dict[str, Path]) -> None:
    said = Said()
    guard = guard_for("0.0.0.0", "off", None, None, said)
    assert guard.match(scope()) is guard.admin(scope()) is None
    assert "anyone who reaches 0.0.0.0 may match, add, change and remove phrases" in said.text
    said.clear()
    assert guard_for("127.0.0.1", "off", files["keys"], None, said).admin(scope()) is None
    assert "not read" in said.text


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_both_files(files: dict[str, Path], host: str) -> None:
    said = Said()
    guard = guard_for(host, "auto", files["keys"], files["admins"], said)
    assert guard.match(bearer(AUCTION)) == "auction"
    assert guard.admin(bearer(ADMIN)) == "operations"
    assert refused(guard.match, scope()).status == 401
    assert said == []


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_keys_for_matching_alone(files: dict[str, Path], host: str) -> None:
    said = Said()
    guard = guard_for(host, "auto", files["keys"], None, said)
    assert guard.match(bearer(AUCTION)) == "auction"
    for request in (scope(), bearer(AUCTION), bearer(ADMIN)):
        assert refused(guard.admin, request).status == 403
    assert "403" in said.text


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_admin_keys_alone(files: dict[str, Path], host: str) -> None:
    said = Said()
    guard = guard_for(host, "auto", None, files["admins"], said)
    assert guard.match(bearer(ADMIN)) == guard.admin(bearer(ADMIN)) == "operations"
    assert refused(guard.match, scope()).status == 401
    assert "/match takes admin keys only" in said.text


def test_one_key_in_both_files(files: dict[str, Path]) -> None:
    files["keys"].write_text(f"auction: {AUCTION}\nthe-same: {ADMIN}\n")
    with pytest.raises(ConfigError, match="hold the same key"):
        guard_for("127.0.0.1", "auto", files["keys"], files["admins"], Said())


def test_a_wrong_file_at_start(files: dict[str, Path]) -> None:
    files["keys"].write_text("short\n")
    with pytest.raises(ConfigError, match="line 1"):
        guard_for("127.0.0.1", "auto", files["keys"], files["admins"], Said())


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("no such host", False),
        ("x" * 300, False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


# Browsers


@pytest.mark.parametrize(
    "headers",
    [
        # A form or a fetch of another site's page; the same from a file or a sandbox.
        (("Host", "127.0.0.1:8000"), ("Sec-Fetch-Site", "cross-site")),
        (("Host", "localhost:8000"), ("Sec-Fetch-Site", "same-site"), ("Origin", "http://localhost:3000")),
        (("Host", "127.0.0.1:8000"), ("Origin", "https://example.com")),
        (("Host", "127.0.0.1:8000"), ("Origin", "null")),
        # A name of somebody else's that was made to lead here.
        (
            ("Host", "example.com:8000"),
            ("Sec-Fetch-Site", "same-origin"),
            ("Origin", "http://example.com:8000"),
        ),
        (("Host", "127.0.0.1.example.com"), ("Sec-Fetch-Site", "same-origin")),
        (("Sec-Fetch-Site", "none"),),
    ],
)
def test_without_keys_pages_of_others_change_nothing(headers: tuple[tuple[str, str], ...]) -> None:
    problem = refused(Guard(None, None, required=False, local=True).admin, scope(*headers))
    assert problem.status == 403
    assert "page of another site" in problem.detail


@pytest.mark.parametrize(
    ("headers", "local"),
    [
        ((("Host", "127.0.0.1:8000"),), True),
        # Behind a proxy that hands on its own name; a program says nothing of sites.
        ((("Host", "bidmatch.internal"),), True),
        (
            (
                ("Host", "localhost:8000"),
                ("Sec-Fetch-Site", "same-origin"),
                ("Origin", "http://localhost:8000"),
            ),
            True,
        ),
        ((("Host", "[::1]:8000"), ("Sec-Fetch-Site", "same-origin"), ("Origin", "http://[::1]:8000")), True),
        ((("Host", "127.0.0.1"), ("Sec-Fetch-Site", "none")), True),
        (
            (("Host", "ads.internal"), ("Sec-Fetch-Site", "same-origin"), ("Origin", "http://ads.internal")),
            False,
        ),
    ],
)
def test_without_keys_programs_and_own_pages_may(headers: tuple[tuple[str, str], ...], local: bool) -> None:
    assert Guard(None, None, required=False, local=local).admin(scope(*headers)) is None
