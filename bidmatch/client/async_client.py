"""The client for code with `await`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from types import TracebackType
from typing import Self, TypeVar

import httpx

from bidmatch.client import calls
from bidmatch.client.answers import Answer, Answers, Explanation, Phrase, Reload
from bidmatch.client.calls import Filter, NewPhrase
from bidmatch.client.client import pool_limits
from bidmatch.client.errors import ConnectionFailed, DeadlineExceeded, Unavailable
from bidmatch.client.exchange import Broken, Exchange, Late, Outcome, Reply, Terms, Undecodable

T = TypeVar("T")


class AsyncClient:
    """`Client` for asyncio: the same arguments and methods, each to be awaited.

    It belongs to the event loop it is first used in. A call that is cancelled closes its connection, by which
    the service knows to drop it.

    Args:
        url: see `Client`.
        api_key: see `Client`.
        timeout: see `Client`.
        deadline_ms: see `Client`.
        retries: see `Client`.
        max_wait: see `Client`.
        connections: see `Client`.
        verify: see `Client`.

    Raises:
        ValueError: one of these cannot be.

    Example:
        >>> async with AsyncClient("http://localhost:8000", timeout=0.05) as client:
        ...     queries = ["red running shoes", "tent"]
        ...     answers = await asyncio.gather(*(client.match(query, k=5) for query in queries))
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
        self._http = httpx.AsyncClient(
            base_url=self._terms.url,
            headers=self._terms.headers(),
            limits=pool_limits(connections),
            verify=verify,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._terms.url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """See `Client.close`.

        Example:
            >>> await client.close()
        """
        await self._http.aclose()

    async def match(
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
        """See `Client.match`.

        Example:
            >>> answer = await client.match("red running shoes", k=5, filter={"market": "de"}, deadline_ms=20)
            >>> answer.matches[0].phrase
            'red running shoes'
        """
        call = calls.match(query, k, min_score, min_relevance, filter, allow, deny, distinct)
        return await self._run(self._terms.begin_match(call, timeout, deadline_ms))

    async def match_many(
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
        """See `Client.match_many`.

        Example:
            >>> for result in (await client.match_many(["red shoes", "tent"], k=3)).results:
            ...     print(result.query, [match.id for match in result.matches])
        """
        call = calls.match_many(queries, k, min_score, min_relevance, filter, allow, deny, distinct)
        return await self._run(self._terms.begin_match(call, timeout, deadline_ms))

    async def put_phrases(
        self, phrases: Iterable[NewPhrase], *, timeout: float | None = 30.0
    ) -> tuple[Phrase, ...]:
        """See `Client.put_phrases`.

        Example:
            >>> (await client.put_phrases([NewPhrase("p81", "red tents", {"match_type": "phrase"})]))[0].state
            'active'
        """
        return await self._run(self._terms.begin(calls.put_phrases(phrases), timeout))

    async def get_phrase(self, id: str, *, timeout: float | None = None) -> Phrase:
        """See `Client.get_phrase`.

        Example:
            >>> (await client.get_phrase("p81")).text
            'red tents'
        """
        return await self._run(self._terms.begin(calls.get_phrase(id), timeout))

    async def pause(self, id: str, *, timeout: float | None = None) -> Phrase:
        """See `Client.pause`.

        Example:
            >>> (await client.pause("p81")).state
            'paused'
        """
        return await self._run(self._terms.begin(calls.pause(id), timeout))

    async def resume(self, id: str, *, timeout: float | None = None) -> Phrase:
        """See `Client.resume`.

        Example:
            >>> (await client.resume("p81")).state
            'active'
        """
        return await self._run(self._terms.begin(calls.resume(id), timeout))

    async def remove(self, id: str, *, timeout: float | None = None) -> Phrase:
        """See `Client.remove`.

        Example:
            >>> (await client.remove("p81")).state
            'removed'
        """
        return await self._run(self._terms.begin(calls.remove(id), timeout))

    async def reload(self, bundle: str | None = None, *, timeout: float | None = 300.0) -> Reload:
        """See `Client.reload`.

        Example:
            >>> (await client.reload("/bundles/tuesday")).seconds
            2.1
        """
        return await self._run(self._terms.begin(calls.reload(bundle), timeout))

    async def explain(
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
        """See `Client.explain`.

        Example:
            >>> for candidate in (await client.explain("used red tents", ids=["p81"])).candidates:
            ...     print(candidate.id, candidate.rank, candidate.dropped)
            p81 None negative keyword: used
        """
        call = calls.explain(query, k, min_score, min_relevance, filter, allow, deny, distinct, ids)
        return await self._run(self._terms.begin(call, timeout))

    async def healthy(self, *, timeout: float | None = None) -> bool:
        """See `Client.healthy`.

        Example:
            >>> await client.healthy()
            True
        """
        return await self._probe("/healthz", timeout)

    async def ready(self, *, timeout: float | None = None) -> bool:
        """See `Client.ready`.

        Example:
            >>> await client.ready()
            True
        """
        return await self._probe("/readyz", timeout)

    async def metrics(self, *, timeout: float | None = None) -> str:
        """See `Client.metrics`.

        Example:
            >>> [line for line in (await client.metrics()).splitlines() if line.startswith("bidmatch_queue")]
            ['bidmatch_queue_depth 0.0']
        """
        return await self._run(self._terms.begin(calls.metrics(), timeout))

    async def _probe(self, path: str, timeout: float | None) -> bool:
        try:
            return await self._run(self._terms.begin(calls.probe(path), timeout, retries=0))
        except (Unavailable, DeadlineExceeded, ConnectionFailed):
            return False

    async def _run(self, exchange: Exchange[T]) -> T:
        while True:
            outcome = await self._send(exchange)
            wait = exchange.wait(outcome)
            if wait is None:
                return exchange.result(outcome)
            await asyncio.sleep(wait)

    async def _send(self, exchange: Exchange[T]) -> Outcome:
        left = exchange.left()
        if left <= 0:
            return Late()
        call = exchange.call
        request = self._http.build_request(
            call.method,
            call.path,
            content=call.body,
            headers=exchange.headers(),
            # None of its own: one clock is over all steps.
            extensions={"timeout": {}},
        )
        answered = False
        try:
            async with asyncio.timeout(left):
                response = await self._http.send(request, stream=True)
                answered = True
                try:
                    body = await response.aread()
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.TimeoutException):
            return Late()
        except httpx.TransportError as error:
            return Broken(error, answered)
        except httpx.DecodingError as error:
            return Undecodable(error)
        return Reply(response.status_code, body, response.headers.get("retry-after"))
