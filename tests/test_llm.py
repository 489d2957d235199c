"""``LLM`` above a scripted model: results, order, refusals, counts, preemption."""

from __future__ import annotations

import time

import pytest

from chairlift import (
    LLM,
    ContextLengthError,
    InvalidRequestError,
    SamplingParams,
)
from chairlift.errors import ConfigError, TokenizerError
from chairlift.llm import _Call
from chairlift.testing import ScriptedExecutor

pytestmark = pytest.mark.usefixtures("steps_in_flight")


def make(executor=None, **options):
    executor = executor or ScriptedExecutor()
    return LLM(executor=executor, **options)


def generate(llm, prompts, params=None):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(count, **options):
    return SamplingParams(max_tokens=count, **options)


@pytest.fixture
def executor():
    return ScriptedExecutor(
        scripts={
            "hello": "world",
            "long": "x" * 400,
            "utf8": "grüße 👋 ok",
            "stops": "one STOP two",
        },
        num_kv_blocks=2_048,
    )


@pytest.fixture
def llm(executor):
    with make(executor) as llm:
        yield llm


def test_results_in_order_whatever_ends_first(llm, executor):
    prompts = [f"prompt {number}" for number in range(40)]
    params = [tokens(1 + (number * 7) % 23) for number in range(40)]
    results = generate(llm, prompts, params)
    assert [result.prompt for result in results] == prompts
    for prompt, own, result in zip(prompts, params, results, strict=True):
        (answer,) = result.outputs
        assert answer.token_ids == executor.expected(prompt, own.max_tokens)
        assert answer.text == llm.tokenizer.decode(answer.token_ids)
        assert answer.finish_reason == "length"
        assert result.finished
        assert result.error is None
    assert len({result.request_id for result in results}) == 40
    assert max(step.num_decodes for step in executor.steps) > 20


def test_forms_of_prompts(llm):
    text, ids = "hello!", list(b"hello!")
    single = [
        text,
        ids,
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"prompt": text, "cache_salt": "a"},
    ]
    for prompt in single:
        (result,) = generate(llm, prompt, tokens(20))
        assert result.outputs[0].text == "world"
        assert result.prompt_token_ids == ids
    results = generate(llm, single, tokens(20))
    assert [result.outputs[0].text for result in results] == ["world"] * len(single)
    assert [result.prompt for result in results] == [text, None, text, None, text]
    assert generate(llm, []) == []


def test_default_parameters_are_vllms(llm):
    (result,) = generate(llm, "anything")
    assert len(result.outputs[0].token_ids) == 16


class Fed(ScriptedExecutor):
    """Each step lasts until the caller has filled the queue again, or has nothing more."""

    llm: LLM
    num_prompts: int
    room: int
    """In the queue."""
    patience: float = 30.0
    """Seconds to wait, once."""

    def execute(self, plan):
        begin = time.monotonic()
        while not self.is_fed():
            if time.monotonic() - begin > self.patience:
                self.patience = 0.0
                raise TimeoutError("the queue is not filled")
            time.sleep(0.0005)
        return super().execute(plan)

    def is_fed(self):
        metrics = self.llm.metrics()
        taken = metrics["submitted"] - metrics["rejected"]
        return taken == self.num_prompts or metrics["queued"] >= self.room


def test_many_more_prompts_than_the_queue_has_room(steps_in_flight):
    executor = Fed()
    with make(executor, max_queued_requests=3, max_num_seqs=4) as llm:
        executor.llm, executor.num_prompts, executor.room = llm, 200, 3
        prompts = [f"number {number}" for number in range(200)]
        results = generate(llm, prompts, tokens(5))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.outputs[0].token_ids == executor.expected(prompt, 5)
        metrics = llm.metrics()
        # A prompt that found no place was rejected and waited outside.
        assert metrics["submitted"] - metrics["rejected"] == metrics["finished"] == 200
        # Feeding one in, one out would not keep four rows busy.
        steady = [step for step in executor.steps if step.num_prefills + step.num_decodes == 4]
        # With run-ahead a row is empty for the step that was planned before its answer had landed.
        assert len(steady) > (240 if steps_in_flight == 1 else 190)


