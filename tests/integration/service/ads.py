"""A bundle of ads with columns of every kind, live phrases beside it, and plainly what a query gets."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from bidmatch.base.files import atomic_dir
from bidmatch.base.text import key, normalise
from export.bundle import format as fmt
from export.bundle.write import create_vectors, finish, write_phrases, write_tokenizer
from export.graph import BuiltIndex
from service.engine import Engine
from service.live.phrases import LivePhrases
from service.live.store import PhraseRow, State
from service.live.sync import encode_phrases
from service.options import MatchOptions
from service.rules.filters import parse_filter
from tests.integration.service.conftest import DIM, HALF, _encoder, _record, _unit

THINGS = """
red blue green black white running hiking walking shoes boots socks tent lamp chair table sofa garden hose
cheap best used new women men kids baby for with sale online near me waterproof steel wooden plastic electric
cordless drill saw hammer paint brush roof tile pipe valve 10 20 3d usb hdmi cable phone case screen charger
laptop bag cover stand desk light bulb led solar panel fan heater cooler ice box picnic mat yoga ball bike
"""
WORDS = f"{THINGS} трава зелёная größe straße café naïve 花园 软管 مروحة سقف x_y o'brien c++ ﬁlter".split()
MARKETS = ["us", "us", "us", "de", "de", "fr", "jp", "at"]
LANGUAGES = ["en", "de", "fr", "ja", None]
MATCH_TYPES = ["Broad", "phrase", "PHRASE", "exact", "exact ", "", None, "unheard of"]
# When the bundles say that they were made, and a time after it, in milliseconds since 1970.
CREATED = "2024-01-01T00:00:00+00:00"
LATER = 1_750_000_000_000
# Scores nearer than this may stand in either order: sums of floats depend on the order of adding.
TIE = 2e-6


@dataclass(frozen=True)
class Ad:
    """A phrase with its columns, of the bundle or live."""

    id: str
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def negatives(self) -> list[str]:
        value = self.columns.get("negative_keywords") or []
        return value.split(",") if isinstance(value, str) else [one for one in value if one is not None]


SCHEMA = pa.schema(
    [
        ("market", pa.string()),
        ("language", pa.dictionary(pa.int32(), pa.string())),
        ("advertiser", pa.string()),
        ("bid", pa.float32()),
        ("active", pa.bool_()),
        ("match_type", pa.string()),
        ("negative_keywords", pa.list_(pa.string())),
        ("rank", pa.int64()),
        ("north", pa.float64()),
    ]
)


def spelled(rng: np.random.Generator, words: Sequence[str]) -> str:
    """Words as people write them: case, spaces and signs between them at random."""
    how = rng.random()
    if how < 0.5:
        return " ".join(words)
    if how < 0.65:
        return " ".join(words).title()
    if how < 0.75:
        return "  ".join(words).upper() + " "
    if how < 0.85:
        return str(rng.choice(["-", " & ", ", ", "/", "\u200b", "\u00a0"])).join(words)
    if how < 0.95:
        return f'"{" ".join(words)}"!'
    return " ".join(words).translate({ord("a"): "\uff41", ord("s"): "\u017f"})


def negative_keywords(rng: np.random.Generator) -> list[str | None] | None:
    """What an advertiser writes there: one to three keywords of each notation, now and then nonsense."""
    if rng.random() < 0.5:
        return None
    made: list[str | None] = []
    for _ in range(rng.integers(1, 4)):
        spoken = " ".join(rng.choice(WORDS, rng.integers(1, 3)))
        ways = [spoken, f'"{spoken}"', f"[{spoken}]", spoken.upper(), f" {spoken} ", "!", ""]
        made.append(str(rng.choice(ways)))
    if rng.random() < 0.1:
        made.append(None)
    return made


def make_ads(count: int, *, seed: int, broad: float, prefix: str = "a") -> list[Ad]:
    """So many phrases, many of equal text; of those that aren't `broad` one half is `phrase`, one `exact`."""
    rng = np.random.default_rng(seed)
    texts: list[str] = []
    ads = []
    for row in range(count):
        if texts and rng.random() < 0.15:
            text = spelled(rng, texts[rng.integers(len(texts))].split())
        else:
            text = spelled(rng, rng.choice(WORDS, rng.integers(1, 5)).tolist())
        texts.append(text)
        kind: Any = "broad"
        if rng.random() >= broad:
            kind = rng.choice(["phrase", "exact"])
        if rng.random() < 0.03:
            kind = MATCH_TYPES[rng.integers(len(MATCH_TYPES))]
        columns = {
            "market": str(rng.choice(MARKETS)),
            "language": LANGUAGES[rng.integers(len(LANGUAGES))],
            "advertiser": f"advertiser {int(count * 0.5 * rng.random() ** 3)}",
            "bid": None if rng.random() < 0.1 else float(np.float32(rng.integers(1, 300) / 100)),
            "active": bool(rng.random() < 0.9),
            "match_type": None if kind is None else str(kind),
            "negative_keywords": negative_keywords(rng),
        }
        ads.append(Ad(f"{prefix}{row}", normalise(text), columns))
    ranks = rng.permutation(count)
    return [replace(ad, columns={**ad.columns, "rank": int(ranks[i])}) for i, ad in enumerate(ads)]


