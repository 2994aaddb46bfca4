"""The parts of `RemoteGatekeeper`: the connection to a sidecar, questions and leases."""
