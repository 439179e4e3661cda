"""One call from first try to answer: how long it may take, what is tried again, what comes of it.

No input or output happens here. A client sends what an `Exchange` says, tells it the outcome, and waits or
ends as it says; with or without `await`.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import urlsplit

from bidmatch import __version__
from bidmatch.client.calls import Call
from bidmatch.client.errors import ConnectionFailed, DeadlineExceeded, ProtocolError, from_response

T = TypeVar("T")

BACKOFF = 0.05
DEADLINE_HEADER = "X-Request-Timeout-Ms"
STOPPING, CROWDED, NOT_STORED = "stopping", "too-many-connections", "not-stored"


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response.

    Attributes:
        status: HTTP status.
        body: its body.
        retry_after: value of its Retry-After header, or None.
    """

    status: int
    body: bytes
    retry_after: str | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """The connection failed.

    Attributes:
        error: what the HTTP library said.
        answered: the head of a response had come before.
    """

    error: Exception
    answered: bool


@dataclass(frozen=True, slots=True)
class Late:
    """The time was over before the answer was whole."""


@dataclass(frozen=True, slots=True)
class Undecodable:
    """The body is not in the encoding that its head declares."""

    error: Exception


Outcome: TypeAlias = Reply | Broken | Late | Undecodable


@dataclass(frozen=True, slots=True)
class Terms:
    """What a client is set to, checked.

    Attributes:
        url: where the service is, without a `/` at the end.
        api_key: sent with each request, or None.
        timeout: most seconds a call may take.
        deadline_ms: milliseconds the service is told, or None.
        retries: most times that a call is sent again.
        max_wait: most seconds waited before a retry, whatever Retry-After says.
        connections: most connections at once.

    Raises:
        ValueError: one of them cannot be.
    """

    url: str
    api_key: str | None = field(repr=False)
    timeout: float
    deadline_ms: int | None
    retries: int
    max_wait: float
    connections: int

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        _ = parts.port  # Raises where it is none.
        if "@" in parts.netloc:
            raise ValueError("url has a user in it; give the key as api_key")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"url is {self.url!r}; give one such as http://matcher:8000")
        if self.api_key is not None and not _fits_a_header(self.api_key):
            raise ValueError("api_key is empty, or has spaces or characters that no header can carry")
        check_timeout(self.timeout)
        if self.deadline_ms is not None:
            check_deadline(self.deadline_ms)
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}; give 0 or more")
        if not self.max_wait >= 0:
            raise ValueError(f"max_wait is {self.max_wait}; give 0 seconds or more")
        if self.connections < 1:
            raise ValueError(f"connections is {self.connections}; give 1 or more")

    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        common = {"User-Agent": f"bidmatch-client/{__version__}", "Accept": "application/json, */*;q=0.5"}
        return common if self.api_key is None else common | {"Authorization": f"Bearer {self.api_key}"}

    def begin(
        self, call: Call[T], timeout: float | None = None, *, retries: int | None = None
    ) -> Exchange[T]:
        """Start the clock of a call.

        Args:
            call: what to ask.
            timeout: most seconds, or None for the client's.
            retries: most retries, or None for the client's.

        Raises:
            ValueError: the timeout cannot be.
        """
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        return self._exchange(call, seconds, False, self.retries if retries is None else retries)

    def begin_match(self, call: Call[T], timeout: float | None, deadline_ms: int | None) -> Exchange[T]:
        """Start the clock of a call that has a deadline.

        Args:
            call: what to ask.
            timeout: most seconds, or None for the client's.
            deadline_ms: milliseconds that the service is told, or None for the client's, if it has one.

        Raises:
            ValueError: the timeout or the deadline cannot be.
        """
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        deadline = self.deadline_ms if deadline_ms is None else check_deadline(deadline_ms)
        if deadline is not None:
            seconds = min(seconds, deadline / 1000)
        return self._exchange(call, seconds, deadline is not None, self.retries)

    def _exchange(self, call: Call[T], seconds: float, tell: bool, retries: int) -> Exchange[T]:
        return Exchange(call, seconds, tell, retries, self.max_wait, self.url)


def check_timeout(timeout: float) -> float:
    """The timeout itself.

    Raises:
        ValueError: it is no positive number of seconds.
    """
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; give seconds above 0")
    return timeout


def check_deadline(deadline_ms: int) -> int:
    """The deadline itself.

    Raises:
        ValueError: it is no positive whole number of milliseconds.
    """
    if not isinstance(deadline_ms, int) or deadline_ms < 1:
        raise ValueError(f"deadline_ms is {deadline_ms}; give whole milliseconds, 1 or more")
    return deadline_ms


