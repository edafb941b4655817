# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["nox>=2024.10"]
# ///
"""Every job of this project, thin: `nox -l` lists them, `nox -s NAME -- --help` asks one of them."""

import os
import subprocess

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "virtualenv"  # pip, not uv: where torch comes from is set in pip's configuration

PROJECT = nox.project.load_toml("pyproject.toml")
TOOL = PROJECT["project"]["dependencies"]
RELEASES = nox.project.load_toml("VERSIONS.toml")["releases"]


def group(name: str) -> list[str]:
    return nox.project.dependency_groups(PROJECT, name)


def install_vllm(session: nox.Session, version: str) -> None:
    """Install vLLM from its sdist without kernels, as the plugin does on Gaudi, on a CPU torch."""
    session.install("setuptools>=77,<81", "setuptools-scm", "setuptools-rust", "wheel", "packaging", "cmake", "ninja",
                    "jinja2", "numpy", *group("model"))  # fmt: skip
    # vLLM would call itself VERSION+empty, which pip then refuses as another version than it asked for.
    build = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    session.install("--no-build-isolation", "--no-binary", "vllm", f"vllm=={version}", env=build)


def graft(session: nox.Session, *words: str) -> None:
    """Run the tool from a session's environment, looking for vllm-gaudi in the one nox was started from."""
    session.install(*TOOL)
    # Not session.run, which puts the session's own environment first on PATH, whatever PATH it is given.
    session.log(" ".join(["python -m graft", *words, *session.posargs]))
    done = subprocess.run([os.path.join(session.bin, "python"), "-m", "graft", *words, *session.posargs])
    if done.returncode:
        session.error(f"graft exited with {done.returncode}")


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """Run all the tests; those on a real release want GAUDI_FIXES_ROOT."""
    install_vllm(session, RELEASES["0.30"]["vllm"])
    session.install(*TOOL, *group("tests"), *group("parity"), *group("bench"))
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Check style: ours, and upstream's for the override sources."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".", "vendor")
    session.run("ruff", "format", "--check", ".")
    session.run("yapf", "--diff", "--recursive", "vendor/vllm_gaudi_overrides")


@nox.session(reuse_venv=True, default=False)
def demo(session: nox.Session) -> None:
    """Show fast prefill at work on real vLLM: a small Gemma 4 E2B on the CPU, flag off and on."""
    install_vllm(session, RELEASES["0.30"]["vllm"])
    session.install(*TOOL)
    session.run("python", "-m", "demo", *session.posargs)


def install_engine(session: nox.Session) -> None:
    """Install the vLLM of the release that `--release` names, and what the plugin wants beside it."""
    asks = {"--source", "--help", "-h", "--list"} & set(session.posargs)
    if not asks and "GAUDI_FIXES_ROOT" not in os.environ:
        session.error("Name a vllm-gaudi with `-- --source PATH`: a checkout, site-packages, a wheel or an sdist")
    chosen = session.posargs[session.posargs.index("--release") + 1] if "--release" in session.posargs else "0.26"
    install_vllm(session, RELEASES[chosen]["vllm"])
    session.install(*TOOL, *group("engine"))
    # Without their own requirements: torchvision wants another torch, vLLM another transformers.
    session.install("--no-deps", *group(f"engine-{chosen}"))


@nox.session(reuse_venv=True, default=False)
def engine(session: nox.Session) -> None:
    """Serve a small Gemma 4 with the real plugin on the CPU, flag off and on: `-- --source PATH`."""
    install_engine(session)
    session.run("python", "-m", "engine", *session.posargs)


@nox.session(reuse_venv=True, default=False)
def bench(session: nox.Session) -> None:
    """Measure prompt throughput with the real plugin on the CPU, flag off and on: `-- --source PATH`."""
    install_engine(session)
    session.install(*group("bench"))
    session.run("python", "-m", "bench", *session.posargs)


@nox.session(reuse_venv=True, default=False)
def parity(session: nox.Session) -> None:
    """Compare the greedy answers of two running servers, one without and one with the flag: `-- URL URL`."""
    session.install(*group("parity"))
    session.run("python", "-m", "parity", *session.posargs)


@nox.session(reuse_venv=True, default=False)
def faults(session: nox.Session) -> None:
    """Put faults into the fix, one at a time, and see the tests catch each."""
    install_vllm(session, RELEASES["0.30"]["vllm"])
    session.install(*TOOL, *group("tests"))
    session.run("python", "tests/faults.py", *session.posargs)


def release_session(command: str, release: str, doc: str) -> None:
    def run(session: nox.Session) -> None:
        graft(session, command, release)

    run.__doc__ = doc.format(tag=RELEASES[release]["tag"])
    nox.session(name=f"{command}-{release}", reuse_venv=True, default=False)(run)


SESSIONS = {
    "merge": "Write the full copies for {tag} below vendor/releases.",
    "install": "Put the full copies in the place of {tag}'s own modules; prints how to serve.",
    "check": "Tell whether {tag}'s copies load; `python -m graft check` exits 0, 1 or 2 on it.",
    "pin": "Write the hashes of {tag}'s pristine files into VERSIONS.toml.",
    "export": "Make the patches for {tag} to send upstream.",
}
for _release in RELEASES:
    for _command, _doc in SESSIONS.items():
        release_session(_command, _release, _doc)


@nox.session(reuse_venv=True, default=False)
def uninstall(session: nox.Session) -> None:
    """Take out of an environment all that an install wrote."""
    graft(session, "uninstall")


@nox.session(reuse_venv=True, default=False)
def drift(session: nox.Session) -> None:
    """Show what changed upstream around the fix, in every release and vLLM within reach."""
    graft(session, "drift")
