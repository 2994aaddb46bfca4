"""The operators' pages under `/ui/`, and the data that they show."""
