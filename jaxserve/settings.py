"""Where a setting's value comes from: flag, then `JAXSERVE_*` variable, then configuration file, then default.

Reads the fields of `jaxserve.config` and nothing else: names, types, ranges and help texts are written there once. Each
value that is not a default keeps its origin, so that start-up can print it. `jaxserve.cli` builds the commands from this.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args, get_type_hints

from jaxserve.config import EngineConfig, ServerConfig, range_error
from jaxserve.errors import ConfigError

OTHER_VARIABLES = {"JAXSERVE_CACHE": "Directory of converted checkpoints and compiled programs."}
"""Variables that are not settings of an engine or a server."""

GROUPS = {
    "model": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduler",
    "execution": "Execution",
    "server": "Server",
    "limits": "Limits",
    "security": "Security",
    "observability": "Metrics, logs and traces",
}

# As vLLM reads them: a small letter is decimal, a capital one binary.
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SUFFIXES |= {f"{letter}B": 1000**i for i, letter in enumerate("KMGT", start=1)}
_SUFFIXES |= {f"{letter}iB": 1024**i for i, letter in enumerate("KMGT", start=1)} | {"B": 1}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """What argparse calls with what is wrong."""
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


@dataclass(frozen=True)
class Settings:
    """Resolved settings; `origins` names, for each value that is not a default, where it was given."""

    engine: EngineConfig
    server: ServerConfig
    origins: Mapping[str, str]


def add_flags(parser: argparse.ArgumentParser, *classes: type[Any]) -> None:
    """Adds a flag for every field of the configuration classes, in groups. Values stay text until `resolve_settings`."""
    groups: dict[str, Any] = {}
    for spec in _specs(*classes):
        group = spec.metadata["group"]
        target = groups.setdefault(group, None) or parser.add_argument_group(GROUPS[group])
        groups[group] = target
        flags = [f"--{_dashed(name)}" for name in (spec.name, *spec.metadata["aliases"])]
        options: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS, "help": _help(spec)}
        if isinstance(spec.default, bool):
            target.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        elif isinstance(spec.default, tuple):
            target.add_argument(*flags, nargs="+", action="extend", metavar=_metavar(spec), **options)
        else:
            target.add_argument(*flags, metavar=_metavar(spec), **options)


def resolve_settings(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Settings:
    """Merges the sources; raises ConfigError for an unknown name, a value that cannot be read, or a missing model.

    Args:
        flags: What was given on the command line, by field name; names that are no settings are left alone.
        environ: The process environment; every `JAXSERVE_*` name in it must be known.
        file: A YAML file of names and values.
    """
    names = _names()
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources = (_read_file(file, names), _read_environment(environ, names), {(k, f"--{_dashed(k)}"): v for k, v in flags.items()})
    for source in sources:
        for (name, origin), raw in source.items():
            if name in names:
                values[name] = parse_value(name, raw, origin)
                origins[name] = origin
    if not values.get("model"):
        raise ConfigError(
            "no model given: name a converted checkpoint, a Hugging Face directory, a GGUF file or a hub id, before flags that take a list."
        )
    engine = EngineConfig(**{spec.name: values[spec.name] for spec in fields(EngineConfig) if spec.name in values})
    server = ServerConfig(**{spec.name: values[spec.name] for spec in fields(ServerConfig) if spec.name in values})
    changed = {name: origin for name, origin in origins.items() if values[name] != names[name].default}
    return Settings(engine, server, changed)


def read_engine_config(model: Any, settings: Mapping[str, Any], owner: str) -> EngineConfig:
    """An EngineConfig from keyword arguments: fields or their vLLM names, sizes also as text; `owner` begins the errors."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model is {model!r}; it must be a path or a hub id.")
    names = {name: spec.name for spec in fields(EngineConfig) for name in (spec.name, *spec.metadata.get("aliases", ()))}
    values: dict[str, Any] = {}
    for given, value in settings.items():
        if given in {spec.name for spec in fields(ServerConfig)}:
            raise ConfigError(
                f"{owner} is one engine in this process, and {given} a setting of a server: run `jaxserve serve MODEL --{_dashed(given)}`."
            )
        if given not in names:
            raise ConfigError(f"{owner} has no setting {given!r}.{nearest(given, list(names))}")
        if names[given] in values:
            raise ConfigError(f"{owner}: {names[given]} is given twice, once as {given}; leave one out.")
        values[names[given]] = parse_value(names[given], value, owner)
    return EngineConfig(model=os.fspath(model), **values)


def parse_value(name: str, raw: Any, origin: str) -> Any:
    """A field's value from text or from what YAML made of it; ConfigError, naming the origin, when it does not fit."""
    spec = _names()[name]
    kind = _type_of(spec.name)
    is_optional = spec.default is None
    if raw is None or (is_optional and isinstance(raw, str) and raw.lower() in ("auto", "none")) or _is_auto_count(spec, raw):
        if is_optional:
            return None
        raise ConfigError(f"{origin}: {name} has no value.")
    readers = {bool: _read_bool, int: _read_count if spec.metadata.get("kind") else _read_int, float: _read_float, str: _read_str}
    value = _read_names(raw) if kind is tuple else readers[kind](raw)
    if value is None:
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list of names"}[kind]
        unit = {"bytes": ", such as 4GiB", "count": ", such as 4096 or 32k"}.get(spec.metadata.get("kind", ""), "")
        given = "not readable" if spec.metadata.get("is_secret") else repr(raw)
        raise ConfigError(f"{origin}: {name} is {given}; it must be {wanted}{unit}.")
    if message := range_error(spec, value):
        raise ConfigError(f"{origin}: {message}")
    return value


