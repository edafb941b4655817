# SPDX-License-Identifier: Apache-2.0
"""Finding a vllm-gaudi: in environments, folders and archives, and never importing it."""

import gzip
import io
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from graft import releases
from graft.errors import GraftError

from .conftest import FILES, write_files

METADATA = "Metadata-Version: 2.1\nName: vllm_gaudi\nVersion: {}\n\nVersion: 7\n"


def make_wheel(path: Path, prefix: str = "", version: str = "1.0.0") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(f"{prefix}vllm_gaudi/{name}", text)
        archive.writestr(f"{prefix}vllm_gaudi-{version}.dist-info/METADATA", METADATA.format(version))
    return path


def make_sdist(path: Path, files: dict[str, str] | None = None, root: str = "vllm_gaudi-1.0.0/") -> Path:
    files = files if files is not None else {f"vllm_gaudi/{name}": text for name, text in FILES.items()}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**files, "PKG-INFO": METADATA.format("1.0.0")}.items():
            member = tarfile.TarInfo(root + name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def expect_files(tree: releases.Tree) -> None:
    for name, text in FILES.items():
        assert tree.read(name) == text.encode()


# Folders


def test_a_checkout_by_its_root_and_by_its_package(checkout):
    for path in (checkout, checkout / "vllm_gaudi"):
        tree = releases.find(path)
        assert (tree.kind, tree.path, tree.version) == ("checkout", path, None)
        assert tree.package == checkout / "vllm_gaudi"
        expect_files(tree)


def test_site_packages_with_its_version(tmp_path):
    write_files(tmp_path / "vllm_gaudi", FILES)
    write_files(tmp_path / "vllm_gaudi-1.0.0+abc.dist-info", {"METADATA": METADATA.format("1.0.0+abc")})
    tree = releases.find(tmp_path)
    assert (tree.kind, tree.version) == ("site-packages", "1.0.0+abc")
    expect_files(tree)


@pytest.mark.parametrize("version", ["0.0.0", "0.1.dev1+g1234567"])
def test_the_version_of_a_build_without_tags_is_not_known(tmp_path, version):
    write_files(tmp_path / "vllm_gaudi", FILES)
    write_files(tmp_path / "vllm_gaudi-x.dist-info", {"METADATA": METADATA.format(version)})
    assert releases.find(tmp_path).version is None


def test_an_unpacked_sdist_with_its_version(checkout):
    (checkout / "PKG-INFO").write_text(METADATA.format("1.0.0"))
    assert releases.find(checkout).version == "1.0.0"


def git(folder: Path, *words: str) -> None:
    author = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", "-C", folder, *author, *words], check=True, capture_output=True)


def test_a_git_checkout_has_the_version_of_its_tag(checkout):
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "one")
    assert releases.find(checkout).version is None
    git(checkout, "tag", "v1.0.0")
    assert releases.find(checkout).version == "1.0.0"
    git(checkout, "commit", "-q", "--allow-empty", "-m", "two")
    assert releases.find(checkout).version.startswith("1.0.0+1.g")


def test_a_checkout_below_another_repository_is_not_given_its_version(checkout):
    git(checkout.parent, "init", "-q")
    git(checkout.parent, "commit", "-q", "--allow-empty", "-m", "one")
    git(checkout.parent, "tag", "v1.0.0")
    assert releases.find(checkout).version is None


def test_a_path_with_spaces_and_a_link_to_it(tmp_path, checkout):
    moved = checkout.rename(tmp_path / "a chéckout")
    link = tmp_path / "link"
    link.symlink_to(moved)
    expect_files(releases.find(link))


@pytest.mark.parametrize("rel", ["../checkout/pyproject.toml", "/etc/passwd", "models/../../x.py"])
def test_only_files_below_the_package_are_read(checkout, rel):
    with pytest.raises(ValueError, match="not below"):
        releases.find(checkout).read(rel)


def test_a_missing_file_is_named(checkout):
    with pytest.raises(GraftError, match="no readable vllm_gaudi/models/other.py"):
        releases.find(checkout).read("models/other.py")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "holds no vllm_gaudi package"),
        ({"vllm_gaudi/models/gemma4.py": ""}, "holds no vllm_gaudi package"),
        ({"vllm/__init__.py": ""}, "holds no vllm_gaudi package"),
    ],
)
def test_a_folder_without_the_package_is_refused(tmp_path, files, why):
    with pytest.raises(GraftError, match=why):
        releases.find(write_files(tmp_path, files))


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(GraftError, match="does not exist"):
        releases.find(tmp_path / "gone")


# Archives


