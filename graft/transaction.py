# SPDX-License-Identifier: Apache-2.0
"""Changes to files that are all made or all taken back, each in one atomic step, one process at a time."""

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

LEFTOVER = ".vllm_gaudi_overrides."  # begins the names of what is only there while a change is made


@contextlib.contextmanager
def locked(folder: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keep other installs away from a folder. The lock is on the folder itself and leaves no file.

    on_wait is called once if another process holds it. A file system without locks is not locked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            pass
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold the descriptor, too
    finally:
        os.close(descriptor)


def sweep(folder: Path) -> list[Path]:
    """Remove what a killed install left in a folder; answers what it was. Only under its lock."""
    found = sorted(folder.glob(f"{LEFTOVER}*"))
    for path in found:
        remove(path)
    return found


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


class Interrupts:
    """Makes Ctrl-C, a polite kill and a lost terminal the same: KeyboardInterrupt.

    It is raised at once, or, once held, only where `check` is called: between two changes, never inside one.
    """

    def __init__(self) -> None:
        self._held = False
        self._came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self._came = True

    def hold(self) -> None:
        """From here on, wait to be asked."""
        self._held = True

    def check(self) -> None:
        """Raises KeyboardInterrupt if one came while held."""
        if self._came:
            raise KeyboardInterrupt


class Transaction:
    """Every change is taken back if the `with` block raises, Ctrl-C included.

    What was there is kept under another name, so that taking back needs no space: at the top of the home folder
    if it is below that, so that `sweep` finds it after a kill, else beside where it was.
    """

    def __init__(self, home: Path, interrupts: Interrupts) -> None:
        self._home = home
        self._interrupts = interrupts
        self._undo: list[Callable[[], object]] = []
        self._kept: list[Path] = []

    def __enter__(self) -> "Transaction":
        self._interrupts.hold()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None:
            for undo in reversed(self._undo):
                undo()
        for path in self._kept:
            with contextlib.suppress(OSError):
                remove(path)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file in one step; a reader sees the old file or the new one."""
        self._interrupts.check()
        new = self._beside(path)
        with new.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.keep(path)
        os.replace(new, path)

    def write_folder(self, path: Path, contents: Mapping[str, bytes]) -> None:
        """Write a folder of files in one step, or two where there is one already."""
        self._interrupts.check()
        new = self._beside(path)
        new.mkdir()
        for name, data in contents.items():
            (new / name).write_bytes(data)
        self.remove(path)
        self._undo.append(lambda: remove(path) if os.path.lexists(path) else None)
        os.rename(new, path)

    def remove(self, path: Path) -> None:
        """Remove a file or a folder in one step, if it is there."""
        self._interrupts.check()
        if os.path.lexists(path):
            kept = self._beside(path)
            os.rename(path, kept)
            self._undo.append(lambda: os.rename(kept, path))

    def keep(self, path: Path) -> None:
        """Remember a file or a folder, or that there is none, before something else changes it."""
        if not os.path.lexists(path):
            self._undo.append(lambda: remove(path) if os.path.lexists(path) else None)
            return
        kept = self._beside(path)
        if path.is_dir():
            shutil.copytree(path, kept, copy_function=_link, symlinks=True)
        else:
            _link(path, kept)
        self._undo.append(lambda: _put_back(kept, path))

    def _beside(self, path: Path) -> Path:
        """A free name, removed at the end whatever happens."""
        folder = self._home if self._home in path.parents else path.parent
        kept = Path(tempfile.mktemp(prefix=LEFTOVER, dir=folder))
        self._kept.append(kept)
        return kept


def _link(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or copy it where the file system has no such thing."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _put_back(kept: Path, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    os.replace(kept, path)
