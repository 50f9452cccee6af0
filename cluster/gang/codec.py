"""Steps, results and backend descriptions as bytes: plain arrays and msgpack, the same on every host."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from cluster.gang.wire import pack
from engine.backend import BackendInfo, Capabilities
from engine.batch import LogprobArrays, SamplingArrays, SlotState, StepBatch, StepResult
from engine.kv_blocks import KVFormat

_INT, _FLOAT, _BOOL, _UINT = (np.dtype(name) for name in ("int32", "float32", "bool", "uint32"))

_BATCH: dict[str, np.dtype[Any]] = {
    "token_ids": _INT,
    "positions": _INT,
    "query_lens": _INT,
    "kv_lens": _INT,
    "slots": _INT,
    "block_tables": _INT,
    "samples": _BOOL,
    "prompt_logprobs": _BOOL,
    "target_ids": _INT,
}
_SAMPLING: dict[str, np.dtype[Any]] = {
    "temperature": _FLOAT,
    "top_k": _INT,
    "top_p": _FLOAT,
    "min_p": _FLOAT,
    "repetition_penalty": _FLOAT,
    "presence_penalty": _FLOAT,
    "frequency_penalty": _FLOAT,
    "seed": _UINT,
    "prompt_len": _INT,
    "min_len": _INT,
    "rewrites_logits": _BOOL,
    "num_logprobs": _INT,
}
_LOGPROBS: dict[str, np.dtype[Any]] = {"chosen": _FLOAT, "top_ids": _INT, "top_logprobs": _FLOAT}


def pack_batch(batch: StepBatch) -> bytes:
    states = [
        (s.slot, _bytes(s.token_ids, _INT), list(s.logit_bias.items()), s.bad_words, s.stop_ids)
        for s in batch.slot_states
    ]
    return pack((batch.step, _pack(batch, _BATCH), _pack(batch.sampling, _SAMPLING), states))


def unpack_batch(content: Sequence[Any]) -> StepBatch:
    """What `pack_batch` was given; the arrays are read-only."""
    step, arrays, sampling, states = content
    return StepBatch(
        step=step,
        sampling=SamplingArrays(**_unpack(sampling, _SAMPLING)),
        slot_states=tuple(map(_slot_state, states)),
        **_unpack(arrays, _BATCH),
    )


def pack_result(result: StepResult) -> bytes:
    logprobs = [None if x is None else _pack(x, _LOGPROBS) for x in (result.logprobs, result.prompt_logprobs)]
    return pack((result.step, _bytes(result.token_ids, _INT), *logprobs))


def unpack_result(data: bytes) -> StepResult:
    step, tokens, *logprobs = msgpack.unpackb(data, use_list=False)
    chosen, prompt = (None if x is None else LogprobArrays(**_unpack(x, _LOGPROBS)) for x in logprobs)
    return StepResult(step=step, token_ids=np.frombuffer(tokens, _INT), logprobs=chosen, prompt_logprobs=prompt)


def token_checksum(result: StepResult) -> int:
    """What hosts that computed the same tokens have in common."""
    return zlib.crc32(_bytes(result.token_ids, _INT))


def pack_host(info: BackendInfo, kv_format: KVFormat | None, kv_heads: range) -> bytes:
    """What a host says of itself: what it must have in common with the others, and the heads whose KV it keeps."""
    common = {**asdict(info), "kv_format": None if kv_format is None else asdict(kv_format)}
    return pack((common, kv_heads.start, kv_heads.stop))


def unpack_host(content: Sequence[Any]) -> tuple[Mapping[str, Any], range]:
    """A record for `unpack_info`, which can be compared with others', and the heads."""
    common, first, end = content
    return common, range(first, end)


def unpack_info(content: Mapping[str, Any]) -> tuple[BackendInfo, KVFormat | None]:
    """What `pack_host` was given."""
    fields = dict(content)
    kv_format = fields.pop("kv_format")
    info = BackendInfo(**{**fields, "capabilities": Capabilities(**fields["capabilities"])})
    return info, None if kv_format is None else KVFormat(**kv_format)


def _pack(record: Any, fields: Mapping[str, np.dtype[Any]]) -> list[tuple[tuple[int, ...], bytes]]:
    arrays = [(getattr(record, name), dtype) for name, dtype in fields.items()]
    return [(array.shape, _bytes(array, dtype)) for array, dtype in arrays]


def _unpack(arrays: Sequence[Any], fields: Mapping[str, np.dtype[Any]]) -> dict[str, NDArray[Any]]:
    pairs = zip(fields.items(), arrays, strict=True)
    return {name: np.frombuffer(data, dtype).reshape(shape) for (name, dtype), (shape, data) in pairs}


def _bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _slot_state(content: Sequence[Any]) -> SlotState:
    slot, tokens, bias, bad_words, stop_ids = content
    return SlotState(
        slot=slot,
        token_ids=np.frombuffer(tokens, _INT),
        logit_bias=dict(bias),
        bad_words=bad_words,
        stop_ids=stop_ids,
    )
