"""Start-up progress for people: a bar per phase on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, Self, TextIO

from tqdm import tqdm

from cluster.progress import StartUp

LINE_INTERVAL_S = 5.0


class ProgressDisplay:
    """Shows StartUp records; a context manager that leaves the terminal tidy."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._is_terminal = output.isatty()
        self._bars: dict[tuple[str, str], Any] = {}
        self._shown: dict[str, StartUp] = {}
        self._last_line: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for bar in self._bars.values():
            bar.close()

    def show(self, record: StartUp) -> None:
        """Brings the display up to date with one replica's record. Cheap when nothing has changed."""
        if self._shown.get(record.replica) == record:
            return
        previous = self._shown.get(record.replica)
        self._shown[record.replica] = record
        if record.ready:
            self._finish(previous)
            self._print(record.detail)
        elif self._is_terminal:
            self._draw(record, previous)
        else:
            self._write_line(record, previous)

    def _draw(self, record: StartUp, previous: StartUp | None) -> None:
        if previous is not None and previous.phase != record.phase:
            self._finish(previous)
        bar = self._bars.get((record.replica, record.phase))
        if bar is None:
            form = "{desc:<28} {bar:30} {n_fmt}/{total_fmt} {postfix}"
            bar = tqdm(desc=record.phase, total=record.total, file=self._output, bar_format=form, dynamic_ncols=True)
            self._bars[(record.replica, record.phase)] = bar
        bar.total = record.total
        bar.n = record.done
        bar.set_postfix_str(record.detail, refresh=False)
        bar.refresh()

    def _write_line(self, record: StartUp, previous: StartUp | None) -> None:
        now = time.monotonic()
        edge = previous is None or previous.phase != record.phase or record.done >= record.total
        if edge or now - self._last_line.get(record.replica, 0.0) > LINE_INTERVAL_S:
            self._last_line[record.replica] = now
            detail = f" ({record.detail})" if record.detail else ""
            self._print(f"{record.phase}: {record.done} of {record.total}{detail}")

    def _finish(self, record: StartUp | None) -> None:
        """A phase that is left behind is complete, even if its last record was overwritten before it was read."""
        bar = None if record is None else self._bars.pop((record.replica, record.phase), None)
        if bar is not None:
            bar.n = bar.total
            bar.set_postfix_str("", refresh=True)
            bar.close()

    def _print(self, line: str) -> None:
        print(line, file=self._output, flush=True)
