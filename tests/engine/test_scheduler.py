from __future__ import annotations

import time

import numpy as np
import pytest

from engine.backend import Capabilities
from engine.batch import FROM_DEVICE, StepResult
from engine.request import FinishReason
from tests.engine.driver import EOS, Driver

UNMIXED = Capabilities(mixed_batches=False)


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def prefills(driver: Driver) -> list[str]:
    """Who prefilled, in order."""
    rows = [row for step in driver.batches for row in zip(step.rows, step.batch.query_lens, strict=True)]
    return [state.request_id for state, query_len in rows if query_len > 1]


def test_prompts_longer_than_the_budget_are_split_and_decode_rows_come_first() -> None:
    driver = Driver(max_num_batched_tokens=16)
    driver.submit(prompt(10))
    driver.submit(prompt(30, start=500))
    driver.run()
    batches = [step.batch for step in driver.batches]
    assert [batch.query_lens.tolist() for batch in batches[:3]] == [[10, 6], [1, 15], [1, 9]]
    assert [batch.samples.tolist() for batch in batches[:3]] == [[True, False], [True, False], [True, True]]
    assert driver.tokens("r0") == driver.expected("r0")
    assert driver.tokens("r1") == driver.expected("r1")


def test_with_overlap_the_next_input_is_taken_from_the_device() -> None:
    driver = Driver()
    driver.submit(prompt(5), max_tokens=4)
    driver.run()
    assert [step.batch.token_ids.tolist() for step in driver.batches[1:]] == [[FROM_DEVICE]] * 3


def test_without_overlap_the_host_gives_the_next_input() -> None:
    driver = Driver(overlap=False)
    driver.submit(prompt(5), max_tokens=4)
    driver.run()
    assert [step.batch.token_ids.tolist() for step in driver.batches[1:]] == [[t] for t in driver.expected("r0")[:-1]]


def test_no_step_is_spent_on_a_request_that_ends_by_length() -> None:
    driver = Driver()
    driver.submit(prompt(5), max_tokens=3)
    driver.run()
    assert len(driver.batches) == 3
    assert driver.reason("r0") is FinishReason.LENGTH


def test_a_request_ends_at_max_model_len() -> None:
    driver = Driver(max_model_len=20)
    driver.submit(prompt(15), max_tokens=100)
    driver.run()
    assert len(driver.tokens("r0")) == 5
    assert driver.reason("r0") is FinishReason.LENGTH
    driver.assert_empty()


def test_max_tokens_0_computes_the_prompt_and_samples_nothing() -> None:
    driver = Driver()
    driver.submit(prompt(9), max_tokens=0, prompt_logprobs=1)
    driver.run()
    (output,) = driver.outputs["r0"]
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.LENGTH)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 9


def test_a_stop_token_ends_a_request_and_its_row_in_flight_is_ignored() -> None:
    driver = Driver()
    stop = driver.expected(driver.submit(prompt(5)))[3]
    driver.submit(prompt(5), stop_token_ids=(stop,))
    driver.run()
    assert driver.tokens("r1") == driver.expected("r0")[:4]
    assert (driver.reason("r1"), driver.outputs["r1"][-1].stop_token_id) == (FinishReason.STOP, stop)
    assert driver.reason("r0") is FinishReason.LENGTH


def test_stop_tokens_do_not_count_before_min_tokens() -> None:
    driver = Driver()
    stop = driver.expected(driver.submit(prompt(5)))[3]
    driver.submit(prompt(5), stop_token_ids=(stop,), min_tokens=5)
    driver.run()
    assert driver.tokens("r1") == driver.tokens("r0")
    (state,) = driver.batches[0].batch.slot_states
    assert state.stop_ids == tuple(sorted((EOS, stop)))


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    driver = Driver(eos_every=3)
    driver.submit(prompt(5), max_tokens=50, ignore_eos=True)
    driver.submit(prompt(5), max_tokens=50)
    driver.run()
    assert len(driver.tokens("r0")) == 50
    assert EOS in driver.tokens("r0")
    assert (driver.reason("r1"), driver.tokens("r1")[-1]) == (FinishReason.STOP, EOS)


@pytest.mark.parametrize("length", [15, 16, 17, 24])
def test_a_repeated_prompt_is_taken_from_the_cache_but_for_its_last_token(length: int) -> None:
    driver = Driver()
    driver.submit(prompt(length))
    driver.run()
    driver.submit(prompt(length))
    driver.run()
    cached = (length - 1) // 8 * 8
    assert {output.num_cached_tokens for output in driver.outputs["r1"]} == {cached}
    assert driver.batches[-16].batch.positions.tolist() == list(range(cached, length))
    assert driver.tokens("r1") == driver.tokens("r0")
    assert driver.metrics.prefix_cache_hits == cached
    assert driver.metrics.prefix_cache_queries == 2 * length


