# SPDX-License-Identifier: Apache-2.0
"""What installs and uninstalls promise when they are cut short: killed, refused, out of space, two at once.

A forked child does the work while an audit hook, which Python calls before each change to the file system, counts
the changes and strikes at one of them. So every gap between two changes is tried, whatever the code looks like.
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from graft import check, copies, install, releases, versions
from graft.errors import GraftError
from graft.place import Place
from graft.progress import Progress
from graft.releases import Tree
from tests.support.checkouts import with_release
from tests.support.environments import FILES, Environment, listing, module_name

WHERE = f"""
import json
from importlib import import_module
print(json.dumps(["vllm_gaudi_overrides" in import_module(name).__file__ for name in
                  {[module_name(file) for file in FILES]}]))
"""
KILLED = 99


def changes_something(event: str, arguments: tuple) -> bool:
    if event == "open":
        return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in ("os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.symlink")


def needs_space(event: str) -> bool:
    return event in ("open", "os.link", "os.mkdir", "os.symlink")


class Scene:
    """An environment and the copies of a checkout, to be put back as they were as often as wanted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment: Environment = with_release(root, "environment", "wheel")
        self.copies = root / "checkout" / "vendor" / "releases"
        self.copies.mkdir(parents=True)
        self.place = Place(releases.probe(self.environment.python))
        self.saved = root.with_name(root.name + "-saved")
        self.plans: dict[bytes, copies.Plan] = {}

    def plan(self) -> copies.Plan:
        """The merge, made once per state of the pristine files."""
        package = self.environment.site_packages / "vllm_gaudi"
        key = b"".join((package / file).read_bytes() for file in FILES)
        if key not in self.plans:
            tree = Tree("environment", package, "0.30.0", package, _read=lambda rel: (package / rel).read_bytes())
            self.plans[key] = copies.plan(versions.get("0.30"), tree)
        return self.plans[key]

    def edit(self) -> None:
        """Change vllm_gaudi, so that an install has copies to replace."""
        path = self.environment.site_packages / "vllm_gaudi" / FILES[1]
        path.write_text(path.read_text().replace("EDITION = 1", "EDITION = 2"))

    def install(self, inside: bool = False) -> None:
        install.install(self.plan(), self.place, inside=inside, progress=Progress(quiet=True))

    def uninstall(self) -> None:
        install.uninstall(self.place, Progress(quiet=True))

    def check(self) -> int:
        return check.check(versions.get("0.30"), self.place)["code"]

    def save(self) -> None:
        """Remember this state as the one to start from."""
        if self.saved.exists():
            shutil.rmtree(self.saved)
        shutil.copytree(self.root, self.saved, symlinks=True)

    def reset(self) -> None:
        """Go back to it."""
        for path in (self.environment.site_packages, self.copies):
            shutil.rmtree(path)
            shutil.copytree(self.saved / path.relative_to(self.root), path, symlinks=True)

    def state(self) -> set[tuple[str, str]]:
        """Every file of both folders, with its hash."""
        found = {**listing(self.environment.site_packages), **listing(self.copies)}
        return set(found.items())

    def in_child(self, work: Callable[[], None], strike: Callable[[str, str], None] | None) -> tuple[int, int]:
        """Do something in a forked child; answers its exit code and how many changes it was going to make.

        strike(event, path) is called at each change. Exit code 0: done, 1: refused with a reason, 2: anything else.
        """
        with tempfile.TemporaryFile() as counter:
            child = os.fork()
            if child == 0:
                code, root = 2, str(self.root)
                try:

                    def hook(event: str, arguments: tuple) -> None:
                        if not changes_something(event, arguments):
                            return
                        path = str(arguments[0])
                        if path.startswith(root):
                            os.write(counter.fileno(), b".")
                            if strike:
                                strike(event, path)

                    sys.addaudithook(hook)
                    work()
                    code = 0
                except (GraftError, KeyboardInterrupt):
                    code = 1
                finally:
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return code, counter.seek(0, os.SEEK_END)


def at(number: int, do: Callable[[str], None], from_then_on: bool = False) -> Callable[[str, str], None]:
    """Strike at one change, or from one on."""
    seen = [0]

    def strike(event: str, path: str) -> None:
        seen[0] += 1
        if seen[0] == number or (from_then_on and seen[0] > number):
            do(event)

    return strike


def kill(event: str) -> None:
    os._exit(KILLED)