def test_the_queue_is_filled_as_fast_as_it_empties():
    executor = Fed()
    with make(executor, max_queued_requests=8, max_num_seqs=8) as llm:
        executor.llm, executor.num_prompts, executor.room = llm, 400, 8
        results = generate(llm, ["one token"] * 400, tokens(1))
    assert all(result.error is None for result in results)
    # At best 50 steps of eight; one by one it would be nearly 400.
    assert len(executor.steps) <= 52


def test_one_prompt_of_room(executor):
    with make(executor, max_queued_requests=1, max_num_seqs=8) as llm:
        results = generate(llm, ["hello"] * 30, tokens(9))
        assert [result.outputs[0].text for result in results] == ["world"] * 30


# C20: counts and limits are exact.


@pytest.mark.parametrize("count", [1, 2, 5])
def test_exactly_max_tokens(llm, count):
    (result,) = generate(llm, "long", tokens(count))
    assert len(result.outputs[0].token_ids) == count
    assert result.outputs[0].text == "x" * count
    assert result.outputs[0].finish_reason == "length"
    assert result.stats.num_output_tokens == count


def test_eos_as_the_last_allowed_token_is_a_stop(llm):
    (result,) = generate(llm, "hello", tokens(6))
    (answer,) = result.outputs
    assert answer.text == "world"
    assert answer.token_ids == [*b"world", 257]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    (result,) = generate(llm, "hello", tokens(5))
    assert result.outputs[0].finish_reason == "length"


def test_stop_string_completed_by_the_last_allowed_token(llm):
    (result,) = generate(llm, "stops", tokens(8, stop="STOP"))
    (answer,) = result.outputs
    assert answer.text == "one "
    assert len(answer.token_ids) == 8
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "STOP")
    (result,) = generate(llm, "stops", tokens(7, stop="STOP"))
    (answer,) = result.outputs
    assert (answer.text, answer.finish_reason) == ("one STO", "length")


def test_stop_string_kept_or_not(llm):
    (cut,) = generate(llm, "stops", tokens(30, stop=["nope", " two"]))
    assert (cut.outputs[0].text, cut.outputs[0].stop_reason) == ("one STOP", " two")
    (kept,) = generate(llm, "stops", tokens(30, stop=["STOP"], include_stop_str_in_output=True))
    assert kept.outputs[0].text == "one STOP"


def test_stop_token(llm):
    (result,) = generate(llm, "stops", tokens(30, stop_token_ids=[ord("S")]))
    (answer,) = result.outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("one ", "stop", ord("S"))
    assert answer.token_ids == [*b"one S"]


def test_min_tokens_outlasts_an_early_stop(llm):
    params = tokens(40, min_tokens=8, stop=["on", "two"])
    (result,) = generate(llm, "stops", params)
    (answer,) = result.outputs
    assert (answer.text, answer.stop_reason) == ("one STOP ", "two")


def test_ignore_eos(llm):
    (result,) = generate(llm, "hello", tokens(9, ignore_eos=True))
    (answer,) = result.outputs
    assert len(answer.token_ids) == 9
    assert (answer.text, answer.finish_reason) == ("world", "length")
    (result,) = generate(llm, "hello", tokens(9, ignore_eos=True, skip_special_tokens=False))
    assert result.outputs[0].text == "world<eos><eos><eos><eos>"


def test_max_tokens_is_cut_to_the_room(executor):
    with make(executor, max_model_len=20) as llm:
        for limit in (None, 10_000):
            (result,) = generate(llm, "long", tokens(limit))
            assert len(result.outputs[0].token_ids) == 16
            assert result.outputs[0].finish_reason == "length"


def test_split_characters_come_out_whole(llm):
    (result,) = generate(llm, "utf8", tokens(60))
    assert result.outputs[0].text == "grüße 👋 ok"


def test_several_answers(llm, executor):
    (result,) = generate(llm, "many answers", tokens(20, n=5))
    assert [answer.index for answer in result.outputs] == [0, 1, 2, 3, 4]
    for answer in result.outputs:
        assert answer.token_ids == executor.expected("many answers", 20, child=answer.index)
    assert len({answer.text for answer in result.outputs}) == 5
    assert any(step.num_copies for step in executor.steps)
    assert result.stats.num_output_tokens == 100


