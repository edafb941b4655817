# SPDX-License-Identifier: Apache-2.0
"""Finds the pristine files of an installed or given vllm-gaudi, without importing it (that starts Habana's runtime)."""

import json
import os
import re
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from graft.errors import GraftError

PACKAGE = "vllm_gaudi"

# Python that runs in the target environment, isolated. find_spec of a top-level package imports nothing of it.
_PROBE = """
import importlib.metadata, importlib.util, json, sys, sysconfig
spec = importlib.util.find_spec("vllm_gaudi")
try:
    version = importlib.metadata.version("vllm_gaudi")
except importlib.metadata.PackageNotFoundError:
    version = None
print("\\n" + json.dumps({
    "python": sys.executable,
    "prefix": sys.prefix,
    "version_info": list(sys.version_info[:3]),
    "purelib": sysconfig.get_paths()["purelib"],
    "platlib": sysconfig.get_paths()["platlib"],
    "packages": list(spec.submodule_search_locations or []) if spec else [],
    "version": version,
}))
"""
_PROBE_SECONDS = 60
_LARGEST_FILE = 16 * 1024 * 1024


@dataclass(frozen=True)
class Environment:
    """A Python environment as its own interpreter describes it.

    packages: the folders of vllm_gaudi, none if it is not installed. version: of its distribution, if that is known.
    """

    python: Path
    prefix: Path
    version_info: tuple[int, int, int]
    purelib: Path
    platlib: Path
    packages: tuple[Path, ...]
    version: str | None


@dataclass(frozen=True)
class Tree:
    """The files of a vllm-gaudi.

    kind: "environment", "site-packages", "checkout", "wheel" or "sdist". path: what the user would name: the
    interpreter, the folder or the archive. version: None where nothing tells it. package: the folder of the package;
    None in an archive.
    """

    kind: str
    path: Path
    version: str | None
    package: Path | None = None
    environment: Environment | None = None
    _read: Callable[[str], bytes] = field(kw_only=True, repr=False, compare=False)

    def read(self, rel: str) -> bytes:
        """The bytes of a file, by its path below vllm_gaudi.

        Raises:
            GraftError: there is no such file, or it cannot be read.
        """
        inside = PurePosixPath(rel)
        if inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"{rel} is not below the package")
        try:
            return self._read(rel)
        except (OSError, KeyError):
            raise GraftError(
                f"{self.path} has no readable {PACKAGE}/{rel}",
                "Give a complete vllm-gaudi of a supported release with --source",
            ) from None


