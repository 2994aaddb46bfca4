"""The package depends only on its declared requirements (T18)."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import gatekeeper

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gatekeeper"
RUNTIME = {"aiohttp", "cachetools", "msgspec", "prometheus-client", "yarl"}
EXTRAS = {
    "crawlee": "crawlee",
    "cryptography": "sign",
    "httpcore": "httpx",
    "httpcore2": "httpx2",
    "httpx": "httpx",
    "httpx2": "httpx2",
    "mcp": "mcp",
    "mitmproxy": "mitmproxy",
    "opentelemetry": "otel",
    "playwright": "playwright",
    "publicsuffixlist": "psl",
    "pydantic": "mcp",
    "pytest": "testing",
    "redis": "redis",
    "requests": "requests",
    "rich": "cli",
    "shtab": "cli",
    "urllib3": "requests",
    "scrapy": "scrapy",
    "uvloop": "speed",
    "warcio": "warc",
}
"""Module -> the extra that brings it."""
STANDS_ON = {"scrapy": {"twisted"}}
"""Package of an extra -> modules that it is made of, so that who has it has them."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def test_the_distribution_has_a_name_of_its_own(project: dict[str, Any]) -> None:
    """`gatekeeper` is taken on the package index; `uvx NAME` needs a command of that name."""
    assert project["name"] == "robots-gatekeeper"
    scripts = {"gatekeeper", "robots-gatekeeper"}
    assert project["scripts"] == dict.fromkeys(scripts, "gatekeeper.__main__:main")
    assert project["dynamic"] == ["version"]
    assert re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", gatekeeper.__version__)


def test_the_image_has_every_file_that_the_build_reads() -> None:
    """A wheel is built from what the Dockerfile copies, and from nothing else."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        "pyproject.toml",
        settings["project"]["readme"],
        *settings["project"]["license-files"],
        *wheel["packages"],
        *(hook["path"] for hook in wheel["hooks"].values()),
    }
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]}
    assert needed <= copied
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    assert needed <= {line.removeprefix("!") for line in ignored if line.startswith("!")}


def test_every_message_about_installing_names_the_distribution() -> None:
    """A user who follows a message must not install the other project."""
    wrong = re.compile(
        r"pip install '?+(?!robots-gatekeeper\b|\.|--group|-)|(?<!robots-)gatekeeper\["
    )
    told = [
        (str(path.relative_to(ROOT)), line)
        for path in [
            *PACKAGE.rglob("*.py"),
            *ROOT.glob("*.md"),
            *(ROOT / "docs").rglob("*.md"),
            ROOT / "pyproject.toml",
        ]
        for line in path.read_text(encoding="utf-8").splitlines()
        if wrong.search(line)
    ]
    assert told == []


class _Imports(ast.NodeVisitor):
    """Collects the top-level modules that a module imports, and whether it imports them lazily."""

    def __init__(self) -> None:
        self.found: list[tuple[str, bool]] = []
        self._depth = 0

    def _inside(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            self._inside(node)
        else:
            self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _inside

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._note(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute"
        self._note(node.module or "")

    def _note(self, module: str) -> None:
        self.found.append((module.partition(".")[0], self._depth > 0))


def imports() -> Iterator[tuple[str, str, bool]]:
    """Yield (file, top-level module, whether lazy) for third-party imports."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for module, lazy in _imported(path):
            if module != "gatekeeper" and module not in sys.stdlib_module_names:
                yield str(path.relative_to(ROOT)), module, lazy


def test_t18_the_runtime_dependencies_are_five(project: dict[str, Any]) -> None:
    assert {name_of(one) for one in project["dependencies"]} == RUNTIME


def test_t18_every_runtime_dependency_has_a_lower_bound(project: dict[str, Any]) -> None:
    assert [one for one in project["dependencies"] if ">=" not in one] == []


def test_t18_no_requirement_names_a_url(project: dict[str, Any]) -> None:
    """A URL would bypass the index, and the hashes of a lock file."""
    every = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    assert [one for one in every if "@" in one or "://" in one] == []


def test_t18_what_is_imported_at_once_is_a_runtime_dependency() -> None:
    modules = {name.replace("-", "_") for name in RUNTIME}
    of_extras = ("gatekeeper/integrations/", "gatekeeper/testing/")
    foreign = [
        (file, name)
        for file, name, lazy in imports()
        if not lazy and name not in modules and not file.startswith(of_extras)
    ]
    assert foreign == []


def test_t18_what_is_imported_lazily_is_an_extra(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    modules = {name.replace("-", "_") for name in RUNTIME}
    for file, imported, _ in imports():
        if imported in modules:
            continue
        module = next((one for one, parts in STANDS_ON.items() if imported in parts), imported)
        assert module in EXTRAS, f"{file} imports {module}, which nobody declared"
        brought = " ".join(map(name_of, extras[EXTRAS[module]]))
        assert module in brought, f"the extra {EXTRAS[module]} does not bring {module}"


def test_t18_importing_everything_brings_no_extra_in() -> None:
    """Import every module in a fresh interpreter in which no extra can be imported."""
    modules = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        # An integration needs its library.
        if path.stem != "__main__" and path.parent.name not in ("integrations", "testing")
    )
    code = (
        "import importlib, sys\n"
        f"for name in {sorted(EXTRAS)!r}:\n"
        "    sys.modules[name] = None\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_says_which_extra_it_needs() -> None:
    libraries = ("crawlee", "httpx", "httpx2", "mcp", "mitmproxy", "playwright", "requests")
    paths = ["testing", *(f"integrations.{name}" for name in (*libraries, "scrapy"))]
    code = (
        "import importlib, sys\n"
        f"for name in {sorted(EXTRAS)!r}:\n"
        "    sys.modules[name] = None\n"
        f"for path in {paths!r}:\n"
        "    try:\n"
        "        importlib.import_module('gatekeeper.' + path)\n"
        "    except ImportError as error:\n"
        "        print(type(error).__name__ + ':', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for path, told in zip(paths, done.stdout.splitlines(), strict=True):
        extra = path.rpartition(".")[2]
        assert f"MissingExtra: gatekeeper.{path} needs " in told
        assert f"pip install 'robots-gatekeeper[{extra}]'" in told


def test_t18_the_package_runs_no_code_of_others() -> None:
    """Nothing unpickles, evaluates or shells out: what a site sends stays text."""
    forbidden = {"pickle", "marshal", "shelve", "dill", "subprocess", "ctypes", "runpy"}
    used = [
        (str(path.relative_to(ROOT)), module)
        for path in sorted(PACKAGE.rglob("*.py"))
        for module, _ in _imported(path)
        if module in forbidden
    ]
    assert used == [
        # As in Scrapy's own disk queues: JOBDIR contains only data of its crawls.
        ("gatekeeper/integrations/scrapy.py", "pickle"),
    ]


@functools.cache
def _imported(path: Path) -> list[tuple[str, bool]]:
    visitor = _Imports()
    visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
    return visitor.found
