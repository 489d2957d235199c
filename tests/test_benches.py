"""Benches run, each once and tiny: what nobody runs rots."""

from __future__ import annotations

import gzip
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fidelity
import governor
from chairlift.testing import ScriptedExecutor

ROOT = Path(__file__).parents[1]


class Slow(ScriptedExecutor):
    """10 ms a step."""

    def __init__(self, **options):
        super().__init__(step_time=0.01, **options)


SLOW = ["--executor", f"{__name__}:{Slow.__name__}"]


def test_the_boundary_benches_run():
    pytest = [sys.executable, "-m", "pytest", "-o", "addopts="]  # which skips benches
    command = [*pytest, "benches/test_boundary.py", "--benchmark-disable"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    benches = (ROOT / "benches/test_boundary.py").read_text(encoding="utf-8")
    count = len(re.findall("^def test_", benches, re.MULTILINE))
    assert f"{count} passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_long_prompt_joins_decodes(capsys):
    sizes = ["--lessons", "2", "--decodes", "2", "--prompt", "1200", "--output", "60"]
    limits = ["--settle", "0.1", "--budgets", "256", "--target", "50ms"]
    governor.main([*SLOW, *sizes, *limits, "--json"])
    governed, fixed = json.loads(capsys.readouterr().out)
    assert (governed["target_ms"], fixed["target_ms"]) == (50, None)
    for result in (governed, fixed):
        assert result["budget"] == 256
        # Five chunks at least, and two decodes that get a token beside each.
        assert result["gaps"] >= 8
        assert 10 <= result["p50_ms"] <= result["p99_ms"]
        assert result["ttft_s"] >= 0.05


def test_the_simulator_is_held_against_the_engine(tmp_path, capsys):
    trace = tmp_path / "tiny.csv.gz"
    lines = [f"{at / 10},{40 + at},{30 + at}" for at in range(10)]
    with gzip.open(trace, "wt") as file:
        file.write("\n".join(["arrival_s,input_tokens,output_tokens", *lines]))
    sizes = ["--divide", "1", "--warm-up", "2", "--lessons", "2", "--requests", "2", "--seeds", "2"]
    command = [*SLOW, "--trace", str(trace), *sizes]
    assert fidelity.main([*command, "--rates", "20", "40", "--runs", "2"]) in (0, 1)
    out, err = capsys.readouterr()
    assert re.findall(r"^(\d+) requests/s, load \d", out, re.MULTILINE) == ["20", "40"]
    rows = re.findall(r"^  (\w+) p(?:50|99) +([\d.]+) +([\d.]+) ", out, re.MULTILINE)
    judged = ["TTFT", "TTFT", "TPOT", "TPOT", "E2E", "E2E"]
    told = ["TPOT", "E2E", "TTFT"]
    assert [name for name, *_ in rows] == [*judged, *told, *told] * 2
    ways = re.findall(r"^  (speed [a-z ]+): ", out, re.MULTILINE)
    assert ways == ["speed not known", "speed as the engine knew it", "speed as measured"] * 2
    assert out.count(" aim ") == 2 * (3 + 1)
    for _, measured, simulated in rows:
        assert float(measured) >= 9
        assert math.isfinite(float(simulated))
        assert float(simulated) > 0
    assert out.count("time of an iteration: off by") == 2
    assert re.findall(r"run (\d of \d at \d+) ", err) == [
        "1 of 2 at 20",
        "1 of 2 at 40",
        "2 of 2 at 20",
        "2 of 2 at 40",
    ]

    # Loads are shares of the capacity after the warm-up; the load told is as the slice had it.
    assert fidelity.main([*command, "--loads", "0.5", "--runs", "1"]) in (0, 1)
    out, err = capsys.readouterr()
    capacity = float(re.search(r"capacity ([\d.]+) requests/s", err)[1])
    rate, load = re.search(r"^([\d.]+) requests/s, load ([\d.]+), 1 runs", out).groups()
    assert float(rate) == pytest.approx(0.5 * capacity, rel=0.01)
    assert 0.2 < float(load) < 1.2
    with pytest.raises(SystemExit):
        fidelity.main([*command, "--runs", "3"])
    assert "has 10 requests; 3 runs need 14" in capsys.readouterr().err
