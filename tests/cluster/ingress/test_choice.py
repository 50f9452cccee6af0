"""From engine outputs to text: stop strings across steps, characters of several tokens, scores that follow the text."""

from __future__ import annotations

import pytest

from cluster.ingress.choice import ChoiceText, Delta
from cluster.ingress.plan import Choice, Prompt, TextOptions
from engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from engine.text.tokenizer import Tokenizer


def outputs(ids: list[int], step: int, *, scored: bool, stop_token_id: int | None = None) -> list[RequestOutput]:
    """The ids, `step` at a time, as an engine would emit them."""
    if stop_token_id is not None:
        ids = [*ids, stop_token_id]
    found = []
    for start in range(0, len(ids), step):
        part, last = tuple(ids[start : start + step]), start + step >= len(ids)
        reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
        scores = tuple(TokenLogprobs(token_id=i, logprob=-1.0, top=((i, -1.0),)) for i in part)
        found.append(
            RequestOutput(
                request_id="r",
                token_ids=part,
                logprobs=scores if scored else None,
                finish_reason=reason if last else None,
                stop_token_id=stop_token_id if last else None,
            )
        )
    return found


def run(
    tokenizer: Tokenizer,
    ids: list[int],
    options: TextOptions,
    *,
    step: int,
    scored: bool,
    stop: int | None = None,
    min_tokens: int = 0,
) -> list[Delta]:
    sampling = SamplingParams(max_tokens=99, logprobs=0 if scored else None, min_tokens=min_tokens)
    request = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling)
    text = ChoiceText(tokenizer, Choice(index=0, prompt=Prompt(token_ids=(1,)), request=request), options)
    deltas = []
    for output in outputs(ids, step, scored=scored, stop_token_id=stop):
        deltas.append(text.push(output))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


@pytest.mark.parametrize("step", [1, 2, 5, 100])
@pytest.mark.parametrize("scored", [False, True])
def test_text_and_scores_do_not_depend_on_how_tokens_arrive(tokenizer: Tokenizer, step: int, scored: bool) -> None:
    sentence = "Grüße, 你好! 🦜 parrots — and naïve café."
    ids = tokenizer.encode(sentence, add_special_tokens=False)
    deltas = run(tokenizer, ids, TextOptions(), step=step, scored=scored)
    assert "".join(delta.text for delta in deltas) == sentence
    assert "\ufffd" not in "".join(delta.text for delta in deltas)
    assert sum(delta.num_tokens for delta in deltas) == len(ids)
    assert [token.token_id for delta in deltas for token in delta.scored] == (ids if scored else [])


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("scored", [False, True])
def test_a_stop_string_cuts_text_and_scores(tokenizer: Tokenizer, step: int, scored: bool) -> None:
    ids = tokenizer.encode("one two three four five", add_special_tokens=False)
    deltas = run(tokenizer, ids, TextOptions(stop=("hree f", "nine")), step=step, scored=scored)
    text = "".join(delta.text for delta in deltas)
    assert text == "one two t"
    assert deltas[-1].finish_reason == "stop"
    assert sum(delta.num_tokens for delta in deltas) == 4  # " four" completes it; " five" is not generated
    kept = [token for delta in deltas for token in delta.scored]
    assert all(token.offset < len(text) for token in kept)
    assert len(kept) == (3 if scored else 0)


WORDS = "one two one two one two"


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(
    ("stop", "min_tokens", "text", "num_tokens"),
    [
        (("two",), 0, "one ", 2),
        (("two",), 1, "one ", 2),
        (("two",), 2, "one two one ", 4),
        (("two",), 5, "one two one two one ", 6),
        (("two",), 6, WORDS, 6),
        (("two one",), 2, "one ", 3),  # begins early, ends late
        (("two one",), 3, "one two one ", 5),
        (("two one two one", "wo o"), 3, "one two one t", 5),
        (("wo one t", "one tw"), 3, "one t", 4),
        (("two one two three",), 3, WORDS, 6),
    ],
)
def test_stop_strings_count_behind_min_tokens(
    tokenizer: Tokenizer, step: int, scored: bool, stop: tuple[str, ...], min_tokens: int, text: str, num_tokens: int
) -> None:
    ids = tokenizer.encode(WORDS, add_special_tokens=False)
    deltas = run(tokenizer, ids, TextOptions(stop=stop), step=step, scored=scored, min_tokens=min_tokens)
    assert "".join(delta.text for delta in deltas) == text
    assert sum(delta.num_tokens for delta in deltas) == num_tokens
    assert deltas[-1].finish_reason == ("length" if text == WORDS else "stop")
    kept = [token for delta in deltas for token in delta.scored]
    assert bool(kept) == scored
    assert all(token.offset < len(text) for token in kept)


def test_what_only_looked_like_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two thr", add_special_tokens=False)
    deltas = run(tokenizer, ids, TextOptions(stop=("three",)), step=1, scored=True)
    assert "".join(delta.text for delta in deltas) == "one two thr"
    assert deltas[-1].finish_reason == "length"
    assert [token.token_id for delta in deltas for token in delta.scored] == ids


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_counts_but_shows_on_request_only(tokenizer: Tokenizer, include: bool) -> None:
    ids = tokenizer.encode("one two", add_special_tokens=False)
    stop = tokenizer.encode(" three", add_special_tokens=False)[0]
    deltas = run(tokenizer, ids, TextOptions(include_stop=include), step=1, scored=True, stop=stop)
    assert "".join(delta.text for delta in deltas) == ("one two three" if include else "one two")
    assert sum(delta.num_tokens for delta in deltas) == len(ids) + 1
    assert len([token for delta in deltas for token in delta.scored]) == len(ids) + include
    assert deltas[-1].finish_reason == "stop"
