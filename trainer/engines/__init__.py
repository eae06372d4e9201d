"""Rollout engines: ``engine`` is the protocol.

``hf`` runs in this process (``slot_model``, ``slot_attention``, ``slots``, ``sampler`` are its parts); ``http`` asks a
server, ``vllm`` and ``sglang`` say how; ``weights`` brings new weights to any of them.
"""