def make_queries(ads: Sequence[Ad], count: int, seed: int) -> list[str]:
    """Queries that equal phrases, contain some of their words, hit negative keywords, or do nothing."""
    rng = np.random.default_rng(seed)
    texts = [key(ad.text) for ad in ads]
    negatives = [word for ad in ads for word in ad.negatives if re.search(r"\w", word)]
    queries = []
    for _ in range(count):
        text = texts[rng.integers(len(texts))]
        words = text.split()
        more = rng.choice(WORDS, rng.integers(0, 4)).tolist()
        how = rng.integers(7)
        if how == 0:
            queries.append(spelled(rng, words))
        elif how == 1:
            queries.append(spelled(rng, [*more[:2], *words, *more[2:]]))
        elif how == 2:
            queries.append(spelled(rng, rng.permutation([*words, *more]).tolist()))
        elif how == 3:
            negative = negatives[rng.integers(len(negatives))].strip('"[] ')
            queries.append(spelled(rng, [*negative.split(), *words]))
        elif how == 4:
            queries.append(spelled(rng, rng.choice(WORDS, rng.integers(1, 9)).tolist()))
        elif how == 5:
            queries.append(spelled(rng, [*words, *words, *more]))
        else:
            strange = str(
                rng.choice(["!?", "…", "\u0301", "x" * 60, "№ 1/2", "[", '""', "\ufeff", "unheard"])
            )
            queries.append(f"{text} {strange}" if rng.random() < 0.5 else f"{strange}{text}")
    return queries


VOCABULARY = {"[UNK]": 0} | {word: at + 1 for at, word in enumerate(dict.fromkeys(map(key, WORDS)))}


def write_bundle(
    path: Path, ads: Sequence[Ad], *, seed: int = 7, created: str = CREATED, ef: int = 100
) -> Path:
    """A bundle of these phrases: [Φ_D ⊕ N(Ψ)], Ψ near what the encoder says; its word vectors are by `seed`.

    The column `north` is filled with the score of the query "tent", so a filter can want what is far from it.
    """
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(len(VOCABULARY), DIM)).astype(np.float32)
    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    sums = np.stack([table[tokenizer.encode(key(ad.text)).ids].sum(0) for ad in ads])
    spread = rng.normal(size=(len(ads), HALF))
    psi = _unit(_unit(sums[:, HALF:]) + 0.8 * _unit(spread))
    vectors = np.concatenate([_unit(sums[:, :HALF]), psi], 1).astype(np.float32)
    index = hnswlib.Index("ip", DIM)
    index.init_index(len(ads), M=16, ef_construction=200, random_seed=1)
    index.add_items(vectors, np.arange(len(ads)), num_threads=1)
    tent = table[VOCABULARY["tent"]]
    north = vectors @ np.concatenate([_unit(tent[:HALF]), _unit(tent[HALF:])])
    values = {name: [ad.columns.get(name) for ad in ads] for name in SCHEMA.names} | {"north": north}
    phrases = pa.table({"id": [ad.id for ad in ads], "text": [ad.text for ad in ads]})
    for one in SCHEMA:
        phrases = phrases.append_column(one, pa.array(values[one.name], one.type))
    record: dict[str, Any] = _record(len(ads)) | {"created": created}
    record["index"] = record["index"].model_copy(update={"ef": ef, "k": min(100, len(ads))})
    with atomic_dir(path) as folder:
        (folder / fmt.ENCODER_FP32).write_bytes(_encoder(table))
        write_tokenizer(folder, tokenizer.to_str())
        write_phrases(folder, phrases)
        mapped = create_vectors(folder, len(ads), DIM)
        mapped[:] = vectors
        mapped.flush()
        BuiltIndex(index, vectors).save(folder)
        finish(folder, record)
    return path


