"""How much memory this process may still take: the machine's, within its container's limits.

A container's usage counts the page cache of the files it has read, which the kernel gives back when
memory is asked for; so that is added back. Limits of both versions of Linux's control groups are
looked at, on every level from the process's own group to the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Where a version of control groups keeps its numbers."""

    mount: str
    limit: str
    usage: str
    cache: tuple[str, str]
    """Lines of ``memory.stat``, subgroups included: pages of files."""


_V1 = _Hierarchy(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Hierarchy("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be taken without swapping, within the container's limits.

    ``root`` is where ``proc`` and ``sys`` are.
    """
    available = _lines(root / "proc/meminfo")["MemAvailable:"] * 1024
    return max(0, min([available, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield what is left in each group around this process that has a limit."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = _V1 if controllers else _V2
        for group in _with_parents(path):
            left = _left(root / hierarchy.mount / group, hierarchy)
            if left is not None:
                yield left


def _with_parents(path: str) -> list[PurePosixPath]:
    """Return the group and those above it, relative to the mount.

    A container may see its path as the host does, and only its own group, mounted as the root:
    groups that are not there have no limit that can be read. ``..`` leads out of what it sees.
    """
    group = PurePosixPath(path.lstrip("/"))
    root = PurePosixPath()
    return [root] if ".." in group.parts else [*dict.fromkeys([group, *group.parents])]


def _left(group: Path, hierarchy: _Hierarchy) -> int | None:
    try:
        limit = int((group / hierarchy.limit).read_text(encoding="ascii"))
        usage = int((group / hierarchy.usage).read_text(encoding="ascii"))
        stat = _lines(group / "memory.stat")
    except (OSError, ValueError):  # not there, or the limit is "max"
        return None
    return limit - usage + sum(stat.get(name, 0) for name in hierarchy.cache)


def _lines(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    words = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1}
