"""Files that commands write with `-o`."""

from __future__ import annotations

import os
from pathlib import Path

from gatekeeper.sites.texts import replace_file


def test_a_pipe_in_place_of_a_file_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_file(pipe, b"text")
        assert os.read(reading, 100) == b"text"
        assert not pipe.is_file()
    finally:
        os.close(reading)
