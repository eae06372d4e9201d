"""Facade over the op folders: each op is imported from here, implementations are chosen in ``backends``.

The folders lie in ``kernels/`` at the top of the repository and are installed as ``trace_fast.kernels.<op>``.
"""
