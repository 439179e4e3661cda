"""docs/serving.md lists every setting, its default and its meaning, as they are."""

from __future__ import annotations

from pathlib import Path

from service.settings import Settings

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


def row(name: str) -> str:
    field = Settings.model_fields[name]
    default = "required" if field.is_required() else "" if field.default is None else str(field.default)
    if isinstance(field.default, bool):
        default = default.lower()
    return f"| `{name}` | {default} | {field.description} |"


def test_the_table_of_settings_is_the_settings() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Settings")[2]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows == [row(name) for name in Settings.model_fields]
