"""The gate as a process of its own, spoken to over HTTP."""