def test_logprobs_come_through(llm):
    (result,) = generate(llm, "hello", tokens(20, logprobs=2))
    (answer,) = result.outputs
    assert len(answer.logprobs) == len(answer.token_ids) == 6
    for token, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(position)) == token
        assert position[token].logprob == -0.5
        assert position[token].rank == 1
        second = position[(token + 1) % 258]
        assert (second.logprob, second.rank) == (-1.0, 2)
    assert answer.logprobs[0][ord("w")].decoded_token == "w"
    assert answer.cumulative_logprob == -3.0


def test_only_the_sampled_tokens_logprob(llm):
    plain, asked = generate(llm, ["hello", "hello"], [tokens(9), tokens(9, logprobs=0)])
    assert plain.outputs[0].logprobs is None
    assert [list(position) for position in asked.outputs[0].logprobs] == [
        [token] for token in asked.outputs[0].token_ids
    ]


def test_seeds_are_drawn_once_and_recorded():
    def seeds(seed):
        seen = []
        executor = ScriptedExecutor(default=lambda sample: seen.append(sample.seed) or 97)
        with make(executor, seed=seed) as llm:
            results = generate(llm, ["a", "b"], [tokens(1), tokens(1, seed=7)])
        assert [result.seed for result in results] == seen
        return seen

    first, second = seeds(1), seeds(1)
    assert first == second
    assert first[1] == 7
    assert seeds(2)[0] != first[0]


def test_prefix_cache_is_counted(llm):
    prompt = "a prompt of more than one block of sixteen"
    (cold,) = generate(llm, prompt, tokens(4))
    (warm,) = generate(llm, prompt, tokens(4))
    (salted,) = generate(llm, {"prompt": prompt, "cache_salt": "x"}, tokens(4))
    assert (cold.num_cached_tokens, warm.num_cached_tokens, salted.num_cached_tokens) == (0, 32, 0)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids == salted.outputs[0].token_ids


def test_chat(llm):
    messages = [{"role": "user", "content": "hello"}]
    one = llm.chat(messages, tokens(4), use_tqdm=False)
    two = llm.chat([messages, messages], tokens(4), use_tqdm=False)
    assert llm.tokenizer.decode(one[0].prompt_token_ids) == "user: hello\nassistant: "
    assert [result.outputs[0].text for result in two] == [one[0].outputs[0].text] * 2


def test_a_refused_conversation_is_named(llm):
    good = [{"role": "user", "content": "hello"}]

    class Refusing(type(llm.tokenizer)):
        def apply_chat_template(self, messages, add_generation_prompt=True, **_kwargs):
            if messages[0]["role"] == "bad":
                raise TokenizerError("message 0 is bad", code="bad_chat_messages")
            return super().apply_chat_template(messages, add_generation_prompt)

    llm._engine.tokenizer = Refusing()
    bad = [{"role": "bad", "content": "hello"}]
    with pytest.raises(TokenizerError, match=r"^conversation 1: message 0 is bad$") as caught:
        llm.chat([good, bad], use_tqdm=False)
    assert caught.value.code == "bad_chat_messages"
    with pytest.raises(TokenizerError, match=r"^message 0 is bad$"):
        llm.chat(bad, use_tqdm=False)


def test_chat_template_kwargs(llm):
    messages = [{"role": "user", "content": "hello"}]
    further = {"add_generation_prompt": False, "enable_thinking": False}
    (result,) = llm.chat(messages, tokens(1), use_tqdm=False, chat_template_kwargs=further)
    assert llm.tokenizer.decode(result.prompt_token_ids) == "user: hello\n"
    for name in ("messages", "self", 5):
        with pytest.raises(
            InvalidRequestError, match=f"chat_template_kwargs must not have {name!r}"
        ):
            llm.chat(messages, use_tqdm=False, chat_template_kwargs={name: 1})


def test_the_time_per_token_of_several_answers_is_not_told(llm):
    one, three = generate(llm, ["one", "three"], [tokens(9), tokens(9, n=3)])
    assert one.stats.tpot > 0
    assert three.stats.num_output_tokens == 27
    assert three.stats.tpot is None