def test_a_wheel(tmp_path):
    tree = releases.find(make_wheel(tmp_path / "vllm_gaudi-1.0.0-py3-none-any.whl"))
    assert (tree.kind, tree.version, tree.package) == ("wheel", "1.0.0", None)
    expect_files(tree)


@pytest.mark.parametrize("make", [make_sdist, lambda path: make_wheel(path, "vllm_gaudi-1.0.0/")])
def test_an_sdist(tmp_path, make):
    path = tmp_path / ("sdist.tar.gz" if make is make_sdist else "sdist.zip")
    tree = releases.find(make(path))
    assert tree.kind == "sdist"
    expect_files(tree)
    with pytest.raises(GraftError, match="no readable"):
        tree.read("models/other.py")


def test_an_sdist_has_the_version_of_its_metadata(tmp_path):
    assert releases.find(make_sdist(tmp_path / "x.tar.gz")).version == "1.0.0"


@pytest.mark.parametrize("root", ["../", "/", "a/../../"])
def test_members_outside_the_archives_root_are_not_the_package(tmp_path, root):
    with pytest.raises(GraftError, match="holds no vllm_gaudi"):
        releases.find(make_sdist(tmp_path / "x.tar.gz", root=root))


def test_links_in_an_archive_are_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("r/vllm_gaudi/__init__.py"))
        for name, target in (("a.py", str(secret)), ("b.py", "../../secret"), ("c.py", "__init__.py")):
            member = tarfile.TarInfo(f"r/vllm_gaudi/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    tree = releases.find(path)
    for name in ("a.py", "b.py", "c.py"):
        with pytest.raises(GraftError, match="no readable"):
            tree.read(name)


def test_nothing_is_unpacked(tmp_path):
    path = make_wheel(tmp_path / "x.whl")
    releases.find(path).read("models/gemma4.py")
    assert list(tmp_path.iterdir()) == [path]


def test_two_packages_in_an_archive_are_one_too_many(tmp_path):
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("a/vllm_gaudi/__init__.py", "b/vllm_gaudi/__init__.py"):
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(GraftError, match="holds no vllm_gaudi"):
        releases.find(path)


@pytest.mark.parametrize("name", ["x.whl", "x.tar.gz", "x.txt"])
@pytest.mark.parametrize("data", [b"", b"not an archive", b"PK\x03\x04 broken", gzip.compress(b"no tar")])
def test_a_file_that_is_no_archive_is_refused(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(GraftError, match="is no wheel and no sdist|is damaged"):
        releases.find(path)


def test_a_wheel_cut_short_is_refused(tmp_path):
    path = make_wheel(tmp_path / "x.whl")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(GraftError, match="is no wheel and no sdist|is damaged"):
        releases.find(path)


def test_an_sdist_cut_short_is_refused(tmp_path):
    path = make_sdist(tmp_path / "x.tar.gz")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(GraftError, match="is no wheel and no sdist|is damaged|no vllm_gaudi"):
        releases.find(path)


def test_a_wheel_whose_compressed_data_are_corrupt_is_refused(tmp_path):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("vllm_gaudi/attention/backends/hpu_attn.py", "".join(map(str, range(2000))))
        archive.writestr("vllm_gaudi/__init__.py", "")
        archive.writestr("vllm_gaudi-1.0.0.dist-info/METADATA", METADATA.format("1.0.0"))
    data = bytearray(path.read_bytes())
    data[100:140] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(GraftError, match="is damaged"):
        releases.find(path).read("attention/backends/hpu_attn.py")


def test_a_wheel_whose_file_is_corrupt_is_refused(tmp_path):
    path = make_wheel(tmp_path / "x.whl")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"return query", b"return queri"))
    with pytest.raises(GraftError, match="is damaged"):
        releases.find(path).read("attention/backends/hpu_attn.py")


def test_a_file_of_absurd_size_is_not_read(tmp_path):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("vllm_gaudi/__init__.py", "")
        archive.writestr("vllm_gaudi/big.py", b"\0" * (17 * 1024 * 1024))
    with pytest.raises(GraftError, match="too large"):
        releases.find(path).read("big.py")


# Environments


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("environments")
    venv.create(folder / "base", with_pip=False, symlinks=True)
    return folder / "base"


@pytest.fixture
def environment(tmp_path) -> Path:
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder


def site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def install(environment: Path, version: str = "1.0.0") -> None:
    folder = site_packages(environment)
    write_files(folder / "vllm_gaudi", FILES)
    write_files(folder / f"vllm_gaudi-{version}.dist-info", {"METADATA": METADATA.format(version)})