def nearest(name: str, known: Iterator[str] | list[str]) -> str:
    """` Did you mean X?`, or nothing when no known name is near."""
    matches = get_close_matches(name, list(known), n=1)
    return f" Did you mean {matches[0]}?" if matches else ""


def _read_file(path: Path | None, names: Mapping[str, Field[Any]]) -> dict[tuple[str, str], Any]:
    if path is None:
        return {}
    import yaml  # only needed here: `jaxserve --help` must be quick

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration file {path} is not valid YAML{_place(error)}.") from None
    if not isinstance(content or {}, dict):
        raise ConfigError(f"the configuration file {path} must hold names and values, not a {type(content).__name__}.")
    values: dict[tuple[str, str], Any] = {}
    for key, value in (content or {}).items():
        name = _canonical(str(key).replace("-", "_"), names)
        if name is None:
            raise ConfigError(f"unknown setting {key!r} in {path}.{nearest(str(key), [_dashed(known) for known in names])}")
        _check_once(name, str(key), str(path), values)
        values[name, str(path)] = value
    return values


def _place(error: Any) -> str:
    """What a YAMLError tells, but for the text itself: that may hold keys."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f" at line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark and problem else ""


def _check_once(name: str, given: str, origin: str, values: Mapping[tuple[str, str], Any]) -> None:
    if any(name == other for other, _ in values):
        raise ConfigError(f"{origin}: {name} is given twice, once as {given}; leave one out.")


def _read_environment(environ: Mapping[str, str], names: Mapping[str, Field[Any]]) -> dict[tuple[str, str], Any]:
    values: dict[tuple[str, str], Any] = {}
    for variable, text in environ.items():
        if not variable.startswith("JAXSERVE_") or variable in OTHER_VARIABLES or not text:
            continue
        name = _canonical(variable.removeprefix("JAXSERVE_").lower(), names)
        if name is None:
            known = [*(known.upper() for known in names), *(other.removeprefix("JAXSERVE_") for other in OTHER_VARIABLES)]
            hint = nearest(variable.removeprefix("JAXSERVE_"), known).replace("mean ", "mean JAXSERVE_")
            raise ConfigError(f"unknown environment variable {variable}.{hint}")
        _check_once(name, variable, "the environment", values)
        values[name, variable] = text
    return values


def _canonical(name: str, names: Mapping[str, Field[Any]]) -> str | None:
    if name in names:
        return name
    return next((known for known, spec in names.items() if name in spec.metadata.get("aliases", ())), None)


def _names() -> dict[str, Field[Any]]:
    return {spec.name: spec for cls in (EngineConfig, ServerConfig) for spec in fields(cls)}


def _specs(*classes: type[Any]) -> Iterator[Field[Any]]:
    """The fields that have a flag: all but the model, which is given by position."""
    for cls in classes:
        yield from (spec for spec in fields(cls) if spec.default is not MISSING)


def _type_of(name: str) -> Any:
    hint = next(hints[name] for cls in (EngineConfig, ServerConfig) if name in (hints := get_type_hints(cls)))
    if isinstance(hint, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    return getattr(hint, "__origin__", hint)


def _is_auto_count(spec: Field[Any], raw: Any) -> bool:
    # vLLM's spelling of "derive it": --max-model-len -1.
    return spec.default is None and spec.metadata.get("kind") == "count" and raw in (-1, "-1")


def _read_bool(raw: Any) -> bool | None:
    if isinstance(raw, bool):
        return raw
    text = str(raw).lower()
    return True if text in _TRUE else False if text in _FALSE else None


def _read_int(raw: Any) -> int | None:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    return int(raw) if isinstance(raw, str) and re.fullmatch(r"[+-]?\d+", raw) else None


def _read_count(raw: Any) -> int | None:
    """`4096`, `32k` (decimal), `32K` (binary), `4GiB`, `2.5GB`; None for anything else and for what is no whole number."""
    if not isinstance(raw, str):
        return _read_int(raw)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", raw.strip())
    if match is None or match[2] not in _SUFFIXES:
        return None
    value = float(match[1]) * _SUFFIXES[match[2]] if "." in match[1] else int(match[1]) * _SUFFIXES[match[2]]
    return int(value) if value == int(value) else None


def _read_float(raw: Any) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return None
    try:
        return float(raw)
    except ValueError:
        return None


def _read_str(raw: Any) -> str | None:
    return raw if isinstance(raw, str) else None if isinstance(raw, bool | list | dict) else str(raw)


def _read_names(raw: Any) -> tuple[str, ...] | None:
    given = [raw] if isinstance(raw, str) else raw
    if not isinstance(given, list | tuple) or not all(isinstance(part, str) for part in given):
        return None
    parts = tuple(name.strip() for part in given for name in part.split(","))
    return parts if all(parts) else None


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _metavar(spec: Field[Any]) -> str:
    if spec.metadata["choices"]:
        return "{" + ",".join(spec.metadata["choices"]) + "}"
    if spec.metadata["is_secret"]:
        return "SECRET"
    return {"bytes": "SIZE", "count": "N"}.get(spec.metadata["kind"]) or {int: "N", float: "X", tuple: "NAME"}.get(
        _type_of(spec.name), "TEXT"
    )


def _help(spec: Field[Any]) -> str:
    # argparse expands % in help texts.
    text = str(spec.metadata["help"]).replace("%", "%%")
    is_plain = spec.default is not None and spec.default != () and not isinstance(spec.default, bool)
    if is_plain:
        return f"{text} (default {spec.default})"
    return f"{text} (default {'on' if spec.default else 'off'})" if isinstance(spec.default, bool) else text
