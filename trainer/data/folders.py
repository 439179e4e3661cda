"""What a folder's files are to each other: a known layout, a training and a test file, or logs to merge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import open_source
from trainer.data.beir import find_beir, recognise_beir
from trainer.data.filters import FILTER_NAMES, TEST_STEMS, TRAIN_STEMS
from trainer.data.options import ReadOptions
from trainer.data.recognise import recognise
from trainer.data.recognised import LabelLists, Recognised
from trainer.data.text2text import LABEL_NAMES as TEXT2TEXT_LABELS
from trainer.data.text2text import find_text2text
from trainer.data.ubi import UbiJoin
from trainer.data.xmc_json import find_json
from trainer.data.xmc_text import find_texts, recognise_texts

_COMPANIONS = {"labels.txt", *FILTER_NAMES, *TEXT2TEXT_LABELS}


@dataclass(frozen=True)
class Entry:
    """A file to read, with those that belong to it.

    Attributes:
        paths: all files that are read for it.
        part: 0 training (or undivided), 1 test.
        recognise: finds out how to read it.
    """

    paths: tuple[Path, ...]
    part: int
    recognise: Callable[[], Recognised]


def entries(paths: Sequence[Path], options: ReadOptions) -> tuple[list[Entry], list[str]]:
    """The entries of all inputs, and what to say of folders.

    Raises:
        InputError: a folder holds nothing to read, or only parts of a layout.
    """
    ubi, lists = UbiJoin(options), LabelLists()

    def entry(path: Path, part: int) -> Entry:
        return Entry((path,), part, lambda: recognise(open_source(path), options, ubi, lists))

    found: list[Entry] = []
    notes: list[str] = []
    for path in paths:
        if not path.is_dir():
            found.append(entry(path, 0))
            continue
        known = _known_layout(path, options, lists, entry)
        inside, rest = (known, []) if known is not None else _plain_folder(path, entry)
        found += inside
        if known is not None:
            used = {one for each in known for one in each.paths}
            rest = [one.name for one in _inside(path) if one not in used and one.name not in _COMPANIONS]
        if rest:
            notes.append(f"left out of the folder {path}: {', '.join(rest)}")
    return found, notes


def _known_layout(
    folder: Path, options: ReadOptions, lists: LabelLists, entry: Callable[[Path, int], Entry]
) -> list[Entry] | None:
    beir = find_beir(folder, options)
    if beir is not None:
        read = (beir.corpus, beir.queries)
        return [Entry((one.path, *read), one.part, partial(recognise_beir, beir, one)) for one in beir.qrels]
    json = find_json(folder)
    if json is not None:
        files, labels = json
        return [Entry((path, *labels), part, entry(path, part).recognise) for path, part in files]
    texts = find_texts(folder)
    if texts is not None:
        return [
            Entry(
                (part.texts, part.matrix, part.labels),
                int(part.side == "test"),
                partial(recognise_texts, part, options, lists),
            )
            for part in texts
        ]
    numbered = find_text2text(folder)
    return None if numbered is None else [entry(path, part) for path, part in numbered]


def _plain_folder(folder: Path, entry: Callable[[Path, int], Entry]) -> tuple[list[Entry], list[str]]:
    """Entries of a folder of logs, and names of the files that are left out."""
    inside = [path for path in _inside(folder) if path.name not in _COMPANIONS]
    train = [path for path in inside if _stem(path) in TRAIN_STEMS]
    test = [path for path in inside if _stem(path) in TEST_STEMS]
    if train and test:
        rest = [path.name for path in inside if path not in train + test]
        return [entry(path, 0) for path in train] + [entry(path, 1) for path in test], rest
    logs = [path for path in inside if not _is_document(path)]
    if not logs:
        raise InputError("the folder holds no log file", file=folder)
    return [entry(path, 0) for path in logs], [path.name for path in inside if _is_document(path)]


def _inside(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _stem(path: Path) -> str:
    return path.name.split(".", 1)[0].casefold()


def _is_document(path: Path) -> bool:
    return path.suffix.casefold() in (".md", ".rst") or path.stem.casefold() in (
        "readme",
        "license",
        "licence",
    )