def test_room_that_the_queue_did_not_have_is_kept():
    executor = ScriptedExecutor()
    executor.hold()
    with make(executor, max_queued_requests=3, max_num_seqs=1) as llm:
        call = _Call(llm._engine, llm._prepare(["a"] * 8, tokens(2), 0, {}), lambda _: None)
        call.room = 1
        call.feed()
        executor.wait_held()
        assert (call.room, llm.metrics()["live"]) == (0, 1)
        call.room = 5
        call.feed()
        assert (call.room, llm.metrics()["live"]) == (2, 4)
        executor.release()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"priority": [1, 2, 3]},
            "there are 2 prompts but 3 priority; give one for all, or one for",
        ),
        ({"priority": [1, "2"]}, "prompt 1: priority is '2'; it must be an integer"),
        ({"tenant": 3}, "prompt 0: tenant is 3; it must be text of 1 to 128 bytes"),
        ({"deadline": -1}, "prompt 0: deadline is -1; it must be a number of seconds"),
    ],
)
def test_who_asks_is_checked_before_anything_runs(llm, executor, options, message):
    for call in (llm.generate, lambda prompts, **rest: llm.chat(CHATS, **rest)):
        with pytest.raises(InvalidRequestError, match=message):
            call(["a", "b"], use_tqdm=False, **options)
    assert not executor.steps


CHATS = [[{"role": "user", "content": content}] for content in "ab"]