def ads_of(engine: Engine) -> list[Ad]:
    """The phrases of an engine's bundle, in the order of their rows."""
    rows = engine.table.to_pylist()
    return [Ad(row.pop("id"), row.pop("text"), row) for row in rows]


@dataclass(frozen=True)
class Asked:
    """What is asked of a match, as a request has it."""

    k: int = 10
    min_score: float | None = None
    filter: dict[str, Any] | None = None
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    distinct: bool = False

    def options(self, engine: Engine) -> MatchOptions:
        chosen = None if self.filter is None else parse_filter(self.filter, engine.phrase_columns)
        return MatchOptions(self.k, self.min_score, chosen or None, self.allow, self.deny, self.distinct)

    def body(self) -> dict[str, Any]:
        """The same as JSON for `POST /match`, without the query."""
        body: dict[str, Any] = {"k": self.k, "deny": list(self.deny), "distinct": self.distinct}
        if self.allow is not None:
            body["allow"] = list(self.allow)
        return body | {
            name: getattr(self, name) for name in ("min_score", "filter") if getattr(self, name) is not None
        }


def meets(wanted: Mapping[str, Any], columns: Mapping[str, Any]) -> bool:
    """Whether a phrase's columns meet every condition of a filter."""
    for name, condition in wanted.items():
        value = columns.get(name)
        held = value if isinstance(value, list) else [value]
        if isinstance(condition, dict):
            refused = condition.get("not", [])
            if any(one in (refused if isinstance(refused, list) else [refused]) for one in held):
                return False
            low, high = condition.get("gte", condition.get("gt")), condition.get("lte", condition.get("lt"))
            if value is None and (low is not None or high is not None):
                return False
            if low is not None and (value < low or ("gt" in condition and value == low)):
                return False
            if high is not None and (value > high or ("lt" in condition and value == high)):
                return False
        elif not any(
            one is not None and one in (condition if isinstance(condition, list) else [condition])
            for one in held
        ):
            return False
    return True


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", key(text))


def contains(run: Sequence[str], query: Sequence[str]) -> bool:
    # Words hold no spaces, so a run of words is a part of the text between spaces.
    return f" {' '.join(run)} " in f" {' '.join(query)} "


@dataclass(frozen=True)
class Keyword:
    """A negative keyword, read once.

    Attributes:
        whole: as it was written.
        words: its words.
        around: the signs around it.
    """

    whole: str
    words: tuple[str, ...]
    around: str

    @classmethod
    def read(cls, whole: str) -> Keyword:
        written = key(whole)
        return cls(whole, tuple(words_of(whole)), written[0] + written[-1] if len(written) > 1 else "")

    def hits(self, query: Sequence[str]) -> bool:
        """Whether it hits a query of these words."""
        if not self.words or not set(self.words) <= set(query):
            return False
        if self.around == '""':
            return contains(self.words, query)
        if self.around == "[]":
            return list(self.words) == list(query)
        return True


@dataclass(frozen=True)
class Match:
    """One of the matches that a query should get."""

    id: str
    score: float
    source: str


