"""A wheel whose hot modules are compiled, by mypyc: `GATEKEEPER_COMPILE=1 pip install .`

Without the variable, or where compiling fails, the wheel is pure Python, as it always is for an
editable install. docs/wheels.md says how wheels for a release are made.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULES = ("groups", "longest", "parser", "patterns", "policy", "rules")
"""Of `gatekeeper.robots`: where rules are chosen and answers found."""
OPTIONS = ("--ignore-missing-imports", "--follow-imports=silent", "--config-file=")


class CompileHook(BuildHookInterface):
    """Compiles where it was asked for."""

    def _wanted(self, version: str = "standard") -> bool:
        asked = os.environ.get("GATEKEEPER_COMPILE", "") not in {"", "0"}
        return asked and version == "standard" and self.target_name == "wheel"

    def dependencies(self) -> list[str]:
        """What compiling takes, in the environment that builds."""
        # mypyc must see that msgspec's classes have a metaclass: it compiles no such class.
        return ["mypy[mypyc]>=1.14", "msgspec>=0.20", "setuptools"] if self._wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and put what came of it beside the modules."""
        if not self._wanted(version):
            return
        self._room = tempfile.TemporaryDirectory()
        try:
            found = self._compile(Path(self._room.name))
        # Whatever it is, a pure wheel works as well.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self.app.display_warning(f"not compiled, the wheel is pure Python: {error}")
            return
        build_data["force_include"].update({str(path): name for name, path in found.items()})
        build_data["infer_tag"] = True
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Leave nothing behind."""
        if hasattr(self, "_room"):
            self._room.cleanup()

    def _compile(self, room: Path) -> dict[str, Path]:
        """The compiled modules by their place in the wheel."""
        from mypyc.build import mypycify  # noqa: PLC0415 - there only where it was asked for
        from setuptools import Distribution  # noqa: PLC0415

        before = Path.cwd()
        os.chdir(self.root)
        try:
            sources = [f"gatekeeper/robots/{name}.py" for name in MODULES]
            given = [*OPTIONS, f"--cache-dir={room / 'cache'}", *sources]
            extensions = mypycify(given, target_dir=str(room / "c"), group_name="gatekeeper_robots")
            command = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
            command.build_lib, command.build_temp = str(room / "lib"), str(room / "objects")
            command.ensure_finalized()
            command.run()
        finally:
            os.chdir(before)
        suffix = ".pyd" if sys.platform == "win32" else ".so"
        made = (room / "lib").rglob(f"*{suffix}")
        return {path.relative_to(room / "lib").as_posix(): path for path in made}
