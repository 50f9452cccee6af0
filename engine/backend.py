"""Backend: the one interface that every kind of hardware implements, with its capability record.

A backend runs on one host process, of which several may form one engine (`HostPlace`). It never schedules and never
sees text: it gets StepBatches in order and returns sampled token ids. The engine reads `BackendInfo` and nothing else
about the hardware.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.batch import StepBatch, StepResult
from engine.kv_blocks import KVFormat, KVPayload, LocalPayload, PendingBlocks, check_shares


class BackendError(RuntimeError):
    """The backend can't do what was asked. The message is one line a user can act on."""


class Progress(Protocol):
    """Receives what start-up is doing, for a progress bar per phase."""

    def __call__(self, phase: str, done: int, total: int, detail: str = "") -> None: ...


def no_progress(phase: str, done: int, total: int, detail: str = "") -> None:
    """A Progress that shows nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlace:
    """A process' place among those that run one model together, in lockstep: the same calls in the same order."""

    rank: int
    num_hosts: int
    coordinator: str  # host:port, to listen on for rank 0 and to connect to for the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend can do. Scheduler and validation read this; there is no `if tpu` anywhere else."""

    chunked_prefill: bool = True
    mixed_batches: bool = True  # prefill and decode rows in one step
    prefix_caching: bool = True
    overlap: bool = True  # dispatch of step n+1 before step n is read (FROM_DEVICE tokens)
    per_request_seed: bool = True
    penalties: bool = True
    min_p: bool = True
    logit_bias: int = 300  # entries per request, 0 = not supported
    bad_words: int = 32  # sequences per request
    bad_word_tokens: int = 8  # tokens per sequence
    stop_ids: int = 32  # ids that min_tokens can ban, per request
    max_logprobs: int = 20
    prompt_logprobs: bool = True
    kv_exchange: bool = False  # read_blocks and write_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendInfo:
    """What the engine needs to know about a loaded backend."""

    device: str  # for people: "cpu x1 (bfloat16, native kernels)"
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # tokens, prompt and output together
    num_blocks: int  # KV blocks that requests can own (a backend's dump block is not counted)
    block_size: int  # tokens
    bytes_per_block: int
    max_step_tokens: int  # most query tokens in one StepBatch
    max_step_rows: int  # most rows in one StepBatch; slots are numbered 0 .. max_step_rows - 1
    max_prefill_rows: int  # most rows with more than one query token, or a prompt's last, in one StepBatch
    capabilities: Capabilities


class PendingStep(ABC):
    """A dispatched step whose result has not been read."""

    @abstractmethod
    def result(self) -> StepResult:
        """Waits for the device and returns the step's tokens.

        Raises:
            BackendError: the step failed; the backend can't be used any more.
        """


class Backend(ABC):
    """One host's share of a model on its devices."""

    @abstractmethod
    def load(self, progress: Progress = no_progress) -> BackendInfo:
        """Puts weights on the devices and allocates KV blocks.

        Raises:
            BackendError: the model can't be found, read or fitted; says what to change.
        """

    def compile(self, progress: Progress = no_progress) -> None:  # noqa: B027
        """Compiles what `warmup` runs, and runs nothing: what hosts do that are to run programs together."""

    @abstractmethod
    def warmup(self, progress: Progress = no_progress) -> None:
        """Compiles and runs every program that serving can need. Afterwards nothing compiles."""

    @abstractmethod
    def dispatch(self, batch: StepBatch) -> PendingStep:
        """Starts a step without waiting for the device. Steps run in the order of the calls."""

    def kv_format(self) -> KVFormat:
        """What KV that is read or written looks like (Capabilities.kv_exchange)."""
        raise BackendError("this backend can't exchange KV blocks")

    @property
    def num_hosts(self) -> int:
        """How many hosts' shares of the model this object commands."""
        return 1

    def kv_heads(self) -> range:
        """The model's key-value heads that this host keeps, of those in `kv_format`."""
        return range(self.kv_format().num_kv_heads)

    def receive_blocks(self, payloads: Sequence[KVPayload], timeout_s: float) -> Sequence[KVPayload]:
        """Brings KV to the hosts that will write it, before the engine hears of it. Any thread; waits.

        Returns what `write_blocks` takes, one for each payload.

        Raises:
            KVLostError: one is lost, late, or not what this model keeps; none of them counts then.
        """
        deadline = time.monotonic() + timeout_s
        here = [LocalPayload(blocks=each.fetch(max(0.0, deadline - time.monotonic()))) for each in payloads]
        for payload in here:
            check_shares(payload.blocks, self.kv_format(), self.kv_heads())
        return here

    def read_blocks(self, block_ids: Sequence[int], num_tokens: int, offset: int = 0) -> PendingBlocks:  # noqa: ARG002
        """Starts to read KV out, after all dispatched steps and before those dispatched later.

        Args:
            block_ids: blocks whose tokens are read one behind the other.
            num_tokens: how many tokens to read; the last block may be filled in part.
            offset: how many tokens of the first block to leave out.
        """
        raise BackendError("this backend can't exchange KV blocks")

    def write_blocks(self, block_ids: Sequence[int], offset: int, payload: KVPayload) -> None:  # noqa: ARG002
        """Writes KV into blocks, after all dispatched steps and before those dispatched later. Does not wait.

        Args:
            block_ids: blocks of consecutive tokens, enough for all of the payload's.
            offset: how many tokens of the first block come before the payload's; they are kept.
            payload: as `receive_blocks` gave it.

        Raises:
            KVLostError: the payload is gone, or not what this model keeps. What was to be written holds anything.
        """
        raise BackendError("this backend can't exchange KV blocks")

    @property
    def problem(self) -> str | None:
        """Why the backend can't be used any more, as far as that is known without a step; one line."""
        return None

    @property
    def compilations_after_warmup(self) -> int:
        """Programs compiled since warmup() returned; anything but 0 is a bug that costs users seconds."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Frees devices and memory. The backend can't be used afterwards."""
