"""Training of a tool-using policy: search environment, rollout engines, algorithms, parallel trainer."""
