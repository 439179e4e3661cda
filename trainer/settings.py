"""A run's configuration from presets, files and assignments, its bounds, and what is said of a wrong one."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from bidmatch.base.errors import ConfigError
from trainer.config import (
    BagEncoderConfig,
    CascadeConfig,
    CombinedEncoderConfig,
    InceptionEncoderConfig,
    ProductConfig,
    SampledConfig,
    TableConfig,
    TrainConfig,
    TransformerEncoderConfig,
)

PRESETS = Path(__file__).parent / "presets"

# The classes that a section's field `kind` chooses between, the default first; pydantic puts the kind into an
# error's place.
_SECTIONS: dict[str, dict[str, type[BaseModel]]] = {
    "encoder": {
        "bag": BagEncoderConfig,
        "inception": InceptionEncoderConfig,
        "transformer": TransformerEncoderConfig,
        "combined": CombinedEncoderConfig,
    },
    "classifier": {"table": TableConfig, "mhp": ProductConfig, "mhc": CascadeConfig, "mhs": SampledConfig},
}
_KINDS = {kind: config for kinds in _SECTIONS.values() for kind, config in kinds.items()}


def preset_names() -> list[str]:
    """Names of the presets that ship."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merge(merged[name], value)
        else:
            merged[name] = value
    return merged


