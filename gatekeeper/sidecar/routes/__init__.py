"""What the service answers: one module a subject, each with its `ROUTES`."""
