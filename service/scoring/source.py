"""Which files a query log consists of, and whether they are of a kind that holds queries."""

from __future__ import annotations

from pathlib import Path

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import EmptyFileError, Source, open_source


def find_files(path: Path) -> list[Path]:
    """The file, or the files of a folder by name; hidden and underscored ones (`_SUCCESS`) are no data.

    Raises:
        InputError: there are none.
    """
    if not path.is_dir():
        return [path]
    files = sorted(one for one in path.iterdir() if one.is_file() and one.name[0] not in "._")
    if not files:
        raise InputError("the folder holds no files", file=path)
    return files


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