# Refusals: before anything runs, with the numbers, and nothing is left.


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("x" * 64, None, ContextLengthError, "prompt 1: the prompt is too long: it has 64 tokens"),
        ([], None, InvalidRequestError, "prompt 1: the prompt is empty"),
        (
            [1, 258],
            None,
            InvalidRequestError,
            "token id 258 in prompt is outside the vocabulary of 258",
        ),
        ([1, -2], None, InvalidRequestError, "token ids are integers from 0; -2 is not"),
        (
            {"text": "a"},
            None,
            InvalidRequestError,
            "one of 'prompt', 'prompt_token_ids' and 'messages'",
        ),
        (5.0, None, InvalidRequestError, "text or a list of token ids, not float"),
        (
            "a",
            {"temperature": 3.0},
            InvalidRequestError,
            "temperature is 3; it must be from 0 to 2",
        ),
        ("a", {"top_p": 0.0}, InvalidRequestError, "top_p is 0"),
        ("a", {"n": 0}, InvalidRequestError, "n is 0; it must be from 1"),
        ("a", {"max_tokens": 0}, InvalidRequestError, "max_tokens is 0; it must be at least 1"),
        ("a", {"min_tokens": 9, "max_tokens": 8}, InvalidRequestError, "min_tokens is 9"),
        ("a", {"stop": [""]}, InvalidRequestError, "stop string 0 is empty"),
        ("a", {"stop_token_ids": [999]}, InvalidRequestError, "token id 999 in stop_token_ids"),
        ("a", {"logit_bias": {5: 101.0}}, InvalidRequestError, "logit_bias is 101"),
        (
            "a",
            {"logprobs": 21},
            InvalidRequestError,
            "logprobs is 21, .* 20 at most; .* max_logprobs",
        ),
    ],
)
def test_a_bad_prompt_raises_before_anything_runs(executor, prompt, params, error, message):
    with make(executor, max_model_len=64) as llm:
        with pytest.raises(error, match=message) as caught:
            generate(llm, ["good", prompt], [tokens(4), SamplingParams(**(params or {}))])
        assert caught.value.code
        assert isinstance(caught.value, ValueError)
        assert not executor.steps
        assert llm.metrics()["submitted"] == 0
        assert generate(llm, "hello", tokens(9))[0].outputs[0].text == "world"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", float("inf")),
        ("top_k", 1.5),
        ("top_k", -2),
        ("n", "2"),
        ("n", 2**40),
        ("max_tokens", -1),
        ("max_tokens", 4.0),
        ("min_tokens", None),
        ("seed", "x"),
        ("seed", 2**63),
        ("stop", 5),
        ("stop", [b"x"]),
        ("stop", ["\ud800"]),
        ("stop_token_ids", "abc"),
        ("stop_token_ids", [-1]),
        ("logprobs", True),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"1": 2.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: 10**400}),
        ("temperature", 10**400),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
    ],
)
def test_wrong_types_name_the_field(field, value):
    with pytest.raises(InvalidRequestError, match=f"^{field} is ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.code == "invalid_parameter"


def test_one_set_of_parameters_for_each(llm):
    with pytest.raises(InvalidRequestError, match="2 prompts but 1 sampling_params"):
        generate(llm, ["a", "b"], [tokens(3)])
    with pytest.raises(InvalidRequestError, match="must be SamplingParams, not dict"):
        generate(llm, ["a"], {"max_tokens": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, r"max_num_seqs \(64\) is above"),
        ({"block_size": 8}, "block_size is 8, but the executor's is 16"),
        (
            {"executor": object()},
            r"executor is <object .*>; it must be a string or have launch\(\)",
        ),
        ({"executor": "no.such:Thing"}, "'no.such:Thing' cannot be loaded"),
        ({"executor": "chairlift.testing"}, "give module:Class"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(**({"executor": ScriptedExecutor()} | options))


def test_a_pool_too_small_lowers_max_model_len(caplog):
    with make(ScriptedExecutor(num_kv_blocks=4), max_model_len=500) as llm:
        assert llm.limits["max_model_len"] == 64
    assert "max_model_len is lowered from 500 to 64" in caplog.text


def test_executor_by_name():
    with LLM(executor="chairlift.testing:ScriptedExecutor", num_kv_blocks=32) as llm:
        assert llm.limits["num_kv_blocks"] == 32
        assert len(generate(llm, "a", tokens(3))[0].outputs[0].token_ids) == 3


# C30: preemption does not change what comes out.


def test_blocks_on_the_host_are_found_again():
    """More prompts than the executor has blocks for, twice: the second time the host has them."""
    texts = [f"{index} of the prompts that leave the blocks that they had" for index in range(6)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    tokens = []
    for kv_host_memory in (0, 1 << 16):
        with LLM(
            executor="chairlift.testing:ScriptedExecutor",
            num_kv_blocks=8,
            kv_host_memory=kv_host_memory,
            max_model_len=128,
        ) as llm:
            for _ in range(2):
                results = llm.generate(texts, params, use_tqdm=False)
                tokens.append([result.outputs[0].token_ids for result in results])
            metrics, limits = llm.metrics(), llm.limits
        assert limits["num_host_kv_blocks"] == kv_host_memory // (16 * 4)
        assert (metrics["offloaded_blocks"] > 0) == (kv_host_memory > 0)
        assert (metrics["restored_tokens"] > 0) == (kv_host_memory > 0)
    assert tokens == [tokens[0]] * 4


def test_preemption_changes_nothing():
    scripts = {f"{letter}utf": "grüße 👋 " * 6 for letter in "ab"} | {"c": "so STO it goes STOP no"}
    prompts = ["autf x", "butf y", "c stops", "d default", "e default", "f " * 20]
    params = [
        tokens(70, temperature=0.0),
        tokens(70, logprobs=3, seed=1),
        tokens(70, stop="STOP"),
        tokens(60, repetition_penalty=1.2),
        tokens(60, n=2),
        tokens(40),
    ]

    def run(num_kv_blocks):
        executor = ScriptedExecutor(scripts=scripts, block_size=4, num_kv_blocks=num_kv_blocks)
        with make(executor, block_size=4, max_model_len=100, seed=3) as llm:
            results = generate(llm, prompts, params)
            metrics = llm.metrics()
        outputs = [result.outputs for result in results]
        cached = [result.stats.num_preemptions for result in results]
        return outputs, cached, metrics

    roomy, _, roomy_metrics = run(512)
    tight, preemptions, tight_metrics = run(26)
    assert roomy_metrics["preemptions"] == 0
    assert tight_metrics["preemptions"] >= 4
    assert sum(count > 0 for count in preemptions) >= 2
    assert roomy == tight
    assert roomy_metrics["output_tokens"] == tight_metrics["output_tokens"]
    assert tight_metrics["used_blocks"] == 0


def test_chunked_prefill_changes_nothing():
    prompts = ["p" * 150, "q" * 90, "short"]

    def run(**options):
        executor = ScriptedExecutor()
        with make(executor, **options) as llm:
            results = generate(llm, prompts, tokens(20))
        return [result.outputs[0].token_ids for result in results], executor

    whole, _ = run()
    chunked, executor = run(long_prefill_token_threshold=16)
    assert max(step.num_tokens for step in executor.steps) <= 48
    tight, _ = run(max_num_batched_tokens=24, max_num_seqs=8)
    assert whole == chunked == tight
