"""What `sliceserve serve` does about a Serve that does not answer: it ends what hangs, and at last itself."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from cluster.cli import local_server
from cluster.cli.local_server import APPLICATION, NoAnswerError


class Serve:
    """Does not answer while its controller hangs."""

    def __init__(self, *, is_mended: bool) -> None:
        self.is_mended = is_mended  # by ending the controller
        self.hangs = threading.Event()
        self.num_ended = 0
        self.answered = threading.Event()

    def status(self) -> object:
        if self.hangs.is_set():
            threading.Event().wait(10)
        self.answered.set()
        return SimpleNamespace(applications={APPLICATION: SimpleNamespace(status="RUNNING")})

    def end_controller(self) -> bool:
        self.num_ended += 1
        if self.is_mended:
            self.hangs.clear()
        return self.is_mended


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(local_server, "ANSWER_TIMEOUT_S", 0.1)


def use(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "serve", serve)
    monkeypatch.setattr(local_server, "end_controller", serve.end_controller)
    serve.hangs.set()


@pytest.mark.usefixtures("impatient")
def test_a_controller_that_hangs_is_ended_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, stop = Serve(is_mended=True), threading.Event()
    use(serve, monkeypatch)
    watching = threading.Thread(target=local_server._watch, args=(stop,))
    watching.start()
    assert serve.answered.wait(5)
    assert watching.is_alive()
    stop.set()
    watching.join(5)
    assert serve.num_ended == 1


@pytest.mark.usefixtures("impatient")
def test_where_there_is_no_controller_to_end_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve(is_mended=False)
    use(serve, monkeypatch)
    with pytest.raises(NoAnswerError, match="died or hangs"):
        local_server._watch(threading.Event())
