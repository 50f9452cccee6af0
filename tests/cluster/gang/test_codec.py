"""What goes over a gang's lines: everything that a step consists of."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from backends.jax.idle import idle_batch
from cluster.gang import codec, wire
from engine.batch import LogprobArrays, SamplingArrays, SlotState, StepBatch


def names(record: type) -> set[str]:
    return {field.name for field in fields(record)}


def test_no_field_of_a_step_is_forgotten() -> None:
    assert names(StepBatch) == {"step", "sampling", "slot_states", *codec._BATCH}
    assert names(SamplingArrays) == set(codec._SAMPLING)
    assert names(LogprobArrays) == set(codec._LOGPROBS)


def test_a_slots_state_arrives_as_it_left() -> None:
    state = SlotState(
        slot=3, token_ids=np.array([5, 6], np.int32), logit_bias={7: 0.5}, bad_words=((1, 2),), stop_ids=(9,)
    )
    assert all(getattr(state, field.name) for field in fields(state) if field.name != "token_ids")  # none is a default
    batch = replace(idle_batch(), slot_states=(state,))
    payload = codec.pack_batch(batch)
    message = wire.Message(kind=wire.Kind.STEP, number=1, payload=payload, checksum=wire.checksum(payload))
    [arrived] = codec.unpack_batch(message.content()).slot_states
    for field in fields(state):
        assert np.array_equal(getattr(arrived, field.name), getattr(state, field.name)), field.name
