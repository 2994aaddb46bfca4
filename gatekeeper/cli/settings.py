"""The effective configuration, and where each value of it came from.

Later wins: default, file, environment `GATEKEEPER_<SECTION>_<FIELD>`, flag.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gatekeeper.config import Config
from gatekeeper.errors import ConfigError

__all__ = ["DEFAULT_IDENTITY", "Setting", "Settings"]

PREFIX = "GATEKEEPER_"
DEFAULT_IDENTITY = "gatekeeper/0.1"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in force. `source` is "default", or names the file, variable or flag."""

    name: str
    value: object
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked configuration with the origin of each value.

    >>> settings = Settings.load(None, environ={"GATEKEEPER_SERVER_PORT": "9000"})
    >>> settings.config.server.port, settings.source("server.port")
    (9000, 'environment GATEKEEPER_SERVER_PORT')
    """

    config: Config
    sources: Mapping[str, str]
    path: str | None = None
    ignored: tuple[str, ...] = ()
    """Variables that look like settings and are none."""

    @classmethod
    def load(
        cls,
        path: str | None,
        *,
        environ: Mapping[str, str] | None = None,
        flags: Mapping[str, Any] | None = None,
        allow: tuple[str, ...] = (),
    ) -> Settings:
        """Read and check everything. Raises ConfigError that names the culprit.

        `flags` are dotted names with values; `allow` is added to guard.allow.
        """
        environ = os.environ if environ is None else environ
        path = path or environ.get(f"{PREFIX}CONFIG") or None
        raw: dict[str, Any] = {}
        sources: dict[str, str] = {}
        if path is not None:
            raw = _read(path)
            sources.update(dict.fromkeys(_names(raw), f"file {path}"))
        for name, value, source in (*_from_environment(environ), *_from_flags(flags or {})):
            _put(raw, name, value)
            sources[name] = source
        if allow:
            kept = raw.get("guard", {}).get("allow", [])
            _put(raw, "guard.allow", [*kept, *allow])
            sources["guard.allow"] = "flag --allow-address"
        config = Config.from_dict(raw, source=path or "configuration")
        return cls(config, sources, path, tuple(_strangers(environ)))

    def source(self, name: str) -> str:
        """Where the value of a dotted name came from."""
        return self.sources.get(name, "default")

    def identity(self) -> str:
        """The User-Agent in force: the one that was set, or the default one."""
        return self.config.user_agent or DEFAULT_IDENTITY

    def __iter__(self) -> Iterator[Setting]:
        """Every value in force, in the order of the sections."""
        for field in msgspec.structs.fields(self.config):
            value = getattr(self.config, field.name)
            if isinstance(value, msgspec.Struct):
                for inner in msgspec.structs.fields(value):
                    name = f"{field.name}.{inner.name}"
                    yield Setting(name, getattr(value, inner.name), self.source(name))
            else:
                yield Setting(field.name, value, self.source(field.name))


def _read(path: str) -> dict[str, Any]:
    """The file as a mapping, after it was checked alone, so that an error names it."""
    Config.load(path)
    with open(path, "rb") as file:
        return tomllib.load(file)


def _names(raw: Mapping[str, Any]) -> Iterator[str]:
    for name, value in raw.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def _put(raw: dict[str, Any], name: str, value: object) -> None:
    section, _, field = name.partition(".")
    if field:
        raw.setdefault(section, {})[field] = value
    else:
        raw[section] = value


def _from_flags(flags: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for name, value in flags.items():
        yield name, value, f"flag --{name.rpartition('.')[2].replace('_', '-')}"


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    known = _variables()
    sections = tuple(f"{PREFIX}{name.upper()}_" for name in _sections())
    for variable, text in sorted(environ.items()):
        if variable in known:
            name, kind = known[variable]
            yield name, _from_text(text, kind, variable), f"environment {variable}"
        elif variable.startswith(sections):
            # A misspelt setting that is silently not in force is worse than no start.
            raise ConfigError(f"{variable}: no such setting (config.example.toml lists them)")


def _strangers(environ: Mapping[str, str]) -> Iterator[str]:
    """Variables with our prefix that nobody reads, in order.

    Only told, not refused: the prefix is a common word. And not those with which
    Kubernetes and Docker tell every process where a service called gatekeeper is.
    """
    links = (f"{PREFIX}PORT", f"{PREFIX}SERVICE_")
    known = (*_variables(), f"{PREFIX}CONFIG")
    for variable in sorted(environ.keys() - known):
        if variable.startswith(PREFIX) and not variable.startswith(links):
            yield variable


def _sections() -> dict[str, type[msgspec.Struct]]:
    return {
        field.name: field.type
        for field in msgspec.structs.fields(Config)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    }


def _variables() -> dict[str, tuple[str, Any]]:
    """Each variable that is read: its dotted name and the type of its value."""
    found: dict[str, tuple[str, Any]] = {f"{PREFIX}USER_AGENT": ("user_agent", str)}
    for section, struct in _sections().items():
        for field in msgspec.structs.fields(struct):
            variable = f"{PREFIX}{section}_{field.name}".upper()
            found[variable] = (f"{section}.{field.name}", field.type)
    return found


def _from_text(text: str, kind: Any, variable: str) -> object:
    """A variable's text as the type its setting has; lists are separated by commas."""
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        try:
            parts = [part.strip() for part in text.split(",") if part.strip()]
            return list(msgspec.convert(parts, kind, strict=False))
        except (msgspec.ValidationError, TypeError):
            raise ConfigError(f"{variable}={text!r}: {error}") from None
