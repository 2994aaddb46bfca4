"""The options of the command line."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.corpus import Site, generate, load

__all__ = ["Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """Options for every benchmark."""

    corpus: str | None = None
    """A file of JSON lines; None: generated sites."""
    quick: bool = False
    """Fewer rounds and smaller inputs: a minute or two for everything."""

    def sites(self) -> list[Site]:
        """Return the sites to measure with."""
        sites = load(self.corpus) if self.corpus else generate()
        return sites[:150] if self.quick else sites

    def rounds(self, *, quick: int, full: int) -> int:
        """Return the number of rounds to run."""
        return quick if self.quick else full
