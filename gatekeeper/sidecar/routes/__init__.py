"""The handlers of the service: one module for each subject, each with its `ROUTES`."""
