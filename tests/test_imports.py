"""The cost of imports: the modules loaded, and the time relative to a bare start of Python."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import gatekeeper
import gatekeeper.errors
import gatekeeper.robots
from gatekeeper.cli import COMMANDS
from gatekeeper.late import lazily

HEAVY = ("aiohttp", "asyncio", "yarl", "prometheus_client", "sqlite3", "ssl", "email", "idna")
PACKAGES = [gatekeeper, gatekeeper.robots, gatekeeper.errors]


def interpreted(code: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )


def brought_in(code: str, *names: str) -> list[str]:
    """Return which of the modules a fresh interpreter has loaded after running the code."""
    told = (
        f"import sys\nbefore = {{*sys.modules}}\n{code}\n"
        f"print(*[name for name in {names!r} if name in {{*sys.modules}} - before])"
    )
    return interpreted(told).stdout.splitlines()[-1].split()


def bare_starts(*options: str) -> float:
    """Return a fresh interpreter's CPU time relative to a bare one: the least of several pairs,
    run alternately, so that other load affects both."""
    code = (
        "import resource, subprocess, sys\n"
        "def spent():\n"
        "    whole = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "    return whole.ru_utime + whole.ru_stime\n"
        "def run(*options):\n"
        "    before = spent()\n"
        "    subprocess.run([sys.executable, *options], stdout=subprocess.DEVNULL)\n"
        "    return spent() - before\n"
        f"pairs = [(run(*{options!r}), run('-c', 'pass')) for _ in range(5)]\n"
        "print(min(one for one, _ in pairs) / min(bare for _, bare in pairs))\n"
    )
    return float(interpreted(code).stdout)


@pytest.mark.parametrize("code", ["import gatekeeper", "import gatekeeper.robots"])
def test_an_import_of_the_package_loads_no_expensive_module(code: str) -> None:
    assert brought_in(code, *HEAVY, "msgspec", "gatekeeper.gate", "gatekeeper.urls") == []


ONE_FILE = (
    "from gatekeeper.robots import RobotsTxt\n"
    "text = 'User-agent: *\\nDisallow: /x\\nAllow: /x/y\\nCrawl-delay: 3\\nSitemap: /s'\n"
    "policy = RobotsTxt.parse(text).policy('examplebot')\n"
    "assert policy.allowed('/x/y') and not policy.allowed('/x?b')\n"
)


def test_the_parser_imports_no_http_client() -> None:
    code = (
        ONE_FILE + "from gatekeeper import InvalidURL\n"
        "assert policy.allowed('https://example.org/a?b') and policy.crawl_delay == 3\n"
        "assert not policy.match('https://example.org/x').allowed"
    )
    assert brought_in(code, *HEAVY, "gatekeeper.gate", "gatekeeper.sites") == []


def test_a_gate_alone_brings_in_no_product_but_the_middleware() -> None:
    products = "cli client crawl fleet queue sidecar signing sites sync terminal testing"
    code = "import gatekeeper\ngatekeeper.Gatekeeper('testbot/1.0')"
    assert brought_in(code, *(f"gatekeeper.{name}" for name in products.split())) == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_of_a_package_can_be_imported(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert set(names) <= set(dir(package))
    for name in names:
        assert inspect.getdoc(getattr(package, name)), name
    star: dict[str, object] = {}
    exec(f"from {package.__name__} import *", star)  # type: ignore[attr-defined]
    assert set(names) <= set(star)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_the_names_type_checkers_see_are_those_at_run_time(package: object) -> None:
    """Compare the imports under TYPE_CHECKING with the names found at run time."""
    tree = ast.parse(Path(inspect.getfile(package)).read_text(encoding="utf-8"))  # type: ignore[arg-type]
    seen: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                assert isinstance(each, ast.ImportFrom)
                module = importlib.import_module(each.module or "")
                for alias in each.names:
                    seen[alias.asname or alias.name] = getattr(module, alias.name)
    assert seen
    assert set(seen) <= set(package.__all__)  # type: ignore[attr-defined]
    for name, value in seen.items():
        assert getattr(package, name) is value


def test_help_of_the_package_shows_its_public_names() -> None:
    text = pydoc.plain(pydoc.render_doc(gatekeeper))
    for name in ("Gatekeeper", "PoliteQueue", "polite_session", "RobotsTxt", "Denied"):
        assert name in text
    assert "class Denied" in pydoc.plain(pydoc.render_doc(gatekeeper.errors))


def test_modules_are_attributes_of_their_package() -> None:
    code = "import gatekeeper; gatekeeper.session.polite_session; gatekeeper.robots.parser"
    assert brought_in(code, "gatekeeper.session") == ["gatekeeper.session"]


def test_a_missing_name_raises_the_usual_import_error() -> None:
    for package in PACKAGES:
        for name in ("Gatekeper", "_private", "__wrapped__"):
            assert not hasattr(package, name)
    with pytest.raises(ImportError, match="cannot import name 'Gatekeper'"):
        exec("from gatekeeper import Gatekeper")


def test_a_module_that_is_broken_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "broken_package_of_a_test"
    room.mkdir()
    (room / "__init__.py").touch()
    (room / "part.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module(room.name)
    find, names, _ = lazily(room.name, {f"{room.name}.part": "thing"})
    assert "thing" in names()
    for name in ("part", "thing"):
        with pytest.raises(ModuleNotFoundError, match="nobody_has"):
            find(name)
    del sys.modules[room.name]


def test_errors_are_in_the_module_errors() -> None:
    from gatekeeper import Deferred, Denied, LeaseTimeout

    for error in (Denied, Deferred, LeaseTimeout):
        assert error.__module__ == "gatekeeper.errors"
        assert getattr(gatekeeper.errors, error.__name__) is error
    made = pickle.loads(pickle.dumps(LeaseTimeout("http://a/", "no lease")))
    assert (made.url, str(made)) == ("http://a/", "no lease")


def test_every_module_that_logs_has_the_null_handler() -> None:
    """Each module that logs brings the null handler, also if it is imported alone."""
    root = Path(gatekeeper.__file__).parent
    logging_modules = [
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in root.rglob("*.py")
        if "getLogger" in path.read_text("utf-8") and "integrations" not in path.parts
    ]
    assert len(logging_modules) > 20
    # An import ends as soon as it brings the handler: the rest of each would take seconds in all.
    code = "\n".join(
        [
            "import importlib, logging, sys",
            "class Brought(BaseException): pass",
            "def bring(handler):",
            "    assert isinstance(handler, logging.NullHandler)",
            "    raise Brought",
            "logging.getLogger('gatekeeper').addHandler = bring",
            f"for name in {logging_modules!r}:",
            "    for other in [n for n in sys.modules if n.partition('.')[0] == 'gatekeeper']:",
            "        del sys.modules[other]",
            "    try:",
            "        importlib.import_module(name)",
            "        print(name)",
            "    except Brought:",
            "        pass",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["gatekeeper", "gatekeeper.__main__", "gatekeeper.robots"])
def test_ctrl_c_finds_next_to_nothing_that_is_imported_before_it_is_caught(name: str) -> None:
    """A Ctrl-C during imports before `main` would print a traceback."""
    assert brought_in(f"import {name}", "logging", "re", "msgspec") == []


# --- the command ------------------------------------------------------------------------


def modules_of(*arguments: str) -> list[str]:
    """Return the modules that the command imports, in order."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from gatekeeper.__main__ import main\n"
        f"sys.argv[1:] = {list(arguments)!r}\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(*[name for name in sys.modules if name not in before], file=sys.stderr)\n"
    )
    return interpreted(code).stderr.splitlines()[-1].split()


