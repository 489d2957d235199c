"""The memory that is left, on made-up machines."""

from __future__ import annotations

import pytest

from chairlift.host_memory import available_memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """A machine of 64 GiB, 32 of them available, without control groups."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def be_in(machine, *lines):
    write(machine / "proc/self/cgroup", "\n".join(lines))


def limit_v2(machine, group, limit, usage, *, inactive=0, active=0):
    directory = machine / "sys/fs/cgroup" / group
    write(directory / "memory.max", limit)
    write(directory / "memory.current", usage)
    stat = f"anon 123\nfile 77\ninactive_file {inactive}\nactive_file {active}"
    write(directory / "memory.stat", stat)


def limit_v1(machine, group, limit, usage, cache):
    directory = machine / "sys/fs/cgroup/memory" / group
    write(directory / "memory.limit_in_bytes", limit)
    write(directory / "memory.usage_in_bytes", usage)
    write(directory / "memory.stat", f"inactive_file 5\ntotal_inactive_file {cache}")


def test_without_groups_it_is_the_machine_s(machine):
    assert available_memory(machine) == 32 * GIB
    be_in(machine, "0::/user.slice")
    assert available_memory(machine) == 32 * GIB


def test_the_page_cache_of_a_container_can_be_taken(machine):
    be_in(machine, "0::/")
    limit_v2(machine, ".", 8 * GIB, 7 * GIB, inactive=4 * GIB, active=2 * GIB)
    assert available_memory(machine) == 7 * GIB


def test_the_tightest_of_all_levels_counts(machine):
    be_in(machine, "0::/a/b/c")
    limit_v2(machine, "a", 6 * GIB, 4 * GIB, active=1 * GIB)
    limit_v2(machine, "a/b", "max", 4 * GIB)
    limit_v2(machine, "a/b/c", 9 * GIB, 1 * GIB)
    limit_v2(machine, "a/b/other", 1 * GIB, 1 * GIB)
    assert available_memory(machine) == 3 * GIB


@pytest.mark.parametrize("path", ["/of/the/host", "/../elsewhere"])
def test_a_path_that_is_not_visible_here(machine, path):
    be_in(machine, f"0::{path}")
    limit_v2(machine, ".", 8 * GIB, 3 * GIB)
    limit_v2(machine, "../elsewhere", 1 * GIB, 1 * GIB)
    assert available_memory(machine) == 5 * GIB


def test_version_1(machine):
    be_in(machine, "4:memory:/docker/x", "3:cpuset:/", "0::/")
    limit_v1(machine, ".", 9_223_372_036_854_771_712, 20 * GIB, 0)
    limit_v1(machine, "docker/x", 8 * GIB, 7 * GIB, 3 * GIB)
    assert available_memory(machine) == 4 * GIB


def test_a_group_beyond_its_limit_has_nothing_left(machine):
    be_in(machine, "0::/")
    limit_v2(machine, ".", 1 * GIB, 2 * GIB)
    assert available_memory(machine) == 0


def test_this_machine():
    assert available_memory() > 0
