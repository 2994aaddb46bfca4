"""Scrapy fetches what robots.txt forbids, if requests wait for that file together: minimal program.

`python benchmarks/manners_scrapy.py` needs Scrapy alone. One server on loopback forbids everything,
and one spider starts with five of its URLs. It prints the paths that the server was asked for: with
Scrapy 2.13 /robots.txt only, from 2.14 on the third, fourth and fifth URL as well.

The cause, in `scrapy/downloadermiddlewares/robotstxt.py`: requests that find the file on its way
wait for one shared Deferred (`await maybe_deferred_to_future(self._parsers[netloc])`). Twisted's
`Deferred.asFuture` consumes the result for the first that waits: its callback returns None, which
is the result for every later callback of the same Deferred. `robot_parser` then returns None,
and `process_request_2` takes None for "no rules". Up to 2.13 each waiting request had a Deferred of
its own, and the callback returned the result.
"""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

asked: list[str] = []


class Site(BaseHTTPRequestHandler):
    """Forbids every path, and answers every path."""

    def do_GET(self) -> None:
        asked.append(self.path)
        body = b"User-agent: *\nDisallow: /\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def main() -> None:
    """Crawl the site, and print what it was asked for."""
    import scrapy
    from scrapy.crawler import CrawlerProcess

    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    class Spider(scrapy.Spider):  # type: ignore[misc]
        name = "waiting"
        start_urls = [f"http://127.0.0.1:{server.server_port}/{n}" for n in range(1, 6)]  # noqa: RUF012

    process = CrawlerProcess({"ROBOTSTXT_OBEY": True, "LOG_ENABLED": False})
    process.crawl(Spider)
    process.start()
    server.shutdown()
    sys.stdout.write(f"Scrapy {scrapy.__version__}: {' '.join(sorted(asked))}\n")


if __name__ == "__main__":
    main()
