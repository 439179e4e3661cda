"""Files whose line number says what a line belongs to: read line by line, in blocks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO

LINES_AT_ONCE = 1 << 15


def line_blocks(stream: BinaryIO, encoding: str, size: int = LINES_AT_ONCE) -> Iterator[list[str]]:
    """The lines of a file without their ends, up to `size` at once.

    Only a line feed ends a line, with a carriage return before it or without: other characters that Unicode
    calls line ends stand inside texts, and must not shift the numbers of the lines behind them. Bytes that
    are not UTF-8 become lone surrogates.

    Raises:
        UnicodeDecodeError: the bytes are not text in another encoding than UTF-8.
    """
    errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
    text = io.TextIOWrapper(stream, encoding=encoding, errors=errors, newline="\n")
    while lines := list(islice(text, size)):
        yield [line.rstrip("\r\n") for line in lines]
