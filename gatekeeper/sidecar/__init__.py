"""The sidecar: a gate in a process of its own that clients reach over HTTP."""
