"""What a request asks of the matches of its queries."""

from __future__ import annotations

from dataclasses import dataclass, field

from service.rules.filters import Filter


@dataclass(frozen=True, slots=True)
class MatchOptions:
    """Hashable: queries of equal options are searched together, and answers are cached by them.

    Attributes:
        k: most matches for one query; more than there are phrases means all.
        min_score: leave out phrases found by search whose score is less.
        filter: what the phrases' columns must be; None for anything.
        allow: ids of the only phrases to return; None for any.
        deny: ids of phrases that are not to be returned.
        distinct: of phrases of one text only the best.
    """

    k: int = 10
    min_score: float | None = None
    filter: Filter | None = None
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    distinct: bool = False
    _hash: int = field(init=False, repr=False, compare=False)
    _size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once for all queries of a request: lists may be long.
        asked = (self.k, self.min_score, self.filter, self.allow, self.deny, self.distinct)
        size = self.filter.size() if self.filter is not None else 0
        size += sum(60 + 2 * len(one) for ids in (self.allow or (), self.deny) for one in ids)
        object.__setattr__(self, "_hash", hash(asked))
        object.__setattr__(self, "_size", size)

    def __hash__(self) -> int:
        return self._hash

    def size(self) -> int:
        """Bytes that filter and lists take in memory, roughly."""
        return self._size
