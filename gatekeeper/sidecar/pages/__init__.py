"""For operators: what feeds their pages, and the pages under `/ui/`."""
