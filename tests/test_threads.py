"""Finding PyTorch's OpenMP pool among what is mapped."""

from __future__ import annotations

from chairlift.attention import threads
from chairlift.attention.threads import share_openmp_pool


def test_libraries_are_found_even_if_replaced_on_disk(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 42   /opt/a b/libgomp-98b21ff3.so.1.0.0 (deleted)\n"
        "7f01-7f02 r--p 00001000 08:01 42   /opt/a b/libgomp-98b21ff3.so.1.0.0 (deleted)\n"
        "7f02-7f03 r-xp 00000000 08:01 43   /usr/lib/libiomp5.so\n"
        "7f03-7f04 r-xp 00000000 08:01 44   /usr/lib/libgomperz.so\n"
        "7f04-7f05 rw-p 00000000 00:00 0\n"
    )
    assert threads._loaded_openmp_libraries(maps) == [
        "/opt/a b/libgomp-98b21ff3.so.1.0.0",
        "/usr/lib/libiomp5.so",
    ]
    assert threads._loaded_openmp_libraries(tmp_path / "nowhere") == []


def test_a_library_that_cannot_be_loaded_is_passed_over(tmp_path, monkeypatch):
    broken = tmp_path / "libgomp.so.1"
    broken.write_bytes(b"not a library")
    found = [str(broken), str(tmp_path / "gone/libgomp.so"), *threads._loaded_openmp_libraries()]
    pool = share_openmp_pool()
    monkeypatch.setattr(threads, "_loaded_openmp_libraries", lambda: found)
    assert share_openmp_pool.__wrapped__() == pool
