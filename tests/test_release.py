"""What a release is made of: the workflows, the version in every file, the change log."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

import gatekeeper

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EVERY = [*WORKFLOWS, ROOT / "examples" / "robots-txt.yml"]
REPOSITORY = "https://github.com/robots-gatekeeper/gatekeeper"


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.name)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(yaml.safe_load(request.param.read_text("utf-8")))


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def commands(workflow: dict[str, Any]) -> list[str]:
    return [step["run"] for step in steps(workflow) if "run" in step]


def test_there_is_a_workflow_for_each_occasion() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "image.yml", "long.yml", "release.yml"]


def test_every_action_is_pinned_by_a_full_hash_with_its_version_beside_it() -> None:
    """A tag can be moved to other code, a hash can't. One version of each action is enough."""
    pinned = re.compile(r"uses: ([\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)$")
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path in EVERY:
        for line in path.read_text("utf-8").splitlines():
            if "uses:" in line:
                match = pinned.search(line)
                assert match is not None, f"{path.name}: {line.strip()}"
                found[match[1]].add((match[2], match[3]))
    assert found
    assert {name: pins for name, pins in found.items() if len(pins) > 1} == {}


def test_a_workflow_has_no_right_that_a_job_does_not_ask_for(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        assert "permissions" in job, name
        assert job["timeout-minutes"] <= 360, name
        writes = {right for right, level in job["permissions"].items() if level == "write"}
        assert not writes or name in {"index", "page", "push"}, name


def test_a_checkout_leaves_no_token_behind(workflow: dict[str, Any]) -> None:
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_no_command_has_a_value_of_github_in_its_text(workflow: dict[str, Any]) -> None:
    """Whoever names a branch could run commands: values come by the environment."""
    assert [one for one in commands(workflow) if "${{" in one] == []


def test_a_command_of_this_repository_is_there_and_may_be_run(workflow: dict[str, Any]) -> None:
    text = "\n".join(commands(workflow))
    for name in re.findall(r"(?<!\S)\.ci/\w+", text):
        assert (ROOT / name).stat().st_mode & 0o111, name
    for name in re.findall(r"(?<!\S)tests/[\w/.]+", text):
        assert (ROOT / name).exists(), name


def test_every_supported_python_is_tested_and_gets_a_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(settings["project"]["classifiers"]))
    built = settings["tool"]["cibuildwheel"]["build"]
    assert built.split() == [f"cp{one.replace('.', '')}-*" for one in classified]
    checked = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    oldest, newest = classified[0], classified[-1]
    assert settings["project"]["requires-python"] == f">={oldest}"
    assert checked["jobs"]["library"]["strategy"]["matrix"]["python"] == [oldest, newest]
    (setup,) = (one for one in checked["jobs"]["linux"]["steps"] if "setup-python" in str(one))
    assert {oldest, newest} <= set(setup["with"]["python-version"].split())


def test_the_repository_has_one_address() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    urls = settings["project"]["urls"]
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} <= urls.keys()
    assert all(one.startswith(REPOSITORY) for one in urls.values())
    assert f"repository-code: {REPOSITORY}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f'"{REPOSITORY}"' in (ROOT / "Dockerfile").read_text("utf-8")
    others = [
        f"{path.relative_to(ROOT)}: {found}"
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for found in re.findall(r"https://github\.com/[\w-]+/gatekeeper\b", path.read_text("utf-8"))
        if found != REPOSITORY
    ]
    assert others == []


def version(*tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / ".ci" / "version"), *tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_file_names_the_same_version() -> None:
    done = version()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{gatekeeper.__version__}\n", "")


def test_a_release_with_another_tag_is_refused() -> None:
    done = version("v9.9.9")
    assert (done.returncode, done.stdout.strip()) == (
        1,
        f"the tag: 9.9.9, but the package is {gatekeeper.__version__}",
    )


def test_the_notes_of_a_release_are_its_section_of_the_change_log() -> None:
    done = version(f"v{gatekeeper.__version__}")
    assert done.returncode == 0
    assert "\n### Added\n" in done.stdout
    assert "\n## " not in done.stdout
    assert "[Unreleased]:" not in done.stdout
    for link in re.findall(r"\]\(([^)#]+)", done.stdout):
        path = link.removeprefix(f"{REPOSITORY}/blob/v{gatekeeper.__version__}/")
        assert (ROOT / path).exists(), link


def test_the_change_log_keeps_its_form() -> None:
    """Keep a Changelog 1.1.0: newest first, each release dated, and six kinds of changes."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    releases = [re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d)", one) for one in headings[1:]]
    assert all(releases), headings
    days = [date.fromisoformat(one[1]) for one in releases if one is not None]
    assert days == sorted(days, reverse=True)
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for one in headings:
        name = one.partition("]")[0] + "]"
        assert re.search(rf"^{re.escape(name)}: {REPOSITORY}/\S+$", text, re.MULTILINE), name


def test_the_image_has_one_name() -> None:
    settings = yaml.safe_load((ROOT / ".github" / "workflows" / "image.yml").read_text("utf-8"))
    assert f'IMAGE = "{settings["env"]["IMAGE"]}"' in (ROOT / ".ci" / "version").read_text("utf-8")
