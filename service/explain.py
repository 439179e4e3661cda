"""How the matches of a query came about: what was searched, what was found, which rule dropped what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bidmatch.base import text
from export.bundle.encoder import QueryVectors
from export.bundle.lookup import BROAD, EXACT, MATCH_TYPE, PHRASE, match_type_code
from service.engine import Engine
from service.live.phrases import LivePhrases
from service.live.store import PhraseRow
from service.live.sync import encode_phrases
from service.options import MatchOptions
from service.rules.bought import MAX_WORDS
from service.rules.words import words


def explain(
    engine: Engine,
    query: str,
    options: MatchOptions,
    ids: list[str],
    stored: Callable[[list[str]], Sequence[PhraseRow]] = lambda _ids: (),
) -> dict[str, Any]:
    """The matches of a query, and what was left out of them, as `schemas.Explanation` has it.

    What search would find without any rule, the phrases asked about, and the matches are each given with the
    first rule that dropped them.

    Args:
        engine: the bundle and the live phrases.
        query: the query as typed.
        options: what is asked.
        ids: phrases to look at, too.
        stored: of phrases, the states of those that were changed.
    """
    encoded = engine.encode([query])
    key = text.key(query)
    found = engine.find(encoded, options)
    live = found.live if len(encoded.asked) else engine.live
    spoken = words(key)
    scope = engine.scopes.of(options)
    depth, width = engine.depth(options.k), engine.index.width(engine.settings.ef)
    matched = found.rows.tolist()
    order = {row: rank + 1 for rank, row in enumerate(matched)}
    looked = list(matched)
    if len(encoded.asked):
        plain = engine.index.search(encoded.vectors.narrow, depth, ef=engine.settings.ef).rows[0]
        looked += plain[plain >= 0].tolist()
        looked += engine.keys.find([key])[1].tolist()
        if live is not None:
            looked += [len(engine) + row for row in live.nearest(encoded.vectors.narrow, depth)]
            looked += (len(engine) + live.same_key([key], live.view)[1]).tolist()
    rows_of_ids = _rows_of(engine, live, ids)
    looked += rows_of_ids.values()
    rows = np.array(list(dict.fromkeys(looked)), np.int64)
    named, phrases, columns = engine.named(live).take(rows)
    states = stored(list(dict.fromkeys([*ids, *named])))
    off = {row.id: row.state for row in states if row.state != "active"}
    gone = [
        row
        for row in states
        if row.id in off and row.id in ids and row.id not in rows_of_ids and row.text is not None
    ]
    texts = {text.key(phrase) for row, phrase in zip(rows.tolist(), phrases, strict=True) if row in order}
    encoder, classifier = _scores(engine, encoded.vectors, rows, live)
    candidates: list[dict[str, Any]] = []
    for at, row in enumerate(rows.tolist()):
        dropped = None
        if row not in order:
            dropped = _dropped(
                engine,
                live,
                row,
                phrases[at],
                columns[at],
                key,
                spoken,
                options,
                float(encoder[at] + classifier[at]),
                off.get(named[at]),
            )
            if dropped is None and options.distinct and text.key(phrases[at]) in texts:
                dropped = "distinct: one of the same text is better"
            dropped = dropped or "not among the best k"
        source = (
            "exact" if key and text.key(phrases[at]) == key else "live" if row >= len(engine) else "index"
        )
        candidates.append(
            {
                "id": named[at],
                "phrase": phrases[at],
                "score": float(encoder[at] + classifier[at]),
                "parts": {"encoder": float(encoder[at]), "classifier": float(classifier[at])},
                "source": source,
                "rank": order.get(row),
                "dropped": dropped,
            }
        )
    candidates += _gone(engine, live, encoded.vectors, gone)
    candidates.sort(key=_place)
    return {
        "query": key,
        "tokens": engine.encoder.tokens(key) if key else [],
        "words": spoken,
        "ef": engine.index.width(engine.settings.ef, scope.searched),
        "depth": depth,
        "admitted": len(engine) if scope.searched is None else scope.searched.count,
        "searched": "comparison" if engine.index.compares(scope.searched, max(depth, width)) else "graph",
        "rescored": engine.rescores,
        "candidates": candidates,
        "missing": [one for one in ids if one not in rows_of_ids and not any(row.id == one for row in gone)],
        "bundle": engine.bundle_id,
    }


def _gone(
    engine: Engine, live: LivePhrases | None, vectors: QueryVectors, phrases: Sequence[PhraseRow]
) -> list[dict[str, Any]]:
    """Candidates of live phrases that are paused or removed, so that no row stands for them."""
    if live is None or not phrases or not len(vectors.narrow):
        return []
    query = (vectors.wide if engine.rescores else vectors.narrow)[0]
    made = []
    scored = live.scored(encode_phrases(engine, [str(phrase.text) for phrase in phrases])) * query
    for phrase, products in zip(phrases, scored, strict=True):
        encoder = float(products[: engine.score_split].sum())
        classifier = float(products[engine.score_split :].sum())
        made.append(
            {
                "id": phrase.id,
                "phrase": phrase.text,
                "score": encoder + classifier,
                "parts": {"encoder": encoder, "classifier": classifier},
                "source": "live",
                "rank": None,
                "dropped": phrase.state,
            }
        )
    return made


def _place(candidate: dict[str, Any]) -> tuple[bool, int, float]:
    return candidate["rank"] is None, candidate["rank"] or 0, -candidate["score"]


def _rows_of(engine: Engine, live: LivePhrases | None, ids: list[str]) -> dict[str, int]:
    """The row of each id: the live one where there is one."""
    rows = engine.ids.find(ids)
    if live is not None:
        for one in ids:
            row = live.row_of(one)
            if row is not None:
                rows[one] = len(engine) + row
    return rows


def _scores(
    engine: Engine, vectors: QueryVectors, rows: np.ndarray, live: LivePhrases | None
) -> tuple[np.ndarray, np.ndarray]:
    if not len(rows) or not len(vectors.narrow):
        return np.zeros(len(rows), np.float32), np.zeros(len(rows), np.float32)
    encoder, classifier = engine.scores_of(vectors, rows[None, :], live)
    return encoder[0], classifier[0]


def _dropped(
    engine: Engine,
    live: LivePhrases | None,
    row: int,
    phrase: str,
    columns: dict[str, Any],
    key: str,
    spoken: list[str],
    options: MatchOptions,
    score: float,
    state: str | None,
) -> str | None:
    """The first rule that leaves a phrase out, by what it is; None where there is none."""
    mine = row < len(engine)
    local = row if mine else row - len(engine)
    if not key:
        return "the query has no text"
    if live is not None and mine and live.view.bundle_row_is_off(local):
        return state or "changed by a live phrase"
    ids = engine.named(live).ids(np.array([row]))
    if options.allow is not None and ids[0] not in options.allow:
        return "allow: not in the list"
    if ids[0] in options.deny:
        return "deny: in the list"
    if options.filter:
        column = engine.scopes.columns if mine else live.columns if live is not None else None
        reason = None if column is None else column.why_not(options.filter, local)
        if reason is not None:
            return f"filter: {reason}"
    if engine.settings.honour_match_types:
        kind = match_type_code(columns.get(MATCH_TYPE)) if columns else BROAD
        same = text.key(phrase) == key
        if kind == EXACT and not same:
            return "match type: exact, and the query is another"
        if kind == PHRASE and not same and not _contains(spoken[:MAX_WORDS], words(phrase)):
            return "match type: phrase, and the query does not contain its words in order"
        negatives = engine.negatives if mine else live.negatives if live is not None else None
        hit = None if negatives is None or not len(negatives) else negatives.hit(local, spoken)
        if hit is not None:
            return f"negative keyword: {hit}"
    if options.min_score is not None and score < options.min_score:
        return f"min_score: {score:.4f} is less than {options.min_score:.4f}"
    return None


def _contains(query: list[str], phrase: list[str]) -> bool:
    size = len(phrase)
    return bool(size) and any(query[at : at + size] == phrase for at in range(len(query) - size + 1))