def test_generated_tokens_are_cached_too() -> None:
    driver = Driver()
    driver.submit(prompt(10), max_tokens=30)
    driver.run()
    driver.submit(prompt(10) + driver.tokens("r0"))
    driver.run()
    assert driver.outputs["r1"][0].num_cached_tokens == 32


def test_another_salt_shares_nothing() -> None:
    driver = Driver()
    driver.submit(prompt(32), cache_salt="a")
    driver.run()
    driver.submit(prompt(32), cache_salt="b")
    driver.run()
    assert driver.outputs["r1"][0].num_cached_tokens == 0


def test_the_cache_can_be_turned_off() -> None:
    driver = Driver(enable_prefix_cache_hbm=False)
    for _ in range(2):
        driver.submit(prompt(32))
        driver.run()
    assert driver.outputs["r1"][0].num_cached_tokens == 0
    assert driver.metrics.prefix_cache_queries == 0


def test_prompt_logprobs_come_once_for_every_token_whatever_is_cached() -> None:
    driver = Driver(max_num_batched_tokens=16)
    driver.submit(prompt(40))
    driver.run()
    driver.submit(prompt(40), prompt_logprobs=3, logprobs=2)
    driver.run()
    first, *others = driver.outputs["r1"]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [item.token_id for item in first.prompt_logprobs[1:] if item] == prompt(40)[1:]
    assert all(len(item.top) == 3 for item in first.prompt_logprobs[1:] if item)
    assert all(output.prompt_logprobs is None for output in others)
    assert [item.token_id for output in driver.outputs["r1"] for item in output.logprobs or ()] == driver.tokens("r1")
    assert first.num_cached_tokens == 0


def test_the_latest_admitted_request_is_preempted_and_resumed_before_anybody_who_waits() -> None:
    driver = Driver(num_blocks=10, enable_prefix_cache_hbm=False)
    for index in range(3):
        driver.submit(prompt(20, start=100 * (index + 1)), max_tokens=40)
    driver.step()
    assert driver.scheduler.num_waiting == 1  # 3 blocks each, and one in reserve
    driver.run()
    assert prefills(driver)[:4] == ["r0", "r1", "r1", "r2"]
    assert driver.metrics.num_preemptions >= 1
    assert all(driver.tokens(name) == driver.expected(name) for name in driver.states)
    driver.assert_empty()


def test_a_preempted_request_waits_for_its_token_in_flight_and_keeps_it() -> None:
    driver = Driver()
    driver.submit(prompt(20))
    for _ in range(3):
        driver.step()
    driver.scheduler._preempt(driver.states["r0"])
    assert driver.scheduler.schedule() is None
    driver.run()
    assert driver.tokens("r0") == driver.expected("r0")


def test_a_request_whose_last_step_is_dispatched_is_never_preempted() -> None:
    driver = Driver(num_blocks=7, enable_prefix_cache_hbm=False)
    driver.submit(prompt(16), max_tokens=30)
    driver.submit(prompt(24, start=500), max_tokens=9)
    driver.run()
    assert prefills(driver) == ["r0", "r1", "r0"]  # r0 needed a block when r1's last step was in flight
    assert all(driver.tokens(name) == driver.expected(name) for name in driver.states)


def test_abort_frees_everything_at_once_in_every_state() -> None:
    for steps in range(12):
        driver = Driver(num_blocks=10, max_num_batched_tokens=16)
        for index in range(3):
            driver.submit(prompt(30, start=100 * (index + 1)), max_tokens=40)
        for _ in range(steps):
            driver.step()
        for name in ("r2", "r0", "r1"):
            driver.abort(name)
            driver.assert_consistent()
        driver.assert_empty()
        driver.run()
        assert all(driver.reason(name) is None for name in driver.states)


def test_a_slot_freed_in_flight_does_not_mix_up_its_next_owner() -> None:
    driver = Driver(max_decode_seqs=1, max_num_batched_tokens=16)
    driver.submit(prompt(5), max_tokens=40)
    for _ in range(5):
        driver.step()
    driver.abort("r0")
    driver.submit(prompt(6, start=300))
    driver.run()
    assert driver.tokens("r1") == driver.expected("r1")


