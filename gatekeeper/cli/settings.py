"""The effective configuration of a call: each value and its source.

The last of these wins: default, file, environment `GATEKEEPER_<SECTION>_<FIELD>`, flag.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import FieldInfo

from gatekeeper.config import (
    PROXY_REMOVED,
    Config,
    GuardConfig,
    explain_value,
    read_toml,
    settings_of,
    takes_list,
    values_of,
)
from gatekeeper.errors import ConfigError
from gatekeeper.terminal import did_you_mean

PREFIX = "GATEKEEPER_"

_FLAG_NAMES = {"audit.folder": "--audit", "fleet.url": "--fleet", "storage.path": "--storage"}
"""Flags whose name differs from the name of their setting."""
_SETTING = re.compile(r"(?:\[\[(host|group)\]\]|(user_agent|[a-z]+\.\w+)(\*?))(: | = )?")
"""Matches the setting at the start of an error message."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked configuration with the source of each value.

    >>> settings = Settings.load(None, environ={"GATEKEEPER_SERVER_PORT": "9000"})
    >>> settings.config.server.port, settings.source("server.port")
    (9000, 'environment GATEKEEPER_SERVER_PORT')
    """

    config: Config
    sources: Mapping[str, str]
    path: str | None = None
    ignored: tuple[str, ...] = ()
    """Environment variables that look like settings but are not."""

    @classmethod
    def load(
        cls,
        path: str | None,
        *,
        environ: Mapping[str, str] | None = None,
        flags: Mapping[str, Any] | None = None,
        allow: tuple[str, ...] = (),
    ) -> Settings:
        """Read and check all settings. Raises ConfigError, which names the wrong one's source.

        `flags` maps dotted names to values; `allow` is added to guard.allow.
        """
        environ = os.environ if environ is None else environ
        path = path or environ.get(f"{PREFIX}CONFIG") or None
        raw: dict[str, Any] = {}
        sources: dict[str, str] = {}
        if path is not None:
            raw = read_toml(path)
            Config.from_dict(raw, source=path)  # alone, so that an error names the file
            sources.update(dict.fromkeys(_dotted_names(raw), f"file {path}"))
        for name, value, source in (*_from_environment(environ), *_from_flags(flags or {})):
            _set_value(raw, name, value)
            sources[name] = source
        if allow:
            _check_addresses(allow)
            allowed = raw.get("guard", {}).get("allow", [])
            _set_value(raw, "guard.allow", [*allowed, *allow])
            others = f"{sources['guard.allow']}, " if allowed else ""
            sources["guard.allow"] = f"{others}flag --allow-address"
        try:
            config = Config.from_dict(raw, source="")
        except ConfigError as error:
            raise ConfigError(_with_source(str(error), sources)) from error
        return cls(config, sources, path, tuple(_unknown_variables(environ)))

    def source(self, name: str) -> str:
        """Return the source of the setting with a dotted name."""
        return self.sources.get(name, "default")

    def blame(self, error: ConfigError) -> str:
        """Return the message with the file, variable or flag that the wrong value came from.

        For errors that only the code which uses a setting can detect.
        """
        return _with_source(str(error), self.sources)


def _dotted_names(raw: Mapping[str, Any]) -> Iterator[str]:
    for name, value in raw.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def _set_value(raw: dict[str, Any], name: str, value: object) -> None:
    section, _, field = name.partition(".")
    if field:
        raw.setdefault(section, {})[field] = value
    else:
        raw[section] = value


def _from_flags(flags: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for name, value in flags.items():
        flag = _FLAG_NAMES.get(name, f"--{name.rpartition('.')[2].replace('_', '-')}")
        if (problem := explain_value(_field(name), value)) is not None:
            raise ConfigError(f"{flag}: {problem}")
        yield name, value, f"flag {flag}"


def _check_addresses(allow: tuple[str, ...]) -> None:
    """Check --allow-address alone, so that an error names the flag and not the file.

    Raises ConfigError.
    """
    from gatekeeper.fetching.allowed_addresses import Guard  # noqa: PLC0415 - `--help` stays quick

    try:
        Guard(Config(guard=GuardConfig(allow=allow)))
    except ConfigError as error:
        blamed = _with_source(str(error), {"guard.allow": "flag --allow-address"})
        raise ConfigError(blamed) from error


def _with_source(message: str, sources: Mapping[str, str]) -> str:
    """Return the message with the source of the setting that it starts with, if there is one."""
    prefix = _SETTING.match(message)
    if prefix is None:
        return message
    table, name, is_prefix, separator = prefix.groups()
    name = table or name
    names = [each for each in sources if each.startswith(name)] if is_prefix else [name]
    # A list may have two sources. The flag's part was checked alone before, so the error is about
    # the other one, which comes first.
    source = next((sources[each] for each in names if each in sources), "").partition(", ")[0]
    kind, _, place = source.partition(" ")
    if not place:
        return message
    if kind == "file" or table or is_prefix:
        return f"{place}: {message}"
    separator = {" = ": " " if kind == "flag" else "="}.get(separator, separator or "")
    return f"{place}{separator}{message[prefix.end() :]}"


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    known = _variables()
    dotted = (name.partition(".") for name in known.values())
    sections = tuple({f"{PREFIX}{section.upper()}_" for section, dot, _ in dotted if dot})
    for variable, text in sorted(environ.items()):
        if variable in known:
            value = _parse_variable(text, known[variable], variable)
            yield known[variable], value, f"environment {variable}"
        elif variable.startswith(sections):
            # Ignoring a misspelt setting silently would be worse than refusing to start.
            raise ConfigError(f"{variable}: no such setting{suggest(variable)}")


def suggest(variable: str) -> str:
    """Return the end of a sentence about an unknown variable: the one that may be meant."""
    if variable.startswith(f"{PREFIX}SERVER_PROXY_"):  # until version 0.9
        return f": {PROXY_REMOVED}"
    every = "; `gatekeeper config show` lists all of them"
    return did_you_mean(variable, _variables(), otherwise=every, cutoff=0.8)


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield, in order, the variables with our prefix that are not settings.

    They are reported, not refused, since the prefix is a common word. The variables with which
    Kubernetes and Docker announce a service called gatekeeper are left out.
    """
    links = (f"{PREFIX}PORT", f"{PREFIX}SERVICE_")
    known = (*_variables(), f"{PREFIX}CONFIG", f"{PREFIX}TOKEN")
    for variable in sorted(environ.keys() - known):
        if variable.startswith(PREFIX) and not variable.startswith(links):
            yield variable


def _variables() -> dict[str, str]:
    """Return the dotted name of the setting of each environment variable."""
    names = (name for name, _ in values_of(Config()) if name not in {"host", "group"})
    return {f"{PREFIX}{name.replace('.', '_')}".upper(): name for name in names}


def _parse_variable(text: str, name: str, variable: str) -> object:
    """Convert the text of a variable to the type of its setting. Raises ConfigError.

    A list is separated by commas, or written as in JSON.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    with suppress(msgspec.DecodeError, UnicodeError):
        # A host such as `[::1]` is not JSON, and stays text. So does what is not UTF-8.
        parts = msgspec.json.decode(text, type=list[Any])
    field = _field(name)
    for candidate in (text, parts):
        with suppress(msgspec.ValidationError):
            value: object = msgspec.convert(candidate, field.type, strict=False)
            return value
    given = parts if takes_list(field) else _number(text)
    raise ConfigError(f"{variable}: {explain_value(field, given) or 'no such value'}")


def _number(text: str) -> float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _field(name: str) -> FieldInfo:
    section, _, field = name.rpartition(".")
    return settings_of(type(getattr(Config(), section)) if section else Config)[field]
