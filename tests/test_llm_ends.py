"""How calls of ``LLM`` end when they do not just finish: failures, shutdown, interruption, exit."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from chairlift import LLM, EngineDeadError, RequestFailedError, SamplingParams
from chairlift.testing import ScriptedExecutor

pytestmark = pytest.mark.usefixtures("steps_in_flight")


def make(executor=None, **options):
    return LLM(executor=executor or ScriptedExecutor(num_kv_blocks=2_048), **options)


def generate(llm, prompts, params=None):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(count, **options):
    return SamplingParams(max_tokens=count, **options)


def test_an_exception_fails_its_step_only(caplog):
    executor = ScriptedExecutor(raise_at_steps=[3])
    with make(executor) as llm:
        results = generate(llm, ["a", "b"], tokens(10))
        for prompt, result in zip("ab", results, strict=True):
            (answer,) = result.outputs
            assert answer.finish_reason == "error"
            assert answer.token_ids == executor.expected(prompt, 2)
            assert isinstance(result.error, RequestFailedError)
            assert str(result.error) == (
                "the executor failed step 3: RuntimeError: scripted failure"
            )
        (again,) = generate(llm, "a", tokens(10))
        assert again.outputs[0].token_ids == executor.expected("a", 10)
        metrics = llm.metrics()
        assert (metrics["failed"], metrics["failed_steps"], metrics["used_blocks"]) == (2, 1, 0)
    logged = [record for record in caplog.records if "failed in step 3" in record.getMessage()]
    assert len(logged) == 1
    assert logged[0].exc_info


def test_a_failed_row_ends_only_its_request():
    executor = ScriptedExecutor(fail_rows={"bad": 4})
    with make(executor) as llm:
        results = generate(llm, ["good 1", "bad", "good 2"], tokens(10))
        for result in (results[0], results[2]):
            assert result.outputs[0].token_ids == executor.expected(result.prompt, 10)
        assert results[1].outputs[0].finish_reason == "error"
        assert results[1].outputs[0].token_ids == executor.expected("bad", 4)
        assert isinstance(results[1].error, RequestFailedError)
        assert llm.metrics()["used_blocks"] == 0


def test_a_dead_executor_thread_is_said_clearly(caplog):
    executor = ScriptedExecutor(raise_at_steps=[3], error=SystemExit("gone"))
    with make(executor) as llm:
        with pytest.raises(EngineDeadError, match=r"the engine is dead: .* SystemExit: gone"):
            generate(llm, ["a", "b"], tokens(10))
        with pytest.raises(EngineDeadError, match="SystemExit"):
            generate(llm, ["a"], tokens(10))
    assert "the executor thread has died" in caplog.text


# Shutdown, interruption, threads.


def test_shutdown_is_idempotent_and_final():
    llm = make()
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        generate(llm, "a")
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.metrics()


def test_shutdown_ends_a_running_generate():
    executor = ScriptedExecutor(step_time=0.01)
    llm = make(executor, max_model_len=4_000)
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(generate(llm, ["a", "b"], tokens(3_000)))
    )
    thread.start()
    while len(executor.steps) < 5:
        time.sleep(0.005)
    llm.shutdown()
    thread.join(120)
    assert not thread.is_alive()
    assert [result.outputs[0].finish_reason for result in results] == ["abort", "abort"]
    for result in results:
        made = result.outputs[0].token_ids
        assert len(made) >= 3
        assert made == executor.expected(result.prompt, len(made))


def test_two_threads_may_share_it():
    executor = ScriptedExecutor()
    llm = make(executor)
    outputs = {}

    def work(name):
        outputs[name] = generate(llm, [name] * 5, tokens(30))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for name, results in outputs.items():
        assert all(r.outputs[0].token_ids == executor.expected(name, 30) for r in results)
    assert len(outputs) == 4
    llm.shutdown()


@pytest.fixture
def raises_at_ctrl_c():
    """SIGINT raises KeyboardInterrupt, whatever ran before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is not None:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("raises_at_ctrl_c")
def test_interrupt_aborts_what_is_live():
    executor = ScriptedExecutor(step_time=0.01)
    with make(executor, max_model_len=8_000) as llm:

        def interrupt():
            while len(executor.steps) < 5:
                time.sleep(0.005)
            signal.raise_signal(signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["a", "b"], tokens(8_000))  # a minute and more
        assert len(executor.steps) < 4_000
        while llm.metrics()["running_sequences"]:
            time.sleep(0.005)
        assert llm.metrics()["aborted"] == 2
        (after,) = generate(llm, "a", tokens(5))
        assert after.outputs[0].token_ids == executor.expected("a", 5)


def run_script(body):
    script = (
        "from chairlift import LLM, SamplingParams\n"
        "from chairlift.testing import ScriptedExecutor\n"
        f"{body}\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "body",
    [
        # never shut down
        "llm = LLM(executor=ScriptedExecutor())\nllm.generate('a', use_tqdm=False)",
        # dropped at once
        "LLM(executor=ScriptedExecutor())",
        # requests live at the end
        "llm = LLM(executor=ScriptedExecutor(step_time=0.01))\n"
        "p = SamplingParams(max_tokens=400)\n"
        "import threading\n"
        "threading.Thread(target=llm.generate, args=('a', p), daemon=True).start()\n"
        "import time; time.sleep(0.2)",
        # a cycle that only the collector finds
        "llm = LLM(executor=ScriptedExecutor())\nllm.me = llm\ndel llm\nimport gc; gc.collect()",
    ],
)
def test_the_interpreter_ends(body):
    done = run_script(body)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_importing_is_light():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, chairlift; chairlift.SamplingParams();"
            "print('torch' in sys.modules, 'numpy' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["False", "False"]


def test_a_dropped_engine_ends_its_threads():
    before = set(threading.enumerate())
    llm = make()
    generate(llm, "a")
    (executing,) = set(threading.enumerate()) - before
    del llm
    assert not executing.is_alive()
