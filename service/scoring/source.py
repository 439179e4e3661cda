"""Which files a query log consists of, and whether they are of a kind that holds queries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from bidmatch.base.errors import ConfigError, InputError
from bidmatch.base.input_files import EmptyFileError, Source, is_pattern, open_source

_NO_DATA = "._"


def find_inputs(inputs: Iterable[Path]) -> list[Path]:
    """The files of several inputs, in the order of these.

    Raises:
        InputError: an input holds none, or two hold the same.
    """
    files = [file for path in inputs for file in find_files(path)]
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise InputError(
                "is among the inputs twice", file=file, hint="Name it once; a folder or pattern may hold it."
            )
        seen.add(file.resolve())
    return files


def find_files(path: Path) -> list[Path]:
    """The file; the files of a folder and of those in it, by name; or what a pattern such as `*.gz` matches.

    Hidden and underscored names (`_SUCCESS`, `_temporary`) are no data, unless the pattern names them so.

    Raises:
        InputError: there are none.
    """
    if path.is_dir():
        files = list(_walk(path, frozenset()))
        if not files:
            raise InputError("the folder holds no files", file=path)
        return files
    if path.exists() or not is_pattern(path):
        return [path]
    found = dict.fromkeys(file for one in _matches(path) for file in _below(one))
    if not found:
        raise InputError(
            "no file matches this pattern",
            file=path,
            hint="Check the folder; ** stands for any number of folders, * for a part of one name.",
        )
    return list(found)


def refuse_among(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that the next run over these folders and patterns would read.

    Raises:
        ConfigError: it lies in such a folder, or such a pattern matches it or a folder that it is in.
    """
    where = output.resolve()
    for path in inputs:
        among = where.is_relative_to(path.resolve()) if path.is_dir() else _would_match(path, where)
        if among:
            raise ConfigError(
                f"{output} is in {path}, all of which is read: the next run would take it for queries",
                hint="Name an output elsewhere.",
            )


def _would_match(pattern: Path, where: Path) -> bool:
    if pattern.exists() or not is_pattern(pattern):
        return False
    fixed, wildcards = _divided(pattern)
    if not where.is_relative_to(fixed.resolve()):
        return False
    parts = where.relative_to(fixed.resolve()).parts
    return any(_fits(parts[:end], wildcards) for end in range(1, len(parts) + 1))


def _fits(parts: tuple[str, ...], wildcards: tuple[str, ...]) -> bool:
    if not wildcards:
        return not parts
    if wildcards[0] == "**":
        return _fits(parts, wildcards[1:]) or (bool(parts) and _fits(parts[1:], wildcards))
    return bool(parts) and fnmatchcase(parts[0], wildcards[0]) and _fits(parts[1:], wildcards[1:])


def _divided(pattern: Path) -> tuple[Path, tuple[str, ...]]:
    """What comes before the first part with a wildcard, and the parts from there on."""
    first = next(at for at, part in enumerate(pattern.parts) if is_pattern(Path(part)))
    return Path(*pattern.parts[:first]), pattern.parts[first:]


def _matches(pattern: Path) -> list[Path]:
    fixed, wildcards = _divided(pattern)
    found = sorted(fixed.glob(str(Path(*wildcards))))
    if any(part[0] in _NO_DATA for part in wildcards):
        return found
    return [one for one in found if not any(part[0] in _NO_DATA for part in one.parts[len(fixed.parts) :])]


def _below(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from _walk(path, frozenset())
    else:
        yield path


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    here = folder.resolve()
    if here in above:
        raise InputError("is a link to a folder that it is in", file=folder, hint="Remove the link.")
    for one in sorted(folder.iterdir()):
        if one.name[0] in _NO_DATA:
            continue
        if one.is_dir():
            yield from _walk(one, above | {here})
        else:
            yield one


def open_log(path: Path) -> Source | None:
    """Look at a file's first bytes; None for an empty one.

    Raises:
        InputError: it is missing, unreadable, or of a kind that holds no query log.
    """
    try:
        source = open_source(path)
    except EmptyFileError:
        return None
    if source.kind == "xlsx":
        raise InputError(
            "is an Excel workbook, not a query log", file=path, hint="Save its sheet as CSV and score that."
        )
    return source
