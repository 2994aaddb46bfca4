"""What is wrong with settings, said in the operator's words: the name, and what it takes.

msgspec judges; this module only explains its refusals, from the same types, so that no
bound or choice is written down twice.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec
from msgspec import inspect

from gatekeeper.masking import printable

__all__ = ["explain", "first_mistake", "settings_of", "takes_list"]

_LISTED = "`gatekeeper config show` lists every one"


def first_mistake(whole: type[msgspec.Struct], raw: Mapping[str, Any]) -> str | None:
    """The first setting of a mapping that can't be used, by its name; None: all can.

    >>> from gatekeeper.config import Config
    >>> first_mistake(Config, {"pacing": {"default_intervall": 2}})
    'pacing.default_intervall: no such setting; did you mean default_interval?'
    """
    return next(_mistakes(whole, raw), None)


def explain(field: inspect.Field, value: object) -> str | None:
    """Why a value can't be that of a field: what it takes, and what was given; None: it can.

    `field` is one of `settings_of`.
    """
    kind = _without_none(field.type)
    if value is None and kind is not field.type:
        return None
    wanted = _wanted(kind, value, field.default)
    return None if wanted is None else f"{wanted}, not {_shown(value)}"


def settings_of(struct: type[msgspec.Struct]) -> dict[str, inspect.Field]:
    """The fields of a table by name, with their types as msgspec sees them."""
    table = cast("inspect.StructType", inspect.type_info(struct))
    return {field.name: field for field in table.fields}


def takes_list(field: inspect.Field) -> bool:
    """Whether a setting's value is a list."""
    return isinstance(_without_none(field.type), inspect.VarTupleType)


def _mistakes(whole: type[msgspec.Struct], raw: Mapping[str, Any]) -> Iterator[str]:
    fields = settings_of(whole)
    for name, value in raw.items():
        field = fields.get(name)
        if field is None:
            yield _stranger_at_top(fields, name, value)
        elif isinstance(field.type, inspect.StructType):
            yield from _in_section(fields, name, value)
        elif (inner := _table_of(field.type)) is not None:
            yield from _in_tables(inner, name, value)
        elif (problem := explain(field, value)) is not None:
            yield f"{name}: {problem}"


def _in_section(fields: Mapping[str, inspect.Field], section: str, value: object) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{section}: a table, written as [{section}], not {_shown(value)}"
        return
    own = _inner(fields[section])
    for name, given in value.items():
        place = f"{section}.{_name(name)}"
        if name not in own:
            yield f"{place}: {_stranger(fields, own, name)}"
        elif (problem := explain(own[name], given)) is not None:
            yield f"{place}: {problem}"


def _in_tables(struct: inspect.StructType, table: str, value: object) -> Iterator[str]:
    if not isinstance(value, list | tuple):
        yield f"{table}: any number of tables, each written as [[{table}]], not {_shown(value)}"
        return
    fields = {field.name: field for field in struct.fields}
    for number, one in enumerate(value, start=1):
        place = f"[[{table}]] number {number}"
        if not isinstance(one, Mapping):
            yield f"{place}: a table, not {_shown(one)}"
            continue
        for name, given in one.items():
            if name not in fields:
                yield f"{place}: {_name(name)}: {_stranger({}, fields, name)}"
            elif (problem := explain(fields[name], given)) is not None:
                yield f"{place}: {name}: {problem}"
        for name, field in fields.items():
            if field.required and name not in one:
                yield f"{place}: {name} is missing"


def _stranger_at_top(fields: Mapping[str, inspect.Field], name: str, value: object) -> str:
    shown = _name(name)
    if isinstance(value, Mapping) or (value and isinstance(value, list)):
        if (close := _closest(name, fields)) is None:
            return f"[{shown}]: no such section; {_LISTED}"
        tables = _table_of(fields[close].type) is not None
        meant = f"[[{close}]]" if tables else f"[{close}]"
        return f"[{shown}]: no such section; did you mean {meant}?"
    return f"{shown}: {_stranger(fields, fields, name)}"


