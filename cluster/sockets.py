"""What the TCP lines between our own processes have in common: how the other end is reached and known, and what their
sockets are set to. What is said over them is each line's own (`cluster.mailbox` and `outbox`, `cluster.gang.wire`).
"""

from __future__ import annotations

import hmac
import secrets
import socket
from dataclasses import dataclass
from typing import Self

UNANSWERED_S = 20
"""How long the other end's machine may acknowledge nothing before a line counts as broken."""
PROBE_S = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class LineAddress:
    """Where a process waits for lines. The secret, which travels through Ray, keeps strangers out."""

    host: str
    port: int
    secret: str

    @classmethod
    def new(cls, host: str, port: int) -> Self:
        return cls(host=host, port=port, secret=secrets.token_hex(16))

    def is_secret(self, shown: str | bytes) -> bool:
        """Whether somebody knows the secret. Takes as long for a wrong guess as for another: no guessing by byte."""
        return hmac.compare_digest(shown.encode() if isinstance(shown, str) else shown, self.secret.encode())


def prepare(line: socket.socket) -> None:
    """Small messages leave at once, and a peer whose machine has vanished is noticed: by what it does not acknowledge,
    and by probes where nothing is said (which TCP leaves out while something is unacknowledged)."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": PROBE_S,
        "TCP_KEEPINTVL": PROBE_S,
        "TCP_KEEPCNT": UNANSWERED_S // PROBE_S - 1,
        "TCP_USER_TIMEOUT": 1000 * UNANSWERED_S,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
