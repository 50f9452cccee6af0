"""Command-line flags made from EngineConfig, so that a new option is a flag without another line of code.

Flags carry Hex-LLM's names. Every spelling works: `--max_model_len=4096`, `--max-model-len 4096`; booleans as
`--warmup`, `--warmup=false`, `--no-warmup` and `--nowarmup`. Values are checked by EngineConfig alone.
"""

from __future__ import annotations

import argparse
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from engine.config import EngineConfig


class FlagError(ValueError):
    """The command line is wrong. The message is one line: which flag, what to do."""


class FlagParser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line with a suggestion, and which takes dashes for underscores."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=_HelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise FlagError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses `argv`.

        Raises:
            FlagError: an unknown flag or an unusable value.
        """
        namespace, unknown = self.parse_known_args([_underscores(token) for token in argv])
        if unknown:
            raise FlagError(self._unknown(unknown[0]))
        return namespace

    def _unknown(self, token: str) -> str:
        flag = token.partition("=")[0]
        if not flag.startswith("-"):
            return f"unexpected argument {flag!r}: options are given as --name=value"
        close = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        return f"unknown flag {flag}: " + (f"did you mean {close[0]}?" if close else f"see {self.prog} --help")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        super().add_usage(usage or "%(prog)s [--flag=value ...]", actions, groups, prefix)


def _underscores(token: str) -> str:
    """`--max-model-len=a-b` becomes `--max_model_len=a-b`."""
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def add_config_flags(
    parser: argparse.ArgumentParser, names: Iterable[str] | None = None, defaults: Mapping[str, object] | None = None
) -> None:
    """Adds one flag per option of EngineConfig, in the groups of the documentation.

    Args:
        names: the options; None: all.
        defaults: that the command has in place of the option's own.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    wanted = None if names is None else frozenset(names)
    for name, field in EngineConfig.model_fields.items():
        if wanted is not None and name not in wanted:
            continue
        title = group_of(field)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        default = (defaults or {}).get(name, field.default)
        for spelling in filter(None, (name, field.alias)):
            _add_flag(groups[title], spelling, field, canonical=name, default=default)


def given(namespace: argparse.Namespace) -> dict[str, str]:
    """The config options on the command line, as EngineConfig.from_args takes them."""
    known = {spelling for name, field in EngineConfig.model_fields.items() for spelling in (name, field.alias)}
    return {key: value for key, value in vars(namespace).items() if key in known}


def group_of(field: FieldInfo) -> str:
    """The heading under which an option is listed."""
    extra = field.json_schema_extra
    return str(extra["group"]) if isinstance(extra, dict) else "Other"


def kind_of(field: FieldInfo) -> str:
    """What values an option takes, in a few words: `true|false`, `cpu|tpu`, `int`, `text`."""
    members = [member for member in _members(field.annotation) if member is not type(None)]
    if members == [bool]:
        return "true|false"
    if typing.get_origin(members[0]) is typing.Literal:
        return "|".join(str(value) for value in typing.get_args(members[0]))
    return {int: "int", float: "number", str: "text"}[members[0]]


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)


def _add_flag(
    group: argparse._ArgumentGroup, spelling: str, field: FieldInfo, *, canonical: str, default: object
) -> None:
    shown = f" (default: {default})" if default is not None else ""
    text = f"{field.description}{shown}" if spelling == canonical else f"Another name of --{canonical}."
    text = text.replace("`", "").replace("%", "%%")
    kind = kind_of(field)
    if kind != "true|false":
        group.add_argument(f"--{spelling}", default=argparse.SUPPRESS, metavar=kind, help=text)
        return
    group.add_argument(f"--{spelling}", default=argparse.SUPPRESS, nargs="?", const="true", metavar=kind, help=text)
    for negation in (f"--no_{spelling}", f"--no{spelling}"):
        group.add_argument(
            negation,
            dest=spelling,
            default=argparse.SUPPRESS,
            action="store_const",
            const="false",
            help=argparse.SUPPRESS,
        )
