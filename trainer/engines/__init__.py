"""Rollout engines: ``engine`` is the protocol; one file an engine."""
