"""The parts of `RemoteGatekeeper`: the line to a sidecar, and what travels over it."""
