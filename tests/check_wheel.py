"""Check what is inside a wheel: ``python tests/check_wheel.py dist/chairlift-*.whl``.

Not collected by pytest, for a wheel takes minutes to build; ``make wheel`` runs it.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

TAG = "cp311-abi3"
ENTRY_POINT = "chairlift=chairlift.cli:main"
ROOT = Path(__file__).parents[1]


def complaints(wheel: Path) -> list[str]:
    """Say what is wrong with the wheel."""
    found = [] if f"-{TAG}-" in wheel.name else [f"the name is not tagged {TAG}"]
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    wanted = {
        path.relative_to(ROOT / "python").as_posix()
        for kind in ("*.py", "*.pyi", "py.typed")
        for path in (ROOT / "python/chairlift").rglob(kind)
    }
    wanted.add("chairlift/_core.abi3.so")
    found += [f"{name} is missing" for name in sorted(wanted - set(content))]
    for source in sorted((ROOT / "cuda").iterdir()):
        name = f"chairlift/cuda/{source.name}"
        if name not in content:
            found.append(f"{name} is missing")
        elif content[name] != source.read_bytes():
            found.append(f"{name} differs from cuda/{source.name}")
    entry_points = _only(content, "entry_points.txt").replace(" ", "").splitlines()
    if ENTRY_POINT not in entry_points:
        found.append(f"there is no entry point {ENTRY_POINT}")
    if f"Tag: {TAG}-" not in _only(content, "WHEEL"):
        found.append(f"the metadata is not tagged {TAG}")
    return found


def _only(content: dict[str, bytes], name: str) -> str:
    """Return a text of the ``.dist-info`` directory, empty if it is not there."""
    texts = [data for path, data in content.items() if path.endswith(f".dist-info/{name}")]
    return texts[0].decode() if len(texts) == 1 else ""


def main() -> None:
    """Check the wheels named on the command line."""
    if len(sys.argv) < 2:
        sys.exit("usage: python tests/check_wheel.py WHEEL...")
    for wheel in map(Path, sys.argv[1:]):
        found = complaints(wheel)
        if found:
            sys.exit("\n".join([f"{wheel} is not complete:", *found]))
        print(f"{wheel}: complete")


if __name__ == "__main__":
    main()
