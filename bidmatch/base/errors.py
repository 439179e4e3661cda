"""Errors a person can act on: where, why, what to do. The command line turns each into an exit code."""

from __future__ import annotations

from pathlib import Path


class BidmatchError(Exception):
    """Something went wrong that the user can understand and act on.

    Args:
        reason: what is wrong, one sentence.
        hint: what to do about it, or None.
    """

    exit_code = 1

    def __init__(self, reason: str, *, hint: str | None = None):
        self.reason = reason
        self.hint = hint
        super().__init__(reason if hint is None else f"{reason}\n  {hint}")


class InputError(BidmatchError):
    """Input data is not what it should be. Names the file, the line where there is one, and the reason.

    Args:
        reason: what is wrong.
        file: the file, or None where there is none.
        line: 1-based line (or row) number, or None.
        hint: what to do about it.
    """

    exit_code = 3

    def __init__(
        self,
        reason: str,
        *,
        file: str | Path | None = None,
        line: int | None = None,
        hint: str | None = None,
    ):
        self.file = None if file is None else str(file)
        self.line = line
        where = "" if file is None else f"{file}: " if line is None else f"{file}, line {line}: "
        super().__init__(where + reason, hint=hint)


class ConfigError(BidmatchError):
    """A setting, option or configuration field has a value that cannot be used."""

    exit_code = 2


class DamagedError(BidmatchError):
    """A checkpoint or bundle is incomplete, altered or from an unknown format version."""

    exit_code = 4


class MissingDependencyError(BidmatchError):
    """A part of the product was asked for whose packages are not installed."""

    exit_code = 5