class Plain:
    """Which phrases a query gets, by looking at every one of them.

    Args:
        ads: n phrases.
        vectors: float32 (n, dim), theirs.
        live: of how many of them, at the end, the source is `live`.
    """

    def __init__(self, ads: Sequence[Ad], vectors: np.ndarray, live: int = 0):
        self.ads, self.live = list(ads), live
        self._vectors = np.asarray(vectors, np.float64)
        self._rows = {ad.id: row for row, ad in enumerate(ads)}
        self._keys = [key(ad.text) for ad in ads]
        kinds = [key(ad.columns.get("match_type") or "") for ad in ads]
        self._broad = np.array([kind not in ("exact", "phrase") for kind in kinds], bool)
        self._runs = [
            (row, f" {' '.join(words_of(ad.text))} ")
            for row, (ad, kind) in enumerate(zip(ads, kinds, strict=True))
            if kind == "phrase" and words_of(ad.text)
        ]
        rows_of: dict[str, list[int]] = {}
        for row, ad in enumerate(ads):
            for keyword in ad.negatives:
                rows_of.setdefault(keyword, []).append(row)
        keywords = [(Keyword.read(keyword), rows) for keyword, rows in rows_of.items()]
        self._keywords = [(keyword, frozenset(keyword.words), rows) for keyword, rows in keywords]
        self._kept, self._scores = np.empty(0, bool), np.empty(0)

    def _bought(self, query: str) -> tuple[np.ndarray, np.ndarray]:
        """Whether each phrase was bought for the query, and whether it equals it: bool (n,) each."""
        asked, spoken = key(query), words_of(query)
        exact = np.fromiter((one == asked for one in self._keys), bool, len(self.ads))
        bought = self._broad | exact
        run = f" {' '.join(spoken)} "
        bought[[row for row, one in self._runs if one in run]] = True
        held = frozenset(spoken)
        for keyword, needed, rows in self._keywords:
            if needed <= held and keyword.hits(spoken):
                bought[rows] = False
        return bought, exact

    def scope(self, asked: Asked) -> np.ndarray:
        """Whether each phrase passes filter and lists: bool (n,)."""
        allow = None if asked.allow is None else set(asked.allow)
        return np.fromiter(
            (
                (allow is None or ad.id in allow)
                and ad.id not in asked.deny
                and (asked.filter is None or meets(asked.filter, ad.columns))
                for ad in self.ads
            ),
            bool,
            len(self.ads),
        )

    def matches(
        self,
        query: str,
        vector: np.ndarray,
        asked: Asked,
        scope: np.ndarray | None = None,
        *,
        honour: bool = True,
    ) -> list[Match]:
        """The k best, in order.

        Args:
            query: the query as typed.
            vector: float32 (dim,), the encoder's.
            asked: what is asked.
            scope: `self.scope(asked)`, where it is known already.
            honour: whether match types and negative keywords count.
        """
        bought, exact = self._bought(query)
        kept = (self.scope(asked) if scope is None else scope) & (bought | (not honour)) & bool(key(query))
        self._scores = scores = self._vectors @ np.asarray(vector, np.float64)
        if asked.min_score is not None:
            kept &= exact | (scores >= asked.min_score)
        self._kept = kept
        rows = np.flatnonzero(kept)
        rows = rows[np.lexsort((rows, -scores[rows], ~exact[rows]))]
        found: list[Match] = []
        texts: set[str] = set()
        for row in rows.tolist():
            if len(found) == asked.k:
                break
            if not (asked.distinct and self._keys[row] in texts):
                texts.add(self._keys[row])
                source = "live" if row >= len(self.ads) - self.live else "index"
                found.append(Match(self.ads[row].id, float(scores[row]), "exact" if exact[row] else source))
        return found

    def score_of(self, id: str) -> float | None:
        """The score of a phrase for the latest query; None where it may not be matched."""
        row = self._rows.get(id)
        return None if row is None or not self._kept[row] else float(self._scores[row])

    def difference(self, found: Sequence[Match], wanted: Sequence[Match]) -> str | None:
        """What is wrong with the matches found for the latest query; None: only ties stand in another order.

        Args:
            found: the matches.
            wanted: what `matches` says.
        """
        if len(found) != len(wanted):
            return f"{len(found)} matches, not {len(wanted)}"
        if len({match.id for match in found}) != len(found):
            return "a phrase twice"
        for place, (have, want) in enumerate(zip(found, wanted, strict=True)):
            score = self.score_of(have.id)
            if score is None:
                return f"{have.id} at {place}, which may not be matched"
            if have.id == want.id and have.source != want.source:
                return f"{have.id} is {have.source}, not {want.source}"
            if abs(have.score - score) > 1e-5:
                return f"{have.id} has score {have.score}, not {score}"
            if have.id != want.id and abs(score - want.score) > TIE:
                return f"{have.id} ({score}) at {place}, not {want.id} ({want.score})"
        return None


