"""The client for code without `await`."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self, TypeVar

import httpx

from bidmatch.client import calls
from bidmatch.client.answers import Answer, Answers, Explanation, Phrase, Reload
from bidmatch.client.calls import Filter, NewPhrase
from bidmatch.client.errors import ConnectionFailed, DeadlineExceeded, Unavailable
from bidmatch.client.exchange import Broken, Budget, Exchange, Late, Outcome, Reply, Terms, Undecodable

T = TypeVar("T")

# Less than the time after which servers and proxies close an idle connection: none is used as it closes.
KEEP_IDLE_S = 4.0


def pool_limits(connections: int) -> httpx.Limits:
    """Limits under which every connection is kept for the next call."""
    return httpx.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=KEEP_IDLE_S
    )


class Client:
    """Calls a bidmatch service. It keeps its connections: make one, use it from all threads, close it.

    Each method raises a `ServiceError` where it gets no answer; `QueueFull`, `DeadlineExceeded`,
    `Unavailable` and `ConnectionFailed` are those that pass. Before it raises, a call is sent again

    - after a 429, when the time that its Retry-After asks for has passed, and a little more by chance;
    - after a 503 of a worker that stops;
    - after a 503 of a change that could not be stored, and after a connection that failed before the answer
      began (neither of `reload`, which is not the same when done twice);

    at most `retries` times, and only where the wait ends within the call's time.

    Args:
        url: where the service is, such as `http://matcher:8000`; a path in it is put before the API's.
        api_key: an API key, or an admin key for phrases, `reload` and `explain`.
        timeout: most seconds that a call takes, retries and waits included, where the call doesn't say.
        deadline_ms: milliseconds after which the service gives up a match, told with each match where the
            call doesn't say; the client waits no longer either. None leaves it to the service.
        retries: most times that a call is sent again.
        max_wait: most seconds waited before a retry, whatever Retry-After says.
        connections: most connections at once; a call beyond waits for one within its time.
        verify: for https: a context with one's own certificates; False trusts any.

    Raises:
        ValueError: one of these cannot be.

    Example:
        >>> with Client("http://localhost:8000", timeout=0.05) as client:
        ...     for match in client.match("red running shoes", k=5).matches:
        ...         print(match.id, match.phrase, match.score)
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout: float = 1.0,
        deadline_ms: int | None = None,
        retries: int = 2,
        *,
        max_wait: float = 5.0,
        connections: int = 100,
        verify: ssl.SSLContext | bool = True,
    ):
        self._terms = Terms(url.rstrip("/"), api_key, timeout, deadline_ms, retries, max_wait, connections)
        self._http = httpx.Client(
            base_url=self._terms.url,
            headers=self._terms.headers(),
            limits=pool_limits(connections),
            verify=verify,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._terms.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the client can't be used any more.

        Example:
            >>> client.close()
        """
        self._http.close()

    def match(
        self,
        query: str,
        k: int = 10,
        *,
        min_score: float | None = None,
        min_relevance: float | None = None,
        filter: Filter | None = None,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] | None = None,
        distinct: bool = False,
        deadline_ms: int | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """The phrases that belong to a query.

        Args:
            query: the query as typed.
            k: most phrases.
            min_score: leave out phrases that search found with a lesser score, -2 to 2.
            min_relevance: leave out phrases that search found with a lesser relevance, 0 to 1.
            filter: what the phrases' columns must be; see `Filter`.
            allow: ids of the only phrases that may be matched.
            deny: ids of phrases that may not.
            distinct: at most one phrase of each text, its best.
            deadline_ms: this call's deadline in milliseconds, instead of the client's.
            timeout: most seconds of this call, instead of the client's.

        Raises:
            ServiceError: there is no answer.

        Example:
            >>> answer = client.match("red running shoes", k=5, filter={"market": "de"}, deadline_ms=20)
            >>> answer.matches[0].phrase
            'red running shoes'
        """
        call = calls.match(query, k, min_score, min_relevance, filter, allow, deny, distinct)
        return self._run(self._terms.begin_match(call, timeout, deadline_ms))

    def match_many(
        self,
        queries: Iterable[str],
        k: int = 10,
        *,
        min_score: float | None = None,
        min_relevance: float | None = None,
        filter: Filter | None = None,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] | None = None,
        distinct: bool = False,
        deadline_ms: int | None = None,
        timeout: float | None = None,
    ) -> Answers:
        """The phrases that belong to each of several queries; one request, options as of `match`.

        Args:
            queries: the queries as typed.
            k: most phrases for a query.
            min_score: see `match`.
            min_relevance: see `match`.
            filter: see `match`.
            allow: see `match`.
            deny: see `match`.
            distinct: see `match`.
            deadline_ms: see `match`.
            timeout: see `match`.

        Raises:
            ServiceError: there is no answer.

        Example:
            >>> for result in client.match_many(["red shoes", "tent"], k=3).results:
            ...     print(result.query, [match.id for match in result.matches])
        """
        call = calls.match_many(queries, k, min_score, min_relevance, filter, allow, deny, distinct)
        return self._run(self._terms.begin_match(call, timeout, deadline_ms))

    def put_phrases(
        self, phrases: Iterable[NewPhrase], *, timeout: float | None = 30.0
    ) -> tuple[Phrase, ...]:
        """Add phrases, or change those whose ids are there: all of them or, if it fails, none.

        When it returns they are durable; every worker matches them within a second.

        Args:
            phrases: the phrases.
            timeout: most seconds of this call; None takes the client's.

        Raises:
            InvalidRequest: one of them is not as it should be, such as a column that the bundle doesn't have.
            NotFound: live phrases are off.
            ServiceError: there is no answer. After `DeadlineExceeded` and `ConnectionFailed` they may be
                there all the same; to put them once more does no harm.

        Example:
            >>> client.put_phrases([NewPhrase("p81", "red tents", {"match_type": "phrase"})])[0].state
            'active'
        """
        return self._run(self._terms.begin(calls.put_phrases(phrases), timeout))

    def get_phrase(self, id: str, *, timeout: float | None = None) -> Phrase:
        """A phrase and its state.

        Args:
            id: its id.
            timeout: most seconds of this call, instead of the client's.

        Raises:
            NotFound: there is none of this id.
            ServiceError: there is no answer.

        Example:
            >>> client.get_phrase("p81").text
            'red tents'
        """
        return self._run(self._terms.begin(calls.get_phrase(id), timeout))

    def pause(self, id: str, *, timeout: float | None = None) -> Phrase:
        """Match a phrase no more until it is resumed.

        Args:
            id: its id; also of a phrase of the bundle.
            timeout: most seconds of this call, instead of the client's.

        Raises:
            NotFound: there is none of this id.
            Conflict: it is removed.
            ServiceError: there is no answer.

        Example:
            >>> client.pause("p81").state
            'paused'
        """
        return self._run(self._terms.begin(calls.pause(id), timeout))

    def resume(self, id: str, *, timeout: float | None = None) -> Phrase:
        """Match a paused phrase again.

        Args:
            id: its id; also of a phrase of the bundle.
            timeout: most seconds of this call, instead of the client's.

        Raises:
            NotFound: there is none of this id.
            Conflict: it is removed.
            ServiceError: there is no answer.

        Example:
            >>> client.resume("p81").state
            'active'
        """
        return self._run(self._terms.begin(calls.resume(id), timeout))

    def remove(self, id: str, *, timeout: float | None = None) -> Phrase:
        """Remove a phrase.

        Args:
            id: its id; also of a phrase of the bundle.
            timeout: most seconds of this call, instead of the client's.

        Raises:
            NotFound: there is none of this id.
            ServiceError: there is no answer.

        Example:
            >>> client.remove("p81").state
            'removed'
        """
        return self._run(self._terms.begin(calls.remove(id), timeout))

    def reload(self, bundle: str | None = None, *, timeout: float | None = 300.0) -> Reload:
        """Have the service verify a bundle, load it and answer from it; no request fails meanwhile.

        Args:
            bundle: a folder as the service's machine knows it; None takes the one it was started with.
            timeout: most seconds of this call; None takes the client's.

        Raises:
            InvalidRequest: the bundle was refused (its kind is `bundle-refused`); the one before goes on.
            Conflict: another reload is running.
            ServiceError: there is no answer. After `DeadlineExceeded` and `ConnectionFailed` it may take
                place all the same.

        Example:
            >>> client.reload("/bundles/tuesday").seconds
            2.1
        """
        return self._run(self._terms.begin(calls.reload(bundle), timeout))

    def explain(
        self,
        query: str,
        k: int = 10,
        *,
        min_score: float | None = None,
        min_relevance: float | None = None,
        filter: Filter | None = None,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] | None = None,
        distinct: bool = False,
        ids: Iterable[str] | None = None,
        timeout: float | None = 30.0,
    ) -> Explanation:
        """How the matches of a query come about: tokens, candidates, the rule that dropped each.

        Args:
            query: see `match`.
            k: see `match`.
            min_score: see `match`.
            min_relevance: see `match`.
            filter: see `match`.
            allow: see `match`.
            deny: see `match`.
            distinct: see `match`.
            ids: phrases to be told of whether or not search finds them.
            timeout: most seconds of this call; None takes the client's.

        Raises:
            ServiceError: there is no answer.

        Example:
            >>> for candidate in client.explain("used red tents", ids=["p81"]).candidates:
            ...     print(candidate.id, candidate.rank, candidate.dropped)
            p81 None negative keyword: used
        """
        call = calls.explain(query, k, min_score, min_relevance, filter, allow, deny, distinct, ids)
        return self._run(self._terms.begin(call, timeout))

    def healthy(self, *, timeout: float | None = None) -> bool:
        """Whether the service's process answers; asked once.

        Args:
            timeout: most seconds of this call, instead of the client's.

        Raises:
            ServiceError: something else than the service answers there.

        Example:
            >>> client.healthy()
            True
        """
        return self._probe("/healthz", timeout)

    def ready(self, *, timeout: float | None = None) -> bool:
        """Whether the service takes requests; asked once.

        Args:
            timeout: most seconds of this call, instead of the client's.

        Raises:
            ServiceError: something else than the service answers there.

        Example:
            >>> client.ready()
            True
        """
        return self._probe("/readyz", timeout)

    def metrics(self, *, timeout: float | None = None) -> str:
        """The service's metrics in Prometheus' text format.

        Args:
            timeout: most seconds of this call, instead of the client's.

        Raises:
            ServiceError: there is no answer.

        Example:
            >>> [line for line in client.metrics().splitlines() if line.startswith("bidmatch_queue")]
            ['bidmatch_queue_depth 0.0']
        """
        return self._run(self._terms.begin(calls.metrics(), timeout))

    def _probe(self, path: str, timeout: float | None) -> bool:
        try:
            return self._run(self._terms.begin(calls.probe(path), timeout, retries=0))
        except (Unavailable, DeadlineExceeded, ConnectionFailed):
            return False

    def _run(self, exchange: Exchange[T]) -> T:
        while True:
            outcome = self._send(exchange)
            wait = exchange.wait(outcome)
            if wait is None:
                return exchange.result(outcome)
            time.sleep(wait)

    def _send(self, exchange: Exchange[T]) -> Outcome:
        if exchange.left() <= 0:
            return Late()
        call = exchange.call
        request = self._http.build_request(
            call.method,
            call.path,
            content=call.body,
            headers=exchange.headers(),
            extensions={"timeout": Budget(exchange)},
        )
        answered = False
        try:
            response = self._http.send(request, stream=True)
            answered = True
            try:
                # Part by part, as a body that trickles in would never be late for each of its parts.
                body = bytearray()
                for part in response.iter_bytes():
                    body += part
                    if exchange.left() <= 0:
                        return Late()
            finally:
                response.close()
        except httpx.TimeoutException:
            return Late()
        except httpx.TransportError as error:
            return Broken(error, answered)
        except httpx.DecodingError as error:
            return Undecodable(error)
        return Reply(response.status_code, bytes(body), response.headers.get("retry-after"))
