"""Home of the ops: ``trace_fast.kernels.<op>``; implementations are chosen in ``trace_fast.backends``.

The folders lie in ``kernels/`` at the top of the repository and are installed below this package.
"""