def found_by(engine: Engine, queries: Sequence[str], options: MatchOptions) -> list[list[Match]]:
    """What an engine finds for each query."""
    found = engine.find(engine.encode(queries), options)
    ids, _, _ = engine.named(found.live).take(found.rows)
    made = [
        Match(id, float(score), "exact" if exact else "live" if row >= len(engine) else "index")
        for id, score, exact, row in zip(
            ids, found.scores, found.exact.tolist(), found.rows.tolist(), strict=True
        )
    ]
    return [made[start:end] for start, end in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


class Changes:
    """Live phrases beside an engine, and what they should be: a dictionary.

    Every change goes to the engine's `live` at once, as the thread that follows the store applies it.

    Attributes:
        rows: the latest state of each phrase that was changed, by id.
        clock: when the next change is made, milliseconds since 1970.
    """

    def __init__(self, engine: Engine):
        self.rows: dict[str, PhraseRow] = {}
        self.sequence = 0
        self.clock = LATER
        self.use(engine)

    def use(self, engine: Engine, *, batch: int = 1000) -> None:
        """Go on with another engine, as a swap does."""
        self.engine = engine
        self.live: LivePhrases = engine.new_live()
        ordered = sorted(self.rows.values(), key=lambda row: row.sequence)
        for start in range(0, len(ordered), batch):
            self._apply(ordered[start : start + batch])
        engine.live = self.live

    def _apply(self, rows: Sequence[PhraseRow]) -> None:
        placed = [row for row in rows if self.live.wants_vector(row)]
        self.live.apply(rows, encode_phrases(self.engine, [str(row.text) for row in placed]))

    def _next(self) -> tuple[int, int]:
        """When a change is made, and its number."""
        self.clock += 1
        self.sequence += 1
        return self.clock, self.sequence

    def put(self, ads: Iterable[Ad]) -> None:
        """Add or change phrases, all in one step."""
        made = []
        for ad in {ad.id: ad for ad in ads}.values():
            before = self.rows.get(ad.id)
            state: State = "paused" if before is not None and before.state == "paused" else "active"
            columns = {name: value for name, value in ad.columns.items() if value is not None}
            now, sequence = self._next()
            made.append(PhraseRow(ad.id, normalise(ad.text), columns, state, "live", now, sequence, now))
        self.rows |= {row.id: row for row in made}
        self._apply(made)

    def set_state(self, ids: Iterable[str], state: State) -> None:
        """Pause, resume or remove phrases, all in one step; what the store would refuse is left out."""
        made = []
        held = self.engine.ids.find(list(dict.fromkeys(ids)))
        for id in dict.fromkeys(ids):
            before = self.rows.get(id)
            if before is not None and before.state in (state, "removed"):
                continue
            if id not in held and (before is None or before.source == "bundle"):
                continue
            if before is None:
                before = PhraseRow(id, None, {}, "active", "bundle", 0, 0, 0)
            changed, sequence = self._next()
            made.append(replace(before, state=state, changed=changed, sequence=sequence))
        if made:
            self.rows |= {row.id: row for row in made}
            self._apply(made)

    def plain(self) -> Plain:
        """All phrases that can be matched now: the bundle's, then the live ones."""
        mine, vectors = [], []
        later = []
        held = {ad.id: ad for ad in ads_of(self.engine)}
        for at, ad in enumerate(held.values()):
            row = self.rows.get(ad.id)
            if row is None or (
                row.state == "active" and (row.source == "bundle" or stands(self.engine, ad, row))
            ):
                mine.append(ad)
                vectors.append(at)
        for row in self.rows.values():
            if row.state == "active" and row.source == "live":
                ad = held.get(row.id)
                if ad is None or not stands(self.engine, ad, row):
                    later.append(Ad(row.id, str(row.text), row.columns))
        made = encode_phrases(self.engine, [ad.text for ad in later]).narrow
        ours = np.asarray(self.engine.bundle.vectors)[np.array(vectors, np.int64)]
        return Plain([*mine, *later], np.concatenate([ours, made]), len(later))


def stands(engine: Engine, ad: Ad, row: PhraseRow) -> bool:
    """Whether a phrase of the bundle stands for a live one of its id: it was made later, or says the same."""
    created = datetime.fromisoformat(engine.bundle.manifest.created).timestamp()
    held = {name: value for name, value in ad.columns.items() if value is not None}
    return row.edited <= 1e3 * created or (row.text == normalise(ad.text) and row.columns == held)


@contextmanager
def meanwhile(*works: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Do each of these again and again, each on a thread, until the block ends; their failures are ours.

    Yields:
        Whether all of them still go on.
    """
    done = threading.Event()
    failures: list[BaseException] = []

    def repeat(work: Callable[[], None]) -> None:
        try:
            while not done.is_set():
                work()
        except BaseException as failure:
            failures.append(failure)
            done.set()

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield lambda: not done.is_set()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
