"""Ask first, then wait your turn: an asynchronous robots.txt gate for polite crawlers."""
