"""The boundary benches run, each once and tiny: what nobody runs rots."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
