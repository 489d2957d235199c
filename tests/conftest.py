"""What several test files share."""

from __future__ import annotations

import asyncio
import signal
import warnings

import pytest
import torch
import uvloop
from tokenizers import Tokenizer

from chairlift.default_model import GGUF_NAME
from chairlift.engine_args import EngineArgs
from chairlift.hub import resolve_model
from chairlift.testing import ScriptedExecutor

TABLES = pytest.StashKey[dict[str, list[str]]]()
"""Tables that tests leave for the end of the run, by their titles."""


@pytest.fixture
def print_at_end(request):
    """Return a function of a title and lines, which are printed when all tests are over."""

    def leave(title, lines):
        request.config.stash.setdefault(TABLES, {})[title] = lines

    return leave


def pytest_terminal_summary(terminalreporter, config):
    """Print the tables that tests left."""
    for title, lines in config.stash.get(TABLES, {}).items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(params=[1, 2], ids=["1-step", "2-steps"])
def steps_in_flight(request, monkeypatch):
    """Run the test as usual, and with run-ahead in every engine that does not say otherwise."""
    if request.param == 2:
        for cls, option, value in (
            (EngineArgs, "max_in_flight_steps", 2),
            (ScriptedExecutor, "launches_ahead", True),
        ):
            monkeypatch.setitem(cls.__init__.__kwdefaults__, option, value)
    return request.param


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Ctrl-C interrupts, also where the tests run in the background.

    There a shell has it ignored, which the processes that tests start would inherit.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model_directory():
    """The default model, fetched and converted on the first use."""
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def tokenizer(model_directory):
    return Tokenizer.from_file(str(model_directory / "tokenizer.json"))


@pytest.fixture(scope="session")
def original_model(model_directory, tmp_path_factory):
    """The published GGUF as transformers itself reads it, in fp32."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

    alone = tmp_path_factory.mktemp("gguf")  # so that no converted file is read
    (alone / GGUF_NAME).symlink_to(model_directory / GGUF_NAME)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(
            alone, gguf_file=GGUF_NAME, dtype=torch.float32
        ).eval()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine function on a fresh loop of each kind; nothing may hang."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def go(main):
        async def limited():
            async with asyncio.timeout(300):
                await main()

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(limited())

    return go