def _stranger(
    fields: Mapping[str, inspect.Field], own: Mapping[str, inspect.Field], name: str
) -> str:
    """What may have been meant by a name that is none in this place, among `own`.

    `fields` are those of the top, whose sections may know it.
    """
    sections = [top for top, field in fields.items() if name in _inner(field)]
    if sections:
        return f"belongs in {' or '.join(f'[{section}]' for section in sections)}"
    if name in fields:
        return "belongs at the top, before the first [section]"
    if (close := _closest(name, own)) is not None:
        return f"no such setting; did you mean {close}?"
    everywhere = {
        inner: f"{inner} in [{top}]" for top, field in fields.items() for inner in _inner(field)
    }
    if (close := _closest(name, everywhere)) is not None:
        return f"no such setting; did you mean {everywhere[close]}?"
    return f"no such setting; {_LISTED}"


def _inner(field: inspect.Field) -> dict[str, inspect.Field]:
    if not isinstance(field.type, inspect.StructType):
        return {}
    return {inner.name: inner for inner in field.type.fields}


def _table_of(kind: inspect.Type) -> inspect.StructType | None:
    """The table that a repeated one ([[host]]) repeats."""
    if isinstance(kind, inspect.VarTupleType) and isinstance(kind.item_type, inspect.StructType):
        return kind.item_type
    return None


def _without_none(kind: inspect.Type) -> inspect.Type:
    """The type of a setting that may also be left unset."""
    if isinstance(kind, inspect.UnionType):
        return next(one for one in kind.types if not isinstance(one, inspect.NoneType))
    return kind


def _wanted(kind: inspect.Type, value: object, default: object) -> str | None:
    """What a setting of this type takes; None where the value is such a one."""
    unit = ""
    if isinstance(kind, inspect.Metadata):
        unit = f" of {(kind.extra or {}).get('unit', '')}"
        kind = kind.type
    if isinstance(kind, inspect.FloatType | inspect.IntType):
        return _wanted_number(kind, value, default, unit)
    if isinstance(kind, inspect.BoolType):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(kind, inspect.LiteralType):
        return None if value in kind.values else _choice(kind.values, default)
    if isinstance(kind, inspect.VarTupleType):
        return _wanted_list(kind, value)
    if not isinstance(value, str):
        return "text in quotes"
    empty = isinstance(kind, inspect.StrType) and kind.min_length and not value
    return "text that is not empty" if empty else None


def _wanted_number(
    kind: inspect.FloatType | inspect.IntType, value: object, default: object, unit: str
) -> str | None:
    whole = isinstance(kind, inspect.IntType)
    fits = isinstance(value, int) if whole else isinstance(value, int | float)
    if not fits or isinstance(value, bool) or not isinstance(value, int | float):
        example = default if isinstance(default, int | float) else 1 if whole else 2.0
        return f"{'a whole number' if whole else 'a number'}{unit} such as {example}"
    if kind.gt is not None and not value > kind.gt:
        return f"more than {kind.gt:.15g}"
    if kind.ge is not None and not value >= kind.ge:
        return f"at least {kind.ge:.15g}"
    if kind.le is not None and not value <= kind.le:
        return f"at most {kind.le:.15g}"
    return None


def _wanted_list(kind: inspect.VarTupleType, value: object) -> str | None:
    one, many = ("80", "whole numbers")
    if not isinstance(kind.item_type, inspect.IntType):
        one, many = ('"127.0.0.1"', "texts in quotes")
    if not isinstance(value, list | tuple):
        if _wanted(kind.item_type, value, ...) is None:
            one = f'"{printable(value, 60)}"' if isinstance(value, str) else str(value)
        return f"a list, such as [{one}]"
    if all(_wanted(kind.item_type, item, ...) is None for item in value):
        return None
    return f"a list of {many}, such as [{one}]"


def _choice(values: Iterable[object], default: object) -> str:
    usual_first = sorted(values, key=lambda one: (one != default, str(one)))
    named = ", ".join(f'"{one}"' for one in usual_first)
    return f"one of {named}"


def _closest(name: str, known: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name.lower().replace("-", "_"), list(known), n=1)
    return found[0] if found else None


def _name(name: object) -> str:
    return printable(str(name), 60)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()  # as TOML and JSON write it
    return printable(repr(value), 60)
