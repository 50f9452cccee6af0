"""Recorded load: a trace file's requests, one per line, as CSV with a header or as JSON lines.

| what | columns that are known |
| --- | --- |
| when it came | `time_s`; `timestamp` (milliseconds in JSON lines, as Mooncake's; date and time in CSV, as Azure's) |
| prompt tokens | `prompt_tokens`, `input_length` (Mooncake), `ContextTokens` (Azure) |
| tokens generated | `output_tokens`, `output_length` (Mooncake), `GeneratedTokens` (Azure) |
| prefix (optional) | `hash_ids`: a number per 512 tokens; prompts share what their first numbers have in common |
| session (optional) | `session`: requests that should meet again |

Other columns are ignored, capitals don't matter, and the first request is time zero.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from cluster.simulate.errors import SimulationError
from cluster.simulate.workload import Job

HASHED_TOKENS = 512
"""Tokens per entry of `hash_ids`, as in Mooncake's traces."""
_MOST_TOKENS = 10_000_000

_COLUMNS = {
    "prompt tokens": ("prompt_tokens", "input_length", "contexttokens"),
    "output tokens": ("output_tokens", "output_length", "generatedtokens"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    time_s: float  # as recorded
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: str = ""


class TraceWorkload:
    """The jobs of a trace, in the order of their times."""

    def __init__(self, rows: Sequence[TraceRow], *, speed: float, max_tokens: int, seed: int) -> None:
        """
        Args:
            speed: 2 plays the trace in half the time.
            max_tokens: of a sequence; longer prompts and outputs are cut.
        """
        self._rows = sorted(rows, key=lambda row: row.time_s)
        self._speed = speed
        self._max_tokens = max_tokens
        self._rng = random.Random(f"trace {seed}")

    @property
    def num_cut(self) -> int:
        """Requests that are longer than the engine takes."""
        return sum(row.prompt_tokens + row.output_tokens > self._max_tokens for row in self._rows)

    def jobs(self) -> Iterator[Job]:
        start = self._rows[0].time_s
        for row in self._rows:
            length = min(row.prompt_tokens, self._max_tokens - 1)
            yield Job(
                time_s=(row.time_s - start) / self._speed,
                prompt=self._prompt(row, length),
                output_tokens=min(row.output_tokens, self._max_tokens - length),
                session=row.session,
            )

    def _prompt(self, row: TraceRow, length: int) -> tuple[int, ...]:
        needed = row.hash_ids[: -(-length // HASHED_TOKENS)]
        blocks = (hashlib.shake_128(str(known).encode()).digest(HASHED_TOKENS) for known in needed)
        known = tuple(chain.from_iterable(blocks))[:length]
        return known + tuple(self._rng.randbytes(length - len(known)))


def read_trace(path: Path) -> list[TraceRow]:
    """Reads a trace file; what it may hold is on top of this module.

    Raises:
        SimulationError: it can't be read, or a line says nothing usable.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise SimulationError(f"--trace={path}: {reason}; give a CSV or JSON-lines file") from None
    first = text.lstrip()[:1]
    records = _json_lines(path, text) if first == "{" else _csv_lines(path, text)
    rows = [_row(path, number, record) for number, record in records]
    if not rows:
        raise SimulationError(f"--trace={path}: holds no requests")
    return rows


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise SimulationError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(record, dict):
            raise SimulationError(f"{path}, line {number}: not a JSON object")
        yield number, {str(key).lower(): value for key, value in record.items()}


def _csv_lines(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    try:
        for record in reader:
            yield reader.line_num, {key.strip().lower(): value for key, value in record.items() if key and value}
    except csv.Error as error:
        raise SimulationError(f"{path}, line {reader.line_num}: not CSV ({error})") from None


def _row(path: Path, number: int, record: Mapping[str, Any]) -> TraceRow:
    where = f"{path}, line {number}"
    hash_ids = record.get("hash_ids") or ()
    if not isinstance(hash_ids, list | tuple) or not all(isinstance(known, int) for known in hash_ids):
        raise SimulationError(f"{where}: hash_ids is not a list of whole numbers")
    return TraceRow(
        time_s=_time(where, record),
        prompt_tokens=_count(where, record, "prompt tokens"),
        output_tokens=_count(where, record, "output tokens"),
        hash_ids=tuple(hash_ids),
        session=str(record.get("session", "")),
    )


def _count(where: str, record: Mapping[str, Any], what: str) -> int:
    names = _COLUMNS[what]
    name = next((name for name in names if name in record), None)
    if name is None:
        raise SimulationError(f"{where}: no {what}; name the column {', '.join(names[:-1])} or {names[-1]}")
    try:
        value = int(record[name])
    except (TypeError, ValueError):
        value = 0
    if not 1 <= value <= _MOST_TOKENS:
        raise SimulationError(f"{where}: {name}={record[name]!r} is not a whole number from 1 to {_MOST_TOKENS}")
    return value


def _time(where: str, record: Mapping[str, Any]) -> float:
    name = next((name for name in ("time_s", "timestamp") if name in record), None)
    if name is None:
        raise SimulationError(f"{where}: no time; name the column time_s or timestamp")
    value = record[name]
    try:
        if name == "time_s":
            return _finite(float(value))
        if isinstance(value, int | float):
            return _finite(value / 1000)
        return _date(value)
    except (TypeError, ValueError, OverflowError):
        raise SimulationError(f"{where}: {name}={value!r} is not a time") from None


def _finite(seconds: float) -> float:
    if not -1e12 < seconds < 1e12:
        raise ValueError(seconds)
    return seconds


def _date(text: str) -> float:
    """Date and time; digits beyond microseconds, which Azure's have, are dropped."""
    head, point, rest = text.strip().partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    moment = datetime.fromisoformat(f"{head}{point}{rest[:digits][:6].ljust(6, '0')}{rest[digits:]}" if point else head)
    return moment.timestamp() if moment.tzinfo else (moment - datetime(1970, 1, 1)).total_seconds()