@pytest.fixture
def robots_txt(tmp_path: Path) -> str:
    path = tmp_path / "robots.txt"
    path.write_text("User-agent: *\nDisallow: /private\n")
    return str(path)


def test_ctrl_c_during_imports_ends_the_command_silently(robots_txt: str) -> None:
    names = [name for name in modules_of("lint", robots_txt) if name.startswith("gatekeeper.")]
    ours = names[names.index("gatekeeper.__main__") + 1 :]
    assert len(ours) > 10
    for name in (*ours[:4], ours[len(ours) // 2], ours[-1], "argparse", "msgspec"):
        code = (
            "import signal, sys\n"
            "class Interrupt:\n"
            "    def find_spec(self, name, *more):\n"
            f"        if name == {name!r}:\n"
            "            signal.raise_signal(signal.SIGINT)\n"
            "sys.meta_path.insert(0, Interrupt())\n"
            f"sys.argv[1:] = ['lint', {robots_txt!r}]\n"
            "from gatekeeper.__main__ import main\n"
            "sys.exit(main())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
        )
        assert (name, done.returncode, done.stderr) == (name, 130, "")


def test_help_of_the_command_brings_in_no_command() -> None:
    names = modules_of("--help")
    assert [name for name in names if name in HEAVY or name == "msgspec"] == []
    assert [name for name in names if name.startswith("gatekeeper.cli.")] == []


def test_lint_of_a_file_brings_in_nothing_of_the_network(robots_txt: str) -> None:
    names = modules_of("lint", robots_txt)
    assert [name for name in names if name in HEAVY] == []
    assert [name for name in names if name.startswith("gatekeeper.storage")] == []


def test_modules_imported_by_the_command_are_frozen_for_the_collector() -> None:
    code = (
        "import gc, sys\n"
        "from gatekeeper.__main__ import main\n"
        "sys.argv[1:] = ['serve', '--port', 'none']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    import gatekeeper.sidecar.process\n"
        "print(sum(one['collections'] for one in gc.get_stats()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 20  # over a hundred otherwise


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_imports_no_other(name: str) -> None:
    shared = {"config", "healthcheck"}  # used by other commands, too
    others = {f"gatekeeper.cli.{other}" for other in COMMANDS if other not in {name, *shared}}
    assert others.isdisjoint(modules_of(name, "--help"))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_of_its_own(name: str) -> None:
    example = importlib.import_module(f"gatekeeper.cli.{name}").EXAMPLE
    assert example.startswith(f"gatekeeper {name} ")


def test_the_command_starts_within_a_few_bare_starts_of_python(robots_txt: str) -> None:
    """The goal is 150 ms; a bare start of Python takes about 9 ms."""
    assert bare_starts("-m", "gatekeeper", "--help") < 10
    assert bare_starts("-m", "gatekeeper", "lint", robots_txt) < 24