def terminate(event: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def full(event: str) -> None:
    if needs_space(event):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_consistent(scene: Scene) -> bool:
    """Silent starts, both modules or neither, at most one warning, and a check that tells the truth."""
    environment = scene.environment
    assert environment.run("-B", "-c", "pass").stderr == ""
    answer = environment.run("-c", WHERE)
    merged = json.loads(answer.stdout)
    assert merged[0] == merged[1]
    assert len(answer.stderr.splitlines()) <= 1
    code = scene.check()
    assert (code == 0) == merged[0]
    return merged[0]


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """An environment, checked out copies, and the tool pointed at those."""
    made = Scene(tmp_path / "scene")
    monkeypatch.setattr(copies, "COPIES", made.copies)
    made.save()
    yield made
    with contextlib.suppress(OSError):
        shutil.rmtree(made.saved)


def prepare(scene: Scene, before: str) -> None:
    """Bring an environment into a state to start from."""
    if before != "clean":
        scene.install(inside=before == "copied")
    if before == "outdated":
        scene.edit()
    scene.plan()
    scene.save()


def steps_of(scene: Scene, work: Callable[[], None]) -> int:
    """How many changes something makes."""
    code, steps = scene.in_child(work, None)
    assert code == 0 and steps > 5
    scene.reset()
    return steps


@pytest.mark.parametrize("before,inside", [("clean", False), ("clean", True), ("outdated", False), ("copied", False)])
def test_an_install_killed_between_any_two_changes(scene, before, inside):
    original = listing(scene.environment.site_packages)
    prepare(scene, before)
    for step in range(1, steps_of(scene, lambda: scene.install(inside)) + 1):
        code, _ = scene.in_child(lambda: scene.install(inside), at(step, kill))
        assert code == KILLED
        is_consistent(scene)
        if step % 2:
            scene.install(inside)
            assert is_consistent(scene)
        else:
            if scene.place.is_empty():
                assert before == "clean"
            else:
                scene.uninstall()
            assert before == "outdated" or listing(scene.environment.site_packages) == original
            assert not is_consistent(scene)
        scene.reset()


@pytest.mark.parametrize("before", ["applied", "copied"])
def test_an_uninstall_killed_between_any_two_changes(scene, before):
    original = listing(scene.environment.site_packages)
    prepare(scene, before)
    for step in range(1, steps_of(scene, scene.uninstall) + 1):
        code, _ = scene.in_child(scene.uninstall, at(step, kill))
        assert code == KILLED
        is_consistent(scene)
        if step % 2:
            scene.install()
            assert is_consistent(scene)
        elif not scene.place.is_empty():
            scene.uninstall()
            assert listing(scene.environment.site_packages) == original
        scene.reset()


@pytest.mark.parametrize("strike", [terminate, full])
@pytest.mark.parametrize("before,inside", [("clean", False), ("outdated", False), ("applied", True)])
def test_an_install_that_fails_leaves_everything_as_it_was(scene, before, inside, strike):
    prepare(scene, before)
    start = scene.state()
    for step in range(1, steps_of(scene, lambda: scene.install(inside)) + 1):
        code, steps = scene.in_child(lambda: scene.install(inside), at(step, strike, strike is full))
        assert code in (0, 1)  # 0 where the last changes, which clean up, were struck
        if code == 1:
            assert scene.state() ^ start == set(), f"struck at change {step}"
        else:
            assert steps - step < 30
            assert is_consistent(scene)
        scene.reset()


@pytest.mark.parametrize("before", ["applied", "copied"])
def test_an_uninstall_that_is_interrupted_leaves_everything_as_it_was(scene, before):
    prepare(scene, before)
    start = scene.state()
    for step in range(1, steps_of(scene, scene.uninstall) + 1):
        code, _ = scene.in_child(scene.uninstall, at(step, terminate))
        assert code in (0, 1)
        if code == 1:
            assert scene.state() ^ start == set(), f"struck at change {step}"
        scene.reset()


def test_a_read_only_site_packages_is_refused_in_a_line(scene):
    """As root nothing is read-only: the hook refuses every change there, as the file system would."""
    start = scene.state()

    def refuse(event: str, path: str) -> None:
        if path.startswith(str(scene.environment.site_packages)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def work() -> None:
        with pytest.raises(GraftError, match=r"cannot be written \(Read-only file system\); nothing was changed"):
            scene.install()

    assert scene.in_child(work, refuse)[0] == 0
    assert scene.state() == start


def test_a_read_only_checkout_has_its_copies_put_inside_site_packages(scene, monkeypatch):
    assert install.why_inside(scene.plan(), scene.place) is None
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(scene.copies)))
    assert install.why_inside(scene.plan(), scene.place) == f"{scene.copies} cannot be written"


def test_an_install_that_would_not_load_is_taken_back(scene):
    """Another tool's hook, in front of ours, answers for itself."""
    site_packages = scene.environment.site_packages
    (site_packages / "zzz.py").write_text(
        "import sys\nfrom importlib.machinery import PathFinder\nsys.meta_path.insert(0, PathFinder)\n"
    )
    (site_packages / "zzz.pth").write_text("import zzz\n")
    start = scene.state()
    with pytest.raises(GraftError, match="would not come from the copy: another import hook answers first"):
        scene.install()
    assert scene.state() == start


@pytest.mark.parametrize("options", [([], []), (["--copy"], ["--copy"]), ([], ["--copy"])])
def test_two_installs_at_once(checkout, environment, options):
    variables = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    command = [sys.executable, "-m", "graft", "install", "0.30", "--python", str(environment.python)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    both = [subprocess.Popen([*command, *more], cwd=checkout.root, env=variables, **quiet) for more in options]
    for one in both:
        said = one.communicate()[1]
        assert one.returncode == 0, said
    assert checkout.state(environment)["code"] == 0
    assert not list(environment.site_packages.glob(".vllm_gaudi_overrides.*"))


def test_an_install_waits_for_another_one(scene):
    scene.plan()
    with install.locked(scene.place.folder):
        child = os.fork()
        if child == 0:
            scene.install()
            os._exit(0)
        time.sleep(1)
        assert scene.place.is_empty()
    assert os.waitpid(child, 0)[1] == 0
    assert scene.check() == 0
