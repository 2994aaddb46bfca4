"""Reads the files that settings name, and the configuration file itself."""

from __future__ import annotations

import errno
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from gatekeeper.errors import ConfigError

MAX_FILE = 4 * 1024 * 1024
"""Maximum size in bytes of a file that a setting names."""


def read_file(path: str | Path) -> tuple[bytes, int]:
    """Return the content and the mode of a file that a setting names. Raises OSError.

    It must be a regular file or the null device: a reload reads the file again, and opening a pipe
    would wait for a writer.
    """

    def open_nonblocking(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    with open(path, "rb", opener=open_nonblocking) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) and str(path) != os.devnull:
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        body = file.read(MAX_FILE + 1)
    if len(body) > MAX_FILE:
        raise OSError(errno.EFBIG, f"it is longer than {MAX_FILE >> 20} MiB", str(path))
    return body, stat.S_IMODE(status.st_mode)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the configuration file without checking its settings. Raises ConfigError."""
    try:
        return tomllib.loads(read_file(path)[0].decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read ({error.strerror}); give --config a readable TOML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: not UTF-8; save it in UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
