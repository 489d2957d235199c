"""Compilation by NVRTC: no GPU, no nvcc and no CUDA headers are needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.cuda_kernels.catalogue import header_names, read_source
from chairlift.errors import ChairliftError

_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--restrict", "--extra-device-vectorization")


class CudaCompileError(ChairliftError):
    """NVRTC refused a source; the message is its log."""

    code = "cuda_compile"


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """What one kernel takes of the device, as the assembler says."""

    registers: int
    """Of each thread."""
    spilled_bytes: int
    """Of each thread, stored to and loaded from local memory for lack of registers."""
    stack_bytes: int
    """Of each thread."""
    shared_bytes: int
    """Of each block, besides what the launch asks for."""


@dataclass(frozen=True, slots=True)
class CompiledSource:
    """A source with its instantiations as machine code of one architecture."""

    cubin: bytes
    symbols: dict[str, str]
    """Name expression -> symbol in the cubin."""
    usage: dict[str, KernelUsage]
    """Name expression -> what that kernel takes."""


def toolchain() -> tuple[str, ...]:
    """Return what decides the machine code besides sources: NVRTC's version, the options."""
    from cuda.bindings import nvrtc  # noqa: PLC0415 - an optional dependency

    _, major, minor = nvrtc.nvrtcVersion()
    return (f"NVRTC {major}.{minor}", *_OPTIONS)


def compile_source(
    name: str, text: str, instantiations: Sequence[str], architecture: str
) -> CompiledSource:
    """Compile ``text`` for one architecture (``"sm_90"``).

    Raises:
        CudaCompileError: the source does not compile.
    """
    from cuda.bindings import nvrtc  # noqa: PLC0415 - an optional dependency

    headers = header_names()
    contents = [read_source(header).encode() for header in headers]
    _, program = nvrtc.nvrtcCreateProgram(
        text.encode(),
        f"{name}.cu".encode(),
        len(headers),
        contents,
        [header.encode() for header in headers],
    )
    try:
        for expression in instantiations:
            nvrtc.nvrtcAddNameExpression(program, expression.encode())
        options = [f"--gpu-architecture={architecture}".encode()]
        options += [option.encode() for option in _OPTIONS]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = _fresh_bytes(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        text_of_log = log.rstrip(b"\0").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CudaCompileError(f"{name}.cu does not compile for {architecture}:\n{text_of_log}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = _fresh_bytes(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        symbols = {
            expression: nvrtc.nvrtcGetLoweredName(program, expression.encode())[1].decode()
            for expression in instantiations
        }
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    usage = read_usage(text_of_log)
    return CompiledSource(
        cubin, symbols, {expression: usage[symbol] for expression, symbol in symbols.items()}
    )


def _fresh_bytes(size: int) -> bytes:
    """Bytes for NVRTC to write into: never those of length 0 and 1, which Python shares."""
    return b"\0" * max(size, 2)


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def read_usage(log: str) -> dict[str, KernelUsage]:
    """Read what the assembler says of each symbol with ``-v``."""
    usage: dict[str, KernelUsage] = {}
    symbol, stack, spilled = "", 0, 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            symbol, stack, spilled = entry[1], 0, 0
        elif frame := _STACK.search(line):
            stack, spilled = int(frame[1]), int(frame[2]) + int(frame[3])
        elif used := _USED.search(line):
            usage[symbol] = KernelUsage(int(used[1]), spilled, stack, int(used[2] or 0))
    return usage