EDITABLE_FINDER = """\
import importlib.util, os, sys
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "vllm_gaudi":
            return importlib.util.spec_from_file_location(name, os.path.join({root!r}, "__init__.py"))
def install():
    sys.meta_path.append(Finder)
"""


def install_editable(environment: Path, checkout: Path, style: str) -> None:
    folder = site_packages(environment)
    if style == "path":
        (folder / "__editable__.vllm_gaudi-1.0.0.pth").write_text(f"{checkout}\n")
    else:
        name = "__editable___vllm_gaudi_1_0_0_finder"
        finder = EDITABLE_FINDER.format(root=str(checkout / "vllm_gaudi"))
        (folder / f"{name}.py").write_text(finder)
        (folder / "__editable__.vllm_gaudi-1.0.0.pth").write_text(f"import {name}; {name}.install()\n")
    write_files(folder / "vllm_gaudi-1.0.0.dist-info", {"METADATA": METADATA.format("1.0.0")})


def test_an_installed_package(environment):
    install(environment)
    tree = releases.find(python=environment / "bin" / "python")
    assert (tree.kind, tree.version) == ("environment", "1.0.0")
    assert tree.package == site_packages(environment) / "vllm_gaudi"
    assert tree.environment.prefix == environment
    assert tree.environment.purelib == site_packages(environment)
    assert tree.environment.version_info == sys.version_info[:3]
    expect_files(tree)


@pytest.mark.parametrize("style", ["path", "finder"])
def test_an_editable_install(environment, checkout, style):
    install_editable(environment, checkout, style)
    tree = releases.find(python=environment / "bin" / "python")
    assert (tree.version, tree.package) == ("1.0.0", checkout / "vllm_gaudi")
    expect_files(tree)


def test_what_a_pth_file_prints_does_not_matter(environment):
    install(environment)
    (site_packages(environment) / "noise.pth").write_text("import sys; print('{noise')\n")
    assert releases.find(python=environment / "bin" / "python").version == "1.0.0"


def test_the_environment_is_asked_without_the_callers_paths(environment, tmp_path, monkeypatch):
    write_files(tmp_path / "elsewhere" / "vllm_gaudi", FILES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(GraftError, match="No vllm-gaudi is installed"):
        releases.find(python=environment / "bin" / "python")


def test_the_active_environment_then_the_path(base, environment):
    install(environment)
    nothing = {"PATH": str(base / "bin")}
    active = {"VIRTUAL_ENV": str(environment), "PATH": ""}
    on_path = {"VIRTUAL_ENV": str(base), "PATH": f"relative:{base / 'bin'}:{environment / 'bin'}"}
    for environ in (active, on_path):
        assert releases.find(environ=environ).package == site_packages(environment) / "vllm_gaudi"
    for environ in (nothing, {}, {"VIRTUAL_ENV": str(base / "gone"), "PATH": ""}):
        with pytest.raises(GraftError, match="No vllm-gaudi is installed"):
            releases.find(environ=environ)


def test_a_broken_interpreter_on_the_path_is_passed_over(tmp_path, environment):
    install(environment)
    broken = write_files(tmp_path / "broken", {"python3": "#!/bin/sh\nexit 3\n"}) / "python3"
    broken.chmod(0o755)
    environ = {"PATH": os.pathsep.join([str(broken.parent), str(environment / "bin")])}
    assert releases.find(environ=environ).version == "1.0.0"


def test_the_tests_root_comes_before_the_environment_and_a_given_source_before_both(environment, checkout, tmp_path):
    install(environment)
    environ = {"VIRTUAL_ENV": str(environment), "GAUDI_FIXES_ROOT": str(checkout)}
    assert releases.find(environ=environ).path == checkout
    assert releases.find(python=environment / "bin" / "python", environ=environ).kind == "environment"
    wheel = make_wheel(tmp_path / "x.whl")
    assert releases.find(wheel, environment / "bin" / "python", environ).kind == "wheel"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "cannot be run"),
        (lambda path: path.write_text("#!/bin/sh\nexit 3\n"), "does not run as a Python"),
        (lambda path: path.write_text("#!/bin/sh\necho nothing\n"), "does not run as a Python"),
        (lambda path: path.write_text("#!/bin/sh\n"), "does not run as a Python"),
        (lambda path: path.mkdir(), "cannot be run"),
    ],
)
def test_what_is_no_interpreter_is_refused(tmp_path, make, why):
    path = tmp_path / "python"
    make(path)
    if path.is_file():
        path.chmod(0o755)
    with pytest.raises(GraftError, match=why):
        releases.find(python=path)
