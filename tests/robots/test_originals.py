"""The examples of the original texts do what the texts say they do.

The lines of the examples are those of "A Standard for Robot Exclusion" (1994), of a magazine
page about it (which left out the blank line), and of a machine translation of it (which put
blanks into the paths).
"""

from __future__ import annotations

import pytest

from gatekeeper.robots import Dialect, RobotsTxt

MAP = """\
# robots.txt for http://www.example.com/

User-agent: *
Disallow: /cyberworld/map/ # This is an infinite virtual URL space
Disallow: /tmp/ # these will soon disappear
Disallow: /foo.html
"""
CYBERMAPPER = """\
# robots.txt for http://www.example.com/

User-agent: *
Disallow: /cyberworld/map/ # This is an infinite virtual URL space

# Cybermapper knows where to go.
User-agent: cybermapper
Disallow:
"""
GO_AWAY = """\
# go away
User-agent: *
Disallow: /
"""
WITHOUT_A_BLANK_LINE = """\
# Sample robots.txt file
User-agent: *
Disallow: /tmp/documents/
Disallow: /under_construction/
User-agent: Hal-9000
Disallow:
"""
BLANKS_IN_PATHS = """\
# robots.txt สำหรับ http://www.example.com/

User-agent: *
Disallow: / cyberworld / แผนที่ / # นี้พื้นที่ URL อนันต์เสมือนเป็น
Disallow: / tmp / # เหล่านี้จะหายไปเร็ว ๆ นี้
Disallow: / foo.html

Cybermapper # รู้ที่จะไป
User-agent: cybermapper
ไม่อนุญาต:
"""


@pytest.mark.parametrize("dialect", ["auto", *Dialect])
@pytest.mark.parametrize(
    ("text", "agent", "path", "allowed"),
    [
        (MAP, "anybot", "/cyberworld/map/1", False),
        (MAP, "anybot", "/tmp/x", False),
        (MAP, "anybot", "/foo.html", False),
        (MAP, "anybot", "/foo", True),
        (MAP, "anybot", "/cyberworld/", True),
        (CYBERMAPPER, "cybermapper", "/cyberworld/map/1", True),
        (CYBERMAPPER, "anybot", "/cyberworld/map/1", False),
        (GO_AWAY, "anybot", "/", False),
        (WITHOUT_A_BLANK_LINE, "Hal-9000", "/tmp/documents/a", True),
        (WITHOUT_A_BLANK_LINE, "anybot", "/tmp/documents/a", False),
        (WITHOUT_A_BLANK_LINE, "anybot", "/under_construction/", False),
        (WITHOUT_A_BLANK_LINE, "anybot", "/tmp/", True),
        (BLANKS_IN_PATHS, "anybot", "/index.html", True),
        (BLANKS_IN_PATHS, "anybot", "/%20tmp%20/", False),
        (BLANKS_IN_PATHS, "cybermapper", "/%20tmp%20/", True),
    ],
)
def test_each_example_of_the_original_documents_holds(
    dialect: str, text: str, agent: str, path: str, allowed: bool
) -> None:
    policy = RobotsTxt.parse(text, dialect=dialect).policy(agent)
    assert policy.allowed(path) is allowed
    assert policy.match(path).allowed is allowed
