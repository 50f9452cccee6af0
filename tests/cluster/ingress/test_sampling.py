"""From request fields to what the engine is told: temperatures close to nothing, words in place of token sequences."""

from __future__ import annotations

import pytest

from cluster.ingress.errors import ApiError
from cluster.ingress.protocol.base import SamplingFields
from cluster.ingress.sampling import Limits, sampling_params
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.cluster.ingress.local_client import LocalServer


@pytest.fixture
def limits(server: LocalServer, tokenizer: Tokenizer) -> Limits:
    return Limits(info=server.client.core.info, tokenizer=tokenizer)


def sampling(limits: Limits, **fields: object) -> SamplingParams:
    return sampling_params(SamplingFields.model_validate(fields), limits, max_tokens=8, seed=0)


@pytest.mark.parametrize(
    ("asked", "told"), [(0, 0.0), (5e-324, 0.0), (1e-40, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (1.0, 1.0)]
)
def test_temperatures_that_logits_cannot_be_divided_by_are_greedy(limits: Limits, asked: float, told: float) -> None:
    assert sampling(limits, temperature=asked).temperature == told


def test_as_many_bad_words_are_taken_as_said(limits: Limits) -> None:
    words = [f"Word{chr(97 + i)}" for i in range(16)]
    sequences = sampling(limits, bad_words=words).bad_words
    assert len(sequences) == len(set(sequences)) == limits.info.capabilities.bad_words == 32
    with pytest.raises(ApiError, match="has 17 words; at most 16 are supported"):
        sampling(limits, bad_words=[*words, "More"])


def test_a_bad_word_that_is_too_long_is_named(limits: Limits) -> None:
    with pytest.raises(ApiError, match="tokens; 8 is the most for a word") as raised:
        sampling(limits, bad_words=["fine", "antidisestablishmentarianism " * 4])
    assert raised.value.param == "bad_words[1]"
