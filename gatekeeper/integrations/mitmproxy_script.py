"""The file for `mitmdump -s`, whose path `gatekeeper proxy --script` prints."""

from __future__ import annotations

from gatekeeper.integrations.mitmproxy import PoliteScript

addons: list[object] = [PoliteScript()]
