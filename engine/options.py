"""Options: a model of options whose values may come as text, with errors of one line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class ConfigError(ValueError):
    """An option is wrong. The message is one line: which option, what is wrong, what to change."""


LARGEST = 2**31 - 1
"""Of any number that counts, measures or limits something."""


def option(default: Any, description: str, *, group: str, **kwargs: Any) -> Any:
    """A config field with its one-sentence description and the group under which docs list it."""
    return Field(default, description=description, json_schema_extra={"group": group}, **kwargs)


class Options(BaseModel):
    """Options that are given once, by name, and never change."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), populate_by_name=True, allow_inf_nan=False
    )

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """Builds them from command-line or Serve arguments (values may be strings).

        Raises:
            ConfigError: an unknown key or a wrong value, in one line.
        """
        known = known_keys(cls)
        cleaned: dict[str, Any] = {}
        for key, value in args.items():
            name = known.get(key.strip().replace("-", "_"))
            if name is None:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]}?" if close else "see docs/configuration.md for all options"
                raise ConfigError(f"unknown option {key!r}: {hint}")
            if name in cleaned and cleaned[name] != value:
                raise ConfigError(
                    f"option {name} is given twice with different values ({cleaned[name]!r} and {value!r})"
                )
            cleaned[name] = _parse(cls, name, value)
        try:
            return cls(**cleaned)
        except ValidationError as error:
            raise ConfigError(_one_line(error)) from None


def known_keys(config_class: type[BaseModel]) -> dict[str, str]:
    """Every accepted spelling of every option, mapped to the field's name."""
    keys = {name: name for name in config_class.model_fields}
    keys.update({field.alias: name for name, field in config_class.model_fields.items() if field.alias})
    return keys


def _parse(config_class: type[BaseModel], name: str, value: Any) -> Any:
    """Turns a string into what the field expects where pydantic's lax mode would not (integer literals, null)."""
    if not isinstance(value, str):
        return value
    annotation = str(config_class.model_fields[name].annotation)
    text = value.strip()
    optional = "None" in annotation or "Optional" in annotation
    if optional and text.lower() in ("none", "null", "") and name != "compilation_cache_dir":
        return None
    if name in ("block_size", "prefill_block_size") and text.isdigit():
        return int(text)
    return text


def _one_line(error: ValidationError) -> str:
    problems = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        problems.append(f"{field}={item['input']!r}: {message[:1].lower()}{message[1:]}" if field else message)
    return "; ".join(problems)