def _fits_a_header(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


class Exchange(Generic[T]):
    """A call under way.

    Args:
        call: what is asked.
        seconds: most seconds for all of it, retries and waits included.
        tell: tell the service how much of them is left.
        retries: most times to send it again.
        max_wait: most seconds of a wait.
        url: where the service is, for messages.
    """

    __slots__ = ("_ends", "_max_wait", "_retries", "_seconds", "_tell", "_tries", "_url", "call")

    def __init__(self, call: Call[T], seconds: float, tell: bool, retries: int, max_wait: float, url: str):
        self.call = call
        self._seconds = seconds
        self._ends = time.monotonic() + seconds
        self._tell = tell
        self._retries, self._max_wait = retries, max_wait
        self._url = url
        self._tries = 0

    def left(self) -> float:
        """Seconds left; 0 or less where the time is over."""
        return self._ends - time.monotonic()

    def headers(self) -> dict[str, str]:
        """The headers of the next try."""
        headers = {} if self.call.body is None else {"Content-Type": "application/json"}
        if self._tell:
            # Rounded up, so that the first try tells the very deadline that the caller gave.
            headers[DEADLINE_HEADER] = str(max(1, math.ceil(self.left() * 1000)))
        return headers

    def wait(self, outcome: Outcome) -> float | None:
        """Seconds to wait before the next try, or None where this outcome is the last."""
        if self._tries >= self._retries:
            return None
        asked = seconds_asked_for(outcome, self.call.repeatable)
        if asked is None:
            return None
        least = min(asked, self._max_wait)
        # Never sooner than asked; later by chance, so that those turned away together don't return together.
        seconds = least + random.uniform(0, max(BACKOFF * 2**self._tries, least / 4))
        if seconds >= self.left():
            return None
        self._tries += 1
        return seconds

    def result(self, outcome: Outcome) -> T:
        """The answer in the last outcome.

        Raises:
            ServiceError: there is none.
        """
        says = f"{self.call.method} {self.call.path}"
        if isinstance(outcome, Reply):
            if outcome.status == 200:
                return self.call.read(outcome.body)
            raise from_response(outcome.status, outcome.body, parse_retry_after(outcome.retry_after), says)
        if isinstance(outcome, Late):
            raise DeadlineExceeded(
                None, "deadline", f"{says} at {self._url} was not answered within {self._seconds:g} s"
            )
        if isinstance(outcome, Undecodable):
            raise ProtocolError(
                200, "protocol", f"the answer to {says} cannot be decoded: {outcome.error}"
            ) from outcome.error
        what = "the connection broke within the answer to" if outcome.answered else "no connection for"
        raise ConnectionFailed(
            None, "connection-failed", f"{what} {says} at {self._url}: {outcome.error}"
        ) from outcome.error


class Budget(dict[str, float]):
    """An HTTP library's table of timeouts in which every step may take what is left of the whole.

    Args:
        exchange: whose time it is.
    """

    def __init__(self, exchange: Exchange[Any]):
        left = exchange.left()
        super().__init__(connect=left, read=left, write=left, pool=left)
        self._exchange = exchange

    def get(self, _key: str, _default: Any = None) -> Any:
        """Seconds left now, and hardly any where none are: 0 would mean not to wait at all."""
        return max(self._exchange.left(), 1e-3)

    def __getitem__(self, _key: str) -> float:
        return max(self._exchange.left(), 1e-3)


def seconds_asked_for(outcome: Outcome, repeatable: bool) -> float | None:
    """Least seconds to wait before a retry; None where the outcome is no reason for one.

    Args:
        outcome: what came of the last try.
        repeatable: the call may be sent again though it may have been carried out.
    """
    if isinstance(outcome, Broken):
        return 0.0 if repeatable and not outcome.answered else None
    if not isinstance(outcome, Reply):
        return None
    kind = from_response(503, outcome.body, None, "").kind if outcome.status == 503 else None
    # All but the last are said before any work, so that nothing is done twice.
    if outcome.status == 429 or kind in (STOPPING, CROWDED) or (kind == NOT_STORED and repeatable):
        return parse_retry_after(outcome.retry_after) or 0.0
    return None


def parse_retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number or a date; None for anything else."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        aware = date if date.tzinfo else date.replace(tzinfo=UTC)
        return max((aware - datetime.now(UTC)).total_seconds(), 0.0)
    return seconds if 0 <= seconds < math.inf else None