def find(
    source: Path | None = None,
    python: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Tree:
    """The vllm-gaudi to work on.

    The given source (a folder, a wheel or an sdist); else the environment of the given interpreter; else the source
    that GAUDI_FIXES_ROOT names; else the active virtual environment; else the first python3 on PATH that finds it.

    Raises:
        GraftError: there is none there.
    """
    if source is not None:
        return _open(source)
    if python is not None:
        environment = probe(python)
        if not environment.packages:
            raise _none_in(f"the environment of {python}")
        return _installed(environment)
    if environ.get("GAUDI_FIXES_ROOT"):
        return _open(Path(environ["GAUDI_FIXES_ROOT"]))
    for interpreter in interpreters(environ):
        try:
            environment = probe(interpreter)
        except GraftError:
            continue
        if environment.packages:
            return _installed(environment)
    raise _none_in("the active environment or for any python3 on PATH")


def probe(python: Path) -> Environment:
    """Ask an interpreter about its environment. Neither vllm_gaudi nor anything else in it is imported.

    Raises:
        GraftError: it cannot be run, or is no Python.
    """
    mend = "Give the path of a Python interpreter with --python"
    try:
        done = subprocess.run(
            [python, "-I", "-B", "-c", _PROBE],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=_PROBE_SECONDS,
            check=True,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except OSError as error:
        raise GraftError(f"{python} cannot be run: {error.strerror}", mend) from None
    except subprocess.TimeoutExpired:
        raise GraftError(f"{python} gave no answer in {_PROBE_SECONDS} s", mend) from None
    except (subprocess.CalledProcessError, IndexError, ValueError):
        raise GraftError(f"{python} does not run as a Python interpreter", mend) from None
    return Environment(
        python=Path(answer["python"]),
        prefix=Path(answer["prefix"]),
        version_info=tuple(answer["version_info"]),
        purelib=Path(answer["purelib"]),
        platlib=Path(answer["platlib"]),
        packages=tuple(Path(package) for package in answer["packages"]),
        version=_known(answer["version"]),
    )


def _none_in(place: str) -> GraftError:
    return GraftError(
        f"No vllm-gaudi is installed in {place}",
        "Name its interpreter with --python, or a folder, wheel or sdist of it with --source",
    )


def interpreters(environ: Mapping[str, str]) -> Iterator[Path]:
    """The interpreters to ask: the active virtual environment's, then every python3 on PATH, each once."""
    found = []
    if environ.get("VIRTUAL_ENV"):
        found.append(Path(environ["VIRTUAL_ENV"], "bin", "python"))
    found += [
        Path(folder, "python3") for folder in environ.get("PATH", "").split(os.pathsep) if Path(folder).is_absolute()
    ]
    return (path for path in dict.fromkeys(found) if path.is_file() and os.access(path, os.X_OK))


def _installed(environment: Environment) -> Tree:
    return _folder("environment", environment.python, environment.packages[0], environment)


def _folder(kind: str, path: Path, package: Path, environment: Environment | None = None) -> Tree:
    version = environment.version if environment else None
    return Tree(
        kind,
        path,
        version or _version_beside(package),
        package,
        environment,
        _read=lambda rel: (package / rel).read_bytes(),
    )


def _open(path: Path) -> Tree:
    """A folder, a wheel or an sdist as a tree."""
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise GraftError(f"{path} does not exist", "Give a folder, a wheel or an sdist with --source")
    try:
        if zipfile.is_zipfile(path):
            return _open_zip(path)
        if tarfile.is_tarfile(path):
            return _open_tar(path)
    except (OSError, zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise GraftError(f"{path} is damaged: {error}", "Download or build it again") from None
    raise GraftError(f"{path} is no wheel and no sdist", "Give a folder, a wheel or an sdist with --source")


def _open_folder(path: Path) -> Tree:
    folder = path.resolve()
    package = folder if _is_package(folder) else folder / PACKAGE
    if not _is_package(package):
        raise GraftError(
            f"{path} holds no vllm_gaudi package",
            "Give site-packages, the root of a vllm-gaudi checkout, or its vllm_gaudi folder with --source",
        )
    root = package.parent
    is_checkout = any((root / name).exists() for name in (".git", "pyproject.toml", "setup.py"))
    return _folder("checkout" if is_checkout else "site-packages", path, package)


def _is_package(folder: Path) -> bool:
    return folder.name == PACKAGE and (folder / "__init__.py").is_file()


def _open_zip(path: Path) -> Tree:
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}

    def read_member(name: str) -> bytes:
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)

    kind = "wheel" if path.suffix == ".whl" else "sdist"
    return _archive(kind, path, sizes, read_member)


def _open_tar(path: Path) -> Tree:
    with tarfile.open(path) as archive:
        # What is not a plain file, a link among them, is not there for us.
        sizes = {info.name: info.size for info in archive if info.isreg()}

    def read_member(name: str) -> bytes:
        with tarfile.open(path) as archive:
            return archive.extractfile(name).read()

    return _archive("sdist", path, sizes, read_member)


def _archive(kind: str, path: Path, sizes: Mapping[str, int], read_member: Callable[[str], bytes]) -> Tree:
    """An archive as a tree. It is read in memory, by exact member names: nothing is ever unpacked."""
    depth = 0 if kind == "wheel" else 1
    marker = f"{PACKAGE}/__init__.py"
    roots = [
        name.removesuffix(marker)
        for name in sizes
        if name.endswith(marker) and name.removesuffix(marker).count("/") <= depth
    ]
    roots = [root for root in roots if root == "" or (root.endswith("/") and root[0] != "/" and ".." not in root)]
    if len(roots) != 1:
        raise GraftError(f"{path} holds no vllm_gaudi package", "Give a wheel or an sdist of vllm-gaudi with --source")
    root = roots[0]

    def read(name: str) -> bytes:
        if sizes[name] > _LARGEST_FILE:
            raise GraftError(f"{name} in {path} is too large to be a source file", "Get it again")
        try:
            return read_member(name)
        except (OSError, zipfile.BadZipFile, tarfile.TarError, EOFError, RuntimeError, zlib.error) as error:
            raise GraftError(f"{path} is damaged: {error}", "Download or build it again") from None

    pattern = rf"{PACKAGE}-[^/]*\.dist-info/METADATA" if root == "" else rf"{re.escape(root)}PKG-INFO"
    described = [name for name in sizes if re.fullmatch(pattern, name)]
    version = _version_in(read(described[0])) if described else None
    return Tree(kind, path, version, _read=lambda rel: read(f"{root}{PACKAGE}/{rel}"))


def _version_beside(package: Path) -> str | None:
    """The version that the metadata beside a package's folder tells, or git where it is a checkout of its own."""
    root = package.parent
    described = [*sorted(root.glob(f"{PACKAGE}-*.dist-info/METADATA")), root / "PKG-INFO"]
    for file in described:
        if file.is_file():
            return _version_in(file.read_bytes())
    if (root / ".git").exists():
        return _version_from_git(root)
    return None


def _version_in(metadata: bytes) -> str | None:
    return _known(HeaderParser().parsestr(metadata.decode("utf-8", "replace"))["Version"])


def _version_from_git(root: Path) -> str | None:
    """The version of the nearest tag, with what was committed since as its local part."""
    command = ["git", "-C", str(root), "describe", "--tags", "--long", "--match", "v[0-9]*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    tag, since, commit = done.stdout.strip().rsplit("-", 2)
    version = tag.removeprefix("v")
    return version if since == "0" else f"{version}+{since}.{commit}"


def _known(version: str | None) -> str | None:
    """None for the versions that builds without a git tag give themselves."""
    if version is None or version == "0.0.0" or version.startswith("0.1.dev"):
        return None
    return version