def test_a_resubmitted_request_goes_on_where_it_was() -> None:
    driver = Driver()
    driver.submit(prompt(12), max_tokens=20, seed=7, temperature=1.0)
    driver.run()
    whole = driver.tokens("r0")
    driver.submit(prompt(12), max_tokens=20, seed=7, temperature=1.0, output_token_ids=tuple(whole[:9]), min_tokens=3)
    driver.run()
    assert driver.tokens("r1") == whole[9:]
    sampling = driver.batches[-1].batch.sampling
    assert (sampling.prompt_len.tolist(), sampling.min_len.tolist()) == ([12], [15])


def test_slot_state_is_sent_at_every_admission_with_all_known_tokens() -> None:
    driver = Driver(num_blocks=8, enable_prefix_cache_hbm=False)
    driver.submit(prompt(16), max_tokens=40)
    driver.submit(prompt(16, start=300), max_tokens=40, presence_penalty=1.0, logit_bias={5: 1.0}, bad_words=((7, 8),))
    driver.run()
    states = [state for step in driver.batches for state in step.batch.slot_states]
    assert driver.metrics.num_preemptions == len(states) - 1 > 0
    for state in states:
        tokens = prompt(16, start=300) + driver.tokens("r1")
        assert state.token_ids.tolist() == tokens[: len(state.token_ids)]
        assert (state.logit_bias, state.bad_words, state.stop_ids) == ({5: 1.0}, ((7, 8),), ())
    assert len(states[0].token_ids) == 16 < len(states[1].token_ids)


def test_sampling_arrays_follow_their_rows() -> None:
    driver = Driver()
    for index in range(4):
        driver.submit(prompt(5, start=100 * index + 100), max_tokens=4 + index, top_k=index, seed=index << 40 | index)
    driver.run()
    for step in driver.batches:
        sampling = [state.request.sampling for state in step.rows]
        assert step.batch.sampling.top_k.tolist() == [item.top_k for item in sampling]
        assert [(high << 32) + low for high, low in step.batch.sampling.seed.tolist()] == [
            item.seed for item in sampling
        ]


def test_arrays_of_a_dispatched_batch_never_change() -> None:
    driver = Driver(num_blocks=20)
    for index in range(4):
        driver.submit(prompt(20, start=100 * index + 100), max_tokens=40)
    copies = []
    while driver.step():
        batch = driver.batches[-1].batch
        copies.append((batch, batch.token_ids.copy(), batch.kv_lens.copy(), batch.block_tables.copy()))
    for batch, token_ids, kv_lens, block_tables in copies:
        assert np.array_equal(batch.token_ids, token_ids)
        assert np.array_equal(batch.kv_lens, kv_lens)
        assert np.array_equal(batch.block_tables, block_tables)


def test_without_chunked_prefill_prompts_are_whole_and_steps_are_not_mixed() -> None:
    driver = Driver(enable_chunked_prefill=False, max_num_batched_tokens=32)
    for length in (20, 10, 30):
        driver.submit(prompt(length, start=length * 100))
    driver.run()
    prefills = [step.batch.query_lens.tolist() for step in driver.batches if not step.batch.is_decode_only]
    assert prefills == [[20, 10], [30]]
    assert all(driver.tokens(name) == driver.expected(name) for name in driver.states)


def test_a_backend_without_mixed_batches_decodes_between_prefills() -> None:
    driver = Driver(capabilities=UNMIXED, max_num_batched_tokens=16)
    driver.submit(prompt(5))
    driver.step()
    driver.submit(prompt(40, start=400))
    driver.run()
    kinds = [step.batch.is_decode_only for step in driver.batches[:6]]
    assert kinds == [False, True, False, True, False, True]


def test_row_limits_hold() -> None:
    driver = Driver(max_decode_seqs=3, max_prefill_seqs=2)
    for index in range(7):
        driver.submit(prompt(5, start=index * 50 + 50))
    driver.run()
    assert max(step.batch.num_rows for step in driver.batches) == 3
    assert max(int((step.batch.query_lens > 1).sum()) for step in driver.batches) == 2


def test_a_decode_step_of_64_rows_costs_the_host_less_than_a_millisecond() -> None:
    driver = Driver(max_decode_seqs=64, num_blocks=2000, max_num_batched_tokens=1024)
    for index in range(64):
        driver.submit(prompt(16, start=100 + index), max_tokens=100)
    costs = []
    previous = None
    for step in range(100):
        start = time.thread_time()
        scheduled = driver.scheduler.schedule()
        assert scheduled is not None
        if previous is not None:
            tokens = np.full(previous.batch.num_rows, 1000, np.int32)
            driver.scheduler.collect(previous, StepResult(step=step - 1, token_ids=tokens))
        costs.append(time.thread_time() - start)
        previous = scheduled
    assert float(np.median(costs)) < 0.001
