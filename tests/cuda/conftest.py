"""What several tests of the CUDA executor need."""

from __future__ import annotations

import pytest
import torch
from emulated_device import SCHEDULES
from emulated_launcher import EmulatedLauncher, emulate
from tiny_model import LENGTHS, VOCAB, make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The directory of a small random model."""
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def launcher():
    """Runs the operators of tensors on the CPU on the emulator."""
    launcher = EmulatedLauncher(SCHEDULES[0], guards=False)
    emulate(launcher)
    yield launcher
    emulate(None)


@pytest.fixture(scope="session")
def prompts():
    """Prompts of several lengths."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
