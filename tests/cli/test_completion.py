"""`gatekeeper --completion`: what the scripts for the shells complete."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gatekeeper.cli import COMMANDS, main

SHELLS = ("bash", "zsh", "fish")
BASH = shutil.which("bash") or "bash"


def script_for(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["--completion", shell])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "completion.bash"
    path.write_text(script_for("bash", capsys))
    return path


def completed(script: Path, *words: str) -> set[str]:
    """Return what bash offers for the last word, which may be empty."""
    program = (
        'source "$1"; shift; COMP_WORDS=(gatekeeper "$@"); COMP_CWORD=$#; COMP_TYPE=9\n'
        'compopt() { :; }\n_shtab_gatekeeper\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        [BASH, "--norc", "-c", program, "bash", str(script), *words],
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_every_option_is_in_the_script(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script_for(shell, capsys)
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out.partition("\n\n")[0]))
        assert {"--config", "--json"} <= options
        assert command in text
        for option in options:
            name = option.removeprefix("--") if shell == "fish" else option
            assert name in text, (command, option)
    found = shutil.which(shell)
    if found is not None:  # each shell that is here takes the script
        checked = subprocess.run(
            [found, "-n"], input=text, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("health",), {"healthcheck"}),
        (("check", "--allow"), {"--allow-address"}),
        (("identity", "d"), {"directory"}),
        (("lint", "--format", "s"), {"sarif"}),
        (("fetch", "--config", "gate"), {"gatekeeper.toml"}),
        (("fetch", "-o", "pa"), {"pages"}),
        (("compose", "frag"), {"fragment.txt"}),
    ],
)
def test_bash_completes_commands_options_choices_and_files(
    bash: Path, words: tuple[str, ...], offered: set[str]
) -> None:
    for name in ("gatekeeper.toml", "fragment.txt"):
        (bash.parent / name).touch()
    (bash.parent / "pages").mkdir()
    assert completed(bash, *words) == offered


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--completion", "cmd"])
    assert ended.value.code == 2
    assert "choose from" in capsys.readouterr().err


def test_completion_without_its_extra_is_an_error_of_one_line() -> None:
    code = "import sys; sys.modules['shtab'] = None\nfrom gatekeeper.cli import main\n"
    code += "sys.exit(main(['--completion', 'bash']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gatekeeper: --completion needs shtab: pip install ")
    assert "robots-gatekeeper[cli]" in done.stderr
    assert len(done.stderr.splitlines()) == 1