def _layered(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` on top of `below`; a section whose `kind` it changes keeps only what the new kind has, too."""
    fitting = dict(below)
    for name, section in above.items():
        kind = section.get("kind") if isinstance(section, dict) else None
        old = below.get(name)
        if isinstance(kind, str) and kind in _KINDS and isinstance(old, dict) and old.get("kind") != kind:
            fitting[name] = {key: value for key, value in old.items() if key in _KINDS[kind].model_fields}
    return _merge(fitting, above)


def _nested(assignment: str) -> dict[str, Any]:
    name, equals, text = assignment.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {assignment}: expected key=value, such as --set dim=512")
    value = _yaml(text, f"--set {assignment}: the value is no YAML scalar or list")
    if isinstance(value, str):
        # YAML 1.1 reads 1e-4 (no dot) as a string.
        with contextlib.suppress(ValueError):
            value = float(value)
    for part in reversed(name.strip().split(".")):
        value = {part: value}
    nested: dict[str, Any] = value
    return nested


def _yaml(text: str, wrong: str) -> Any:
    """What a YAML text says; `wrong` is the error where it says nothing.

    Raises:
        ConfigError: it is no YAML, a value is none of its type (such as a date of the month 13), or brackets
            nest too deep.
    """
    try:
        return yaml.safe_load(text)
    except RecursionError as deep:
        raise ConfigError(f"{wrong}: it nests too deep") from deep
    except (yaml.YAMLError, ValueError) as unreadable:
        raise ConfigError(f"{wrong}: {unreadable}") from unreadable


def _read_preset(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise ConfigError(
            f"{path}: no UTF-8 text: byte {wrong.start} is 0x{wrong.object[wrong.start]:02x}",
            hint="Save the file as UTF-8.",
        ) from wrong
    except OSError as wrong:
        raise ConfigError(f"{path}: can't be read: {wrong.strerror}", hint="Name another file.") from wrong
    values = _yaml(text, f"{path}: no valid YAML") or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of fields to values")
    return values


def _preset_path(preset: str, folder: Path) -> Path:
    """The file of a preset: a shipped one by name, another by its path from `folder`."""
    own = preset.endswith((".yaml", ".yml"))
    path = folder / preset if own else PRESETS / f"{preset}.yaml"
    try:
        there = path.is_file()
    except (OSError, ValueError):  # such as a name longer than a file's can be
        there = False
    if not there:
        raise ConfigError(
            f"there is no preset {preset!r}",
            hint=f"Shipped presets: {', '.join(preset_names())}; or a .yaml file.",
        )
    return path


def _layers(preset: str) -> list[tuple[Path, dict[str, Any]]]:
    """Files and settings of a preset and of those it stands on, the lowest first."""
    layers: list[tuple[Path, dict[str, Any]]] = []
    path = _preset_path(preset, Path())
    seen = [path.resolve()]
    while True:
        values = _read_preset(path)
        base = values.pop("base", None)
        layers.insert(0, (path, values))
        if base is None:
            return layers
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base must be the name of a preset, not {base!r}")
        path = _preset_path(base, path.parent)
        if path.resolve() in seen:
            raise ConfigError(f"{path} is its own base", hint="Name another preset, or none, as base.")
        seen.append(path.resolve())


def _says_a_method(preset: str) -> bool:
    """Whether it is a method preset: all of them stand on `unidec`."""
    return any(path.resolve() == (PRESETS / "unidec.yaml").resolve() for path, _ in _layers(preset))


def make_config(preset: str, assignments: Sequence[str], base: str | None = None) -> TrainConfig:
    """A preset with `key=value` changes on top.

    A preset may name another as its `base`: it then says only what it changes there. Method presets stand
    on an encoder preset (encoder, epochs, rates, batch), which has no base of its own.

    Args:
        preset: a shipped name, or the path of a YAML file.
        assignments: `key=value`, the last of equal keys holds; nested fields are written with dots:
            `loss.temperature=0.07`. `base=NAME` holds before the argument `base`.
        base: the preset that takes the place of the lowest one a method preset stands on; beneath a
            preset that stands on none, its settings count where that one says nothing.

    Raises:
        ConfigError: unknown preset or field, or a value that does not fit; names the field.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        changes = _merge(changes, _nested(assignment))
    base = changes.pop("base", base)
    layers = _layers(preset)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"base={base}: expected the name of a preset")
        if _says_a_method(base):
            encoders = ", ".join(name for name in preset_names() if not _says_a_method(name))
            raise ConfigError(
                f"base={base}: it is a method, and {preset} would learn by it under its own name",
                hint=f"A base says which encoder and how long: {encoders}; or a .yaml file of that kind.",
            )
        layers = _layers(base) + (layers[1:] or layers)
    values: dict[str, Any] = {}
    for layer in [*(settings for _, settings in layers), changes]:
        values = _layered(values, layer)
    return validate_config(values, source=str(preset))


def flat_settings(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """All settings with their values, nested ones by names with dots, as `--set` takes them."""
    found: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            found |= flat_settings(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def bounds_of(config: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name and bounds of each number of a configuration, such as ("dim", "2 to 4096").

    Of sections with kinds the numbers of each, with the kind: ("encoder.filters (inception)", ...).
    """
    schemas = config.model_json_schema()["properties"]
    for name, field in config.model_fields.items():
        kinds = _SECTIONS.get(name, {}) if not prefix else {}
        for kind, section in kinds.items():
            yield from ((f"{own} ({kind})", bounds) for own, bounds in bounds_of(section, f"{name}."))
        if kinds:
            continue
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from bounds_of(field.annotation, f"{prefix}{name}.")
            continue
        schema = schemas[name].get("items", schemas[name])
        if schema.get("type") in ("integer", "number"):
            open_low, open_high = "exclusiveMinimum" in schema, "exclusiveMaximum" in schema
            low = _plain(schema["exclusiveMinimum" if open_low else "minimum"])
            high = _plain(schema["exclusiveMaximum" if open_high else "maximum"])
            yield (
                f"{prefix}{name}",
                f"{'above ' if open_low else ''}{low} to {'below ' if open_high else ''}{high}",
            )


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.10g}"


def validate_config(values: dict[str, Any], source: str) -> TrainConfig:
    """A TrainConfig from plain values.

    Raises:
        ConfigError: names each wrong field and why.
    """
    try:
        return TrainConfig.model_validate(_with_kinds(values))
    except ValidationError as wrong:
        lines = []
        for problem in wrong.errors():
            field = ".".join(str(part) for part in problem["loc"] if part not in _KINDS)
            reason = problem["msg"]
            if problem["type"] == "extra_forbidden":
                reason = _no_such_setting(field)
            elif problem["type"] == "union_tag_invalid":
                reason = f"{problem['ctx']['tag']!r} is none of {', '.join(_SECTIONS[field])}"
                field += ".kind"
            elif problem["type"] == "int_parsing_size":  # beyond what pydantic holds against the bounds
                reason = "the number is too large"
            lines.append(f"{field or 'configuration'}: {reason}")
        raise ConfigError(f"configuration ({source}): " + "; ".join(lines)) from wrong


def _with_kinds(values: Any) -> Any:
    """The values, where a section that names no kind has the default one, as if it were left out."""
    if not isinstance(values, dict):
        return values
    filled = dict(values)
    for name, kinds in _SECTIONS.items():
        section = filled.get(name)
        if isinstance(section, dict) and "kind" not in section:
            filled[name] = {"kind": next(iter(kinds))} | section
    return filled


def _no_such_setting(field: str) -> str:
    """Why a field that the configuration has not is refused: which kinds have it, or what was meant."""
    section, _, name = field.partition(".")
    kinds = [kind for kind, config in _SECTIONS.get(section, {}).items() if name in config.model_fields]
    if kinds:
        others = f" (or {', '.join(kinds[1:])})" if kinds[1:] else ""
        return f"there is such a setting only with {section}.kind={kinds[0]}{others}; set that, too"
    of_kinds = {
        f"{section}.{own}" for config in _SECTIONS.get(section, {}).values() for own in config.model_fields
    }
    near = difflib.get_close_matches(field, [*flat_settings(TrainConfig()), *sorted(of_kinds)], n=1)
    return "there is no such setting" + (f"; did you mean {near[0]}?" if near else "")
